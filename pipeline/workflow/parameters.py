"""What a run gives to the workflow: its parameters. Apart from the definition, since Hera takes seconds to import."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from typing import Final

from pipeline.settings.config import RunConfig, kserve_settings
from stages.parts.base.files import canonical_json
from stages.parts.base.store import directory_name
from stages.parts.model.name import ModelName
from stages.parts.records.rollout import LOCAL

NAME: Final = "slipway"
"""The WorkflowTemplate's name."""
RESOLVE_CACHE: Final = "slipway-resolve"
"""The ConfigMap in which Argo keeps memoized results."""
STORE_COMMAND: Final = f"{NAME}-command"
"""The WorkflowTemplate that runs any command which needs the store's volume."""
COMMAND: Final = "command"
"""Its one task."""


def arguments(config: RunConfig, model: str, revision: str, *, serve: bool, refresh: bool = False) -> dict[str, str]:
    """Return the workflow's parameters for one run. Raises: InvalidName: as ``ModelName.parse``."""
    return {
        "model": model,
        "revision": revision,
        "model-directory": directory_name(ModelName.parse(model).id),
        "resolve-key": resolve_key(model, revision, hub="" if config.platform.cluster else hub_here(), refresh=refresh),
        "serve": str(serve).lower(),
        **settings_of(config),
    }


def settings_of(config: RunConfig) -> dict[str, str]:
    """Return the parameters that hold a configuration."""
    platform, parameters = config.platform, {}
    for name in ("optimize", "workload", "serving", "profile", "rollout"):
        parameters[name] = canonical_json(getattr(config, name))
    parameters["approval"] = str(config.rollout.approval).lower()
    price = {"per_hour": platform.price_per_hour, "currency": platform.currency}
    parameters["price"] = canonical_json(price) if platform.price_per_hour is not None else ""
    return parameters | ({} if platform.serves_on == LOCAL else {"kserve": canonical_json(kserve_settings(config))})


def allowing_incomplete(optimize: str) -> str:
    """Let a run go on without a variant: its parameter ``optimize``."""
    return canonical_json({**json.loads(optimize), "allow_incomplete": True})


def store_settings(config: RunConfig) -> str:
    """Return the parameter ``config`` of a command that needs the store's volume, without the path of a file here."""
    read, local_path = {"platform", "serving", "rollout", "kserve"}, {"platform": {"cluster": {"clients"}}}
    return canonical_json(config.model_dump(mode="json", include=read, exclude=local_path))


def hub_here() -> str:
    """Return the address of the hub that this machine asks, or an empty text if it is Hugging Face's."""
    return os.environ.get("HF_ENDPOINT", "")


def resolve_key(model: str, revision: str, *, hub: str = "", refresh: bool = False) -> str:
    """Return the memoization key of resolve, which stands for a model and revision at one hub.

    The key is new each time for a local directory, which can change at any time, and with *refresh*. *hub* is empty on
    a cluster, whose pods all ask the hub of the platform, whoever submits.
    """
    if refresh or ModelName.parse(model).directory:
        return uuid.uuid4().hex
    return hashlib.sha256(canonical_json([hub, model, revision]).encode()).hexdigest()
