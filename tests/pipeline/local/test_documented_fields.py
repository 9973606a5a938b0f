"""docs/local-engine.md says what becomes of every field of Argo's; this holds it to the code, and to Argo."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Final

import hera.workflows.models as argo
import pytest
from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from pipeline.local import manifest
from pipeline.local.reading import models
from pipeline.local.workflow import parse
from stages.parts.base.errors import UnsupportedField

DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "local-engine.md"
TASK: Final = {
    "template": "work",
    "arguments": {"parameters": [{"name": "in", "value": "x"}]},
}
SEMAPHORE: Final = {"configMapKeyRef": {"name": "gpus", "key": "limit"}}
CLAIM: Final = {"name": "store", "persistentVolumeClaim": {"claimName": "c"}}
OUTPUT: Final = {"name": "out", "valueFrom": {"path": "/out/x"}}
PROGRAM: Final = {
    "command": ["python"],
    "env": [{"name": "A"}, {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}}],
    "resources": {"limits": {"cpu": "1"}},
    "volumeMounts": [{"name": "store", "mountPath": "/store"}, {"name": "scratch", "mountPath": "/out"}],
}
WHOLE: Final[dict[str, Any]] = {
    "apiVersion": "argoproj.io/v1alpha1",
    "kind": "WorkflowTemplate",
    "metadata": {"name": "whole"},
    "spec": {
        "entrypoint": "main",
        "arguments": {"parameters": [{"name": "p", "value": "1"}]},
        "volumes": [
            {"name": "store", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "scratch", "emptyDir": {}},
        ],
        "synchronization": {"mutexes": [{"name": "m"}], "semaphores": [SEMAPHORE]},
        "templates": [
            {
                "name": "work",
                "inputs": {"parameters": [{"name": "in"}]},
                "outputs": {"parameters": [OUTPUT]},
                "container": PROGRAM,
                "memoize": {"key": "k", "cache": {"configMap": {"name": "c"}}},
                "retryStrategy": {"limit": 1, "retryPolicy": "Always", "backoff": {"duration": "1s"}},
            },
            {"name": "wait", "suspend": {}},
            {
                "name": "main",
                "dag": {
                    "failFast": False,
                    "tasks": [{"name": "a", **TASK}, {"name": "b", "template": "wait", "depends": "a"}],
                },
            },
        ],
    },
}
"""A workflow with each kind of thing that there is here."""
PLACES: Final[dict[str, tuple[str, str]]] = {
    "metadata": ("Metadata", "ObjectMeta"),
    "spec": ("Spec", "WorkflowSpec"),
    "spec.arguments": ("WorkflowArguments", "Arguments"),
    "spec.arguments.parameters[0]": ("Parameter", "Parameter"),
    "spec.volumes[0]": ("Volume", "Volume"),
    "spec.volumes[0].persistentVolumeClaim": ("Claim", "PersistentVolumeClaimVolumeSource"),
    "spec.volumes[1].emptyDir": ("EmptyDir", "EmptyDirVolumeSource"),
    "spec.synchronization": ("Synchronization", "Synchronization"),
    "spec.synchronization.mutexes[0]": ("Mutex", "Mutex"),
    "spec.synchronization.semaphores[0]": ("Semaphore", "SemaphoreRef"),
    "spec.synchronization.semaphores[0].configMapKeyRef": ("ConfigMapKey", "ConfigMapKeySelector"),
    "spec.templates[0]": ("Template", "Template"),
    "spec.templates[0].inputs": ("Inputs", "Inputs"),
    "spec.templates[0].inputs.parameters[0]": ("Input", "Parameter"),
    "spec.templates[0].outputs": ("Outputs", "Outputs"),
    "spec.templates[0].outputs.parameters[0]": ("OutputParameter", "Parameter"),
    "spec.templates[0].outputs.parameters[0].valueFrom": ("ValueFrom", "ValueFrom"),
    "spec.templates[0].container": ("Container", "Container"),
    "spec.templates[0].container.env[1]": ("Env", "EnvVar"),
    "spec.templates[0].container.env[1].valueFrom": ("EnvSource", "EnvVarSource"),
    "spec.templates[0].container.env[1].valueFrom.secretKeyRef": ("SecretKey", "SecretKeySelector"),
    "spec.templates[0].container.resources": ("Resources", "ResourceRequirements"),
    "spec.templates[0].container.volumeMounts[0]": ("VolumeMount", "VolumeMount"),
    "spec.templates[0].memoize": ("Memoize", "Memoize"),
    "spec.templates[0].memoize.cache": ("Cache", "Cache"),
    "spec.templates[0].memoize.cache.configMap": ("ConfigMap", "ConfigMapKeySelector"),
    "spec.templates[0].retryStrategy": ("RetryStrategy", "RetryStrategy"),
    "spec.templates[0].retryStrategy.backoff": ("Backoff", "Backoff"),
    "spec.templates[1].suspend": ("Suspend", "SuspendTemplate"),
    "spec.templates[2].dag": ("Dag", "DAGTemplate"),
    "spec.templates[2].dag.tasks[0]": ("Task", "DAGTask"),
    "spec.templates[2].dag.tasks[0].arguments": ("Arguments", "Arguments"),
    "spec.templates[2].dag.tasks[0].arguments.parameters[0]": ("Argument", "Parameter"),
}
"""Where in WHOLE each of our models is, and whose fields Argo knows there."""
NEWER: Final[dict[str, set[str]]] = {
    "Spec": {"executorPlugins", "podResources", "resourceClaims"},
    "Template": {"pendingTimeout", "podResources", "resourceClaims"},
    "Container": {"restartPolicyRules"},
}
"""Fields of Argo 4.1's CRD that Hera's models don't have."""
BY_THE_SERVER: Final = {"creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid"}
"""metadata that nobody writes into a manifest."""
NOT_MODELS_OF_ARGO: Final = {"Manifest", "PodSpecPatch", "PatchedContainer", "PatchedVolume"}


def fields(model: type[BaseModel]) -> set[str]:
    return {to_camel(name) for name in model.model_fields}


def argos(ours: str, theirs: str) -> set[str]:
    model: type[BaseModel] = getattr(argo, theirs)
    known = {field.alias or name for name, field in model.model_fields.items()} | NEWER.get(ours, set())
    return known - BY_THE_SERVER if ours == "Metadata" else known


def row(place: str) -> str:
    """The line of the table, as the code has it."""
    ours, theirs = PLACES[place]
    supported = fields(getattr(manifest, ours))
    ignored = set(manifest.CLUSTER_ONLY.get(ours, frozenset()))
    refused = argos(ours, theirs) - supported - ignored
    cells = [", ".join(f"`{name}`" for name in sorted(names)) or "–" for names in (supported, ignored, refused)]
    return f"| `{re.sub(r'[0-9]', '', place)}` | {' | '.join(cells)} |"


def test_the_table_says_what_the_code_does() -> None:
    shown = [line for line in DOCUMENT.read_text().splitlines() if re.match(r"\| `(spec|metadata)", line)]
    assert shown == [row(place) for place in PLACES]


def test_every_model_is_in_the_table() -> None:
    assert {ours for ours, _ in PLACES.values()} == {model.__name__ for model in models()} - NOT_MODELS_OF_ARGO


def test_supported_and_ignored_fields_are_fields_of_argo_and_disjoint() -> None:
    for ours, theirs in PLACES.values():
        supported, ignored = fields(getattr(manifest, ours)), manifest.CLUSTER_ONLY.get(ours, frozenset())
        assert supported | ignored <= argos(ours, theirs), ours
        assert not supported & ignored, ours


def test_the_whole_subset_at_once_is_accepted() -> None:
    assert [name for name, _ in parse(WHOLE).used()] == ["a"]


@pytest.mark.parametrize("place", list(PLACES))
def test_a_workflow_with_a_field_outside_the_subset_is_refused_with_the_fields_path(place: str) -> None:
    ours, theirs = PLACES[place]
    ignored = manifest.CLUSTER_ONLY.get(ours, frozenset())
    for field in [*sorted(argos(ours, theirs) - fields(getattr(manifest, ours)) - ignored), "fieldOfNobody"]:
        made = copy.deepcopy(WHOLE)
        here: Any = made
        path = ""
        for name, index in re.findall(r"(\w+)|\[(\d)\]", place):
            here = here[int(index) if index else name]
            title = here.get("name", index) if index and isinstance(here, dict) else index
            path += f"[{title}]" if index else f".{name}" if path else name
        here[field] = {}
        with pytest.raises(UnsupportedField) as caught:
            parse(made)
        assert f"    {path}.{field}: not supported here" in str(caught.value)


@pytest.mark.parametrize("place", list(PLACES))
def test_a_field_that_means_nothing_here_is_accepted_with_any_value(place: str) -> None:
    ours, _ = PLACES[place]
    made = copy.deepcopy(WHOLE)
    here: Any = made
    for name, index in re.findall(r"(\w+)|\[(\d)\]", place):
        here = here[int(index) if index else name]
    here |= {field: {"any": "thing"} for field in manifest.CLUSTER_ONLY.get(ours, frozenset())}
    assert set(parse(made).graphs["main"].depends) == {"a", "b"}
