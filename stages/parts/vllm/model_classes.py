"""Whether the installed vLLM has a class for a model's architecture."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from stages.parts.base.errors import UnusableModel
from stages.parts.base.store import write_json
from stages.parts.model.description import Description
from stages.parts.vllm.arguments import cache_folder, installed_version


def refuse_unknown_class(described: Description) -> None:
    """Refuse, with UnusableModel, a model that neither vLLM nor Transformers has a class for that vLLM could serve."""
    names = [str(name) for name in described.config.get("architectures") or ()]
    if not set(names) & _classes_of_vllm() and not any(_served_by_transformers(name) for name in names):
        version = installed_version("vllm")
        raise UnusableModel(
            f"vLLM {version} has no class for {' or '.join(names)}, and Transformers none that it takes",
            hint="a newer vLLM may have it: https://docs.vllm.ai/en/latest/models/supported_models.html",
        )


def _classes_of_vllm() -> set[str]:
    """Ask vLLM once for the names of its classes, and keep them in the user's cache."""
    cached = cache_folder() / "classes.json"
    try:
        names: list[str] = json.loads(cached.read_text())
    except (OSError, ValueError):
        with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to stdout
            from vllm.model_executor.models import ModelRegistry

            names = sorted(ModelRegistry.get_supported_archs())
        write_json(cached, names)
    return set(names)


def _served_by_transformers(name: str) -> bool:
    """Whether vLLM would run Transformers' own class, by the rule of vLLM's registry."""
    import transformers

    model_class: Any = getattr(transformers, name, None)
    return bool(model_class) and (model_class.is_backend_compatible() or model_class._can_set_attn_implementation())
