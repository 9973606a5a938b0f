"""Builds the models of KServe's SDK from the objects on stdin (a JSON list), and prints what they do not accept.

It runs in an environment of its own: the SDK's pins conflict with ours.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import kserve.models
import kubernetes.client.models

KINDS = {
    ("serving.kserve.io/v1beta1", "InferenceService"): "V1beta1InferenceService",
    ("serving.kserve.io/v1alpha1", "LLMInferenceService"): "V1alpha1LLMInferenceService",
    ("serving.kserve.io/v1alpha1", "LocalModelNamespaceCache"): "V1alpha1LocalModelNamespaceCache",
}


def mistakes(type_name: str, value: Any, path: str) -> Iterator[str]:
    """Check that *value* is what the SDK's type of this name holds: no unknown field, none that is required missing."""
    if match := re.fullmatch(r"(?:list\[|dict\(str, )(.+)[\])]", type_name):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from mistakes(match[1], item, f"{path}.{key}")
        return
    model = getattr(kserve.models, type_name, None) or getattr(kubernetes.client.models, type_name, None)
    if model is None or not isinstance(value, dict):
        return
    attributes = {field: attribute for attribute, field in model.attribute_map.items()}
    yield from (f"{path}.{field} is unknown" for field in value if field not in attributes)
    known = {field: item for field, item in value.items() if field in attributes}
    for field, item in known.items():
        yield from mistakes(model.openapi_types[attributes[field]], item, f"{path}.{field}")
    try:
        model(**{attributes[field]: item for field, item in known.items()})
    except (ValueError, TypeError) as error:
        yield f"{path}: {error}"


def main() -> None:
    checked = []
    for body in json.load(sys.stdin):
        if type_name := KINDS.get((body["apiVersion"], body["kind"])):
            checked.append(body["kind"])
            for mistake in mistakes(type_name, body, body["kind"]):
                print(mistake)
    print(" ".join(checked), file=sys.stderr)


if __name__ == "__main__":
    main()
