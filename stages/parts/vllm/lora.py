"""LoRA adapters in vLLM: the arguments that serve them, and whether the installed vLLM takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.parts.base.errors import UnusableModel
from stages.parts.base.store import digest_of
from stages.parts.model.adapter import CONFIG, Adapter, max_lora_rank
from stages.parts.vllm.arguments import asked_once


def lora_arguments(adapters: Mapping[str, Path], mounted: Path | None = None) -> list[str]:
    """List the arguments of ``vllm serve`` for adapters, directories by name; none without any. *mounted*: the folder
    where the server will find them, if not there."""
    if not adapters:
        return []
    configs = [json.loads((path / CONFIG).read_bytes()) for path in adapters.values()]
    # As JSON: a path may have a comma.
    modules = [
        json.dumps({"name": name, "path": str(mounted / name if mounted else path)}) for name, path in adapters.items()
    ]
    sizes = ["--max-loras", str(len(adapters)), "--max-lora-rank", str(max(map(max_lora_rank, configs)))]
    return ["--enable-lora", *sizes, "--lora-modules", *modules]


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
