"""The JSON Schema of ``production_metrics.json``, from the record and its docstrings.

python -m tests.stages.select.production_schema > docs/production_metrics.schema.json
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any, Final

from scoring import results
from stages.parts.machine import hardware
from stages.parts.records import evaluation, production
from stages.parts.records.production import Production

PATH: Final = Path(__file__).parents[3] / "docs" / "production_metrics.schema.json"
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
IDENTIFIER: Final = "urn:slipway:production_metrics:2"
"""The last part is ``schema_version``."""
MODULES: Final = (production, evaluation, results, hardware)
"""The modules that define the records of the document."""


def schema() -> dict[str, Any]:
    """Generate the schema, draft 2020-12. Like the record, it does not allow unknown fields."""
    generated = Production.model_json_schema(mode="serialization")
    described = _descriptions()
    for name, definition in [*generated.get("$defs", {}).items(), (Production.__name__, generated)]:
        definition.pop("title", None)
        for field, described_field in definition.get("properties", {}).items():
            described_field.pop("title", None)  # it only repeats the name
            if field in described.get(name, {}):
                described_field["description"] = described[name][field]
    return {"$schema": DIALECT, "$id": IDENTIFIER, "title": "production_metrics.json", **generated}


def _descriptions() -> dict[str, dict[str, str]]:
    """Collect the docstring of each field by class, on one line."""
    described: dict[str, dict[str, str]] = {}
    for node in [node for module in MODULES for node in ast.parse(inspect.getsource(module)).body]:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                text = ast.literal_eval(after.value)
                described.setdefault(node.name, {})[field.target.id] = " ".join(str(text).split())
    return described


def text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(text(), end="")
