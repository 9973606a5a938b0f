"""Whether the installed vLLM has a kernel for a variant's weights on this machine's processor or GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from scoring.capacity.families import FAMILIES
from scoring.capacity.reader import EXPERTS, EXPERTS_PER_TOKEN
from stages.parts.base.formats import FORMATS, Format, Kernel
from stages.parts.base.store import digest_of
from stages.parts.machine.hardware import hardware
from stages.parts.machine.processor import cpu_dtype, processor
from stages.parts.vllm.arguments import asked_once, serves_on_gpu

OWN_ACTIVATIONS: Final = {"gpt_oss": "swigluoai"}
"""What vLLM computes between the matrices of experts, where config.json says something else."""


class Experts(NamedTuple):
    """What vLLM's choice of a kernel for experts depends on."""

    total: int
    active: int
    """Experts that one token passes."""
    hidden: int
    width: int
    activation: str


def experts_of(config: Mapping[str, Any]) -> Experts | None:
    """Read the experts of a model from its config.json; None if it has none, or does not say how wide they are."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    sizes = ((*EXPERTS_PER_TOKEN, "moe_top_k"), ("hidden_size",), ("moe_intermediate_size", "intermediate_size"))
    total, active, hidden, width = (_first_count(config, names) for names in (EXPERTS, *sizes))
    if total < 2 or not (hidden and width) or config.get("enable_moe_block") is False:
        return None
    named = (config.get(field) for field in ("hidden_act", "hidden_activation", "mlp_hidden_act"))
    family = str(config.get("model_type"))
    activation = OWN_ACTIVATIONS.get(family) or str(next(filter(None, named), "silu"))
    gated = family not in FAMILIES or FAMILIES[family].gated
    return Experts(total, active or 1, hidden, width, activation if gated else f"{activation}_no_mul")


def missing_kernels(experts: Experts | None = None, dtype: str = "auto", *, lora: bool = False) -> dict[str, str]:
    """Ask vLLM which formats it can't serve here. Each has one sentence that says why.

    Its answer is kept for this version, hardware and formats.

    Args:
        experts: of a model that has them.
        dtype: the type in which vLLM computes on a processor.
        lora: whether adapters are served with it.
    """
    name = f"kernels-{digest_of([digest_of(hardware()), *FORMATS, experts, dtype, *(['lora'] if lora else [])])}"
    return asked_once(name, lambda: _missing(experts, dtype, lora))


def _missing(experts: Experts | None, dtype: str, lora: bool) -> dict[str, str]:
    missing, on_gpu = {}, serves_on_gpu()
    reason = _missing_on_gpu if on_gpu else _missing_on_cpu
    for name, record in FORMATS.items():
        why = reason(record.kernel, record.storage.label) if record.kernel else None
        if experts:
            why = why or _missing_for_experts(record, experts, dtype, on_gpu=on_gpu, lora=lora)
        if why:
            missing[name] = why
    return missing


def _missing_on_cpu(kernel: Kernel, label: str) -> str | None:
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if hasattr(torch.ops._C, kernel.cpu_operator):
        return None
    here = processor()
    without = "this processor" if here is None or here.avx512 else "processors without AVX-512"
    return f"vLLM's CPU build has no {label} kernel for {without}"


def _missing_for_experts(record: Format, experts: Experts, dtype: str, *, on_gpu: bool, lora: bool) -> str | None:
    import torch
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.platforms import current_platform

    if not record.choose_for_experts:
        return None
    here = processor()
    automatic = "bfloat16" if record.only_16_bit else cpu_dtype(here)
    if on_gpu:
        automatic = "bfloat16" if current_platform.has_device_capability(80) else "float16"
    with contextlib.suppress(NotImplementedError):
        described = FusedMoEConfig(
            num_experts=experts.total,
            num_local_experts=experts.total,
            num_logical_experts=experts.total,
            experts_per_token=experts.active,
            hidden_dim=experts.hidden,
            intermediate_size=experts.width,
            activation=_activation(experts.activation),
            device=current_platform.device_type,
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=getattr(torch, automatic if dtype == "auto" else dtype),
            is_lora_enabled=lora,
        )
        record.choose_for_experts(described)
        return None
    without_amx = not on_gpu and here and not here.amx and record.kernel and record.kernel.experts_amx
    unusual = "" if experts.activation == "silu" else f" with {experts.activation}"
    unusual += " with LoRA adapters" if lora else ""
    where = "on processors without AMX" if without_amx else f"of {experts.hidden} × {experts.width}{unusual} here"
    build = "vLLM" if on_gpu else "vLLM's CPU build"
    return f"{build} has no {record.storage.label} kernel for experts {where}"


def _activation(name: str) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    try:
        return MoEActivation.from_str(name)
    except ValueError:  # a name that the model's own class translates
        return MoEActivation.SILU


def _first_count(config: Mapping[str, Any], names: Iterable[str]) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


def _missing_on_gpu(kernel: Kernel, label: str) -> str | None:
    from vllm.platforms import current_platform

    try:
        kernel.choose_on_gpu()
    except ValueError:
        capability = current_platform.get_device_capability()
        gpu = f"compute capability {capability.as_version_str()}" if capability else "this GPU"
        return f"vLLM has no {label} kernel for {gpu}"
    return None
