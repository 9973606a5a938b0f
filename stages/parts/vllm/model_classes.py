"""Whether the installed vLLM has a class for a model's architecture, and serves LoRA adapters with it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from stages.parts.base.errors import NotInstalled, UnusableModel
from stages.parts.base.store import digest_of
from stages.parts.model.adapter import Adapter, max_lora_rank
from stages.parts.model.checkpoint import sees
from stages.parts.model.description import Description
from stages.parts.vllm.arguments import asked_once, installed_version


def refuse_unknown_class(described: Description) -> None:
    """Refuse, with UnusableModel, a model that neither vLLM nor Transformers has a class for that vLLM could serve."""
    names = [str(name) for name in described.config.get("architectures") or ()]
    if not set(names) & set(asked_once("classes", _classes_of_vllm)) and not any(
        _served_by_transformers(name) for name in names
    ):
        version = installed_version("vllm")
        raise UnusableModel(
            f"vLLM {version} has no class for {' or '.join(names)}, and Transformers none that it takes",
            hint="a newer vLLM may have it: https://docs.vllm.ai/en/latest/models/supported_models.html",
        )


def refuse_without_torchvision(described: Description) -> None:
    """Refuse, with NotInstalled, a model that sees where torchvision is not installed: vLLM's classes for such models
    import it, even to serve only their language part. Our lock has none, because PyPI's is built for CUDA."""
    if not sees(described.config):
        return
    release, _, build = installed_version("torch").partition("+")
    try:
        installed = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    if not installed or (build == "cpu" and "+" not in installed):
        fitting = f"0.{int(release.split('.')[1]) + 15}.*"  # https://github.com/pytorch/vision#installation
        index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
        raise NotInstalled(
            f"vLLM serves models that see with torchvision, and {installed or 'none'} is installed here"
            + (", which is for CUDA" if installed else ""),
            hint=f"uv pip install --no-deps 'torchvision=={fitting}'{index}",
        )


def _classes_of_vllm() -> list[str]:
    from vllm.model_executor.models import ModelRegistry

    return sorted(ModelRegistry.get_supported_archs())


def _served_by_transformers(name: str) -> bool:
    """Whether vLLM would run Transformers' own class, by the rule of vLLM's registry."""
    import transformers

    model_class: Any = getattr(transformers, name, None)
    return bool(model_class) and (model_class.is_backend_compatible() or model_class._can_set_attn_implementation())


def refuse_unserved(adapters: Mapping[str, Adapter], architectures: list[str]) -> None:
    """Refuse, with UnusableModel, adapters that the installed vLLM can't serve with a model of these classes."""
    configs = {name: dict(adapter.config) for name, adapter in adapters.items()}
    key = digest_of([architectures, configs])
    for name, why in asked_once(f"lora-{key}", lambda: _unserved(configs, architectures)).items():
        raise UnusableModel(
            f"vLLM can't serve the adapter {name} ({adapters[name].source}): {why}",
            hint="take it out of serving.adapters, or merge it into the model",
        )


def _unserved(configs: Mapping[str, dict[str, Any]], architectures: list[str]) -> dict[str, str]:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.model_executor.models import ModelRegistry, supports_lora
    from vllm.platforms import current_platform

    try:
        current_platform.get_punica_wrapper()
    except NotImplementedError:
        return dict.fromkeys(configs, f"its build for {current_platform.device_name} computes none")
    for name in set(architectures) & ModelRegistry.models.keys():
        if not supports_lora(ModelRegistry.models[name].load_model_cls()):
            return dict.fromkeys(configs, f"its class {name} takes none")
    reasons = {}
    for name, config in configs.items():
        try:
            PEFTHelper.from_dict(config).validate_legal(LoRAConfig(max_lora_rank=max_lora_rank(config)))
        except (TypeError, ValueError) as error:
            reasons[name] = " ".join(str(error).split())
    return reasons
