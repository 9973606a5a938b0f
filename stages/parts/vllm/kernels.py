"""Whether the installed vLLM has a kernel for a variant's weights on this machine's processor or GPU."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from stages.parts.base.store import digest_of, write_json
from stages.parts.machine.hardware import hardware
from stages.parts.machine.processor import processor
from stages.parts.vllm.arguments import cache_folder, serves_on_gpu

GROUP_SIZE: Final = 128
WIDTH: Final = 4096
"""Inputs and outputs of the layer for which a kernel is looked for: a width that every kernel can divide."""


@dataclass(frozen=True)
class Format:
    """How the linear layers of a variant are stored."""

    name: str
    operator: str
    """The operator of vLLM's CPU build that computes such a layer."""
    kernel: Callable[[], Any]
    """Lets vLLM choose its kernel on a GPU. Raises: ValueError: it has none."""


def _four_bit(zero_points: bool) -> Callable[[], Any]:
    def choose() -> Any:
        import torch
        from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
        from vllm.platforms import current_platform
        from vllm.scalar_type import scalar_types

        return choose_mp_linear_kernel(
            MPLinearLayerConfig(
                full_weight_shape=(WIDTH, WIDTH),
                partition_weight_shape=(WIDTH, WIDTH),
                weight_type=scalar_types.uint4 if zero_points else scalar_types.uint4b8,
                act_type=torch.bfloat16 if current_platform.has_device_capability(80) else torch.float16,
                group_size=GROUP_SIZE,
                zero_points=zero_points,
            )
        )

    return choose


def _int8() -> Any:
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel

    return init_int8_linear_kernel(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="int8"
    )


FORMATS: Final = {
    "awq": Format("4-bit", "cpu_gemm_wna16", _four_bit(zero_points=True)),
    "gptq": Format("4-bit", "cpu_gemm_wna16", _four_bit(zero_points=False)),
    "int8": Format("int8", "onednn_scaled_mm", _int8),
}
"""The variants whose weights need a kernel of their own."""


def missing_kernels() -> dict[str, str]:
    """The variants that vLLM can't serve here, each with one sentence that says why.

    vLLM takes seconds to import, so its answer is kept in the user's cache, for this version and this hardware.
    """
    kept = cache_folder() / f"kernels-{digest_of(hardware())}.json"
    try:
        found: dict[str, str] = json.loads(kept.read_text())
    except (OSError, ValueError):
        found = {name: why for name, form in FORMATS.items() if (why := _missing(form))}
        write_json(kept, found)
    return found


def _missing(form: Format) -> str | None:
    with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to stdout
        return _missing_on_gpu(form) if serves_on_gpu() else _missing_on_cpu(form)


def _missing_on_cpu(form: Format) -> str | None:
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if hasattr(torch.ops._C, form.operator):
        return None
    found = processor()
    without = "this processor" if found is None or found.avx512 else "processors without AVX-512"
    return f"vLLM's CPU build has no {form.name} kernel for {without}"


def _missing_on_gpu(form: Format) -> str | None:
    from vllm.platforms import current_platform

    try:
        form.kernel()
    except ValueError:
        capability = current_platform.get_device_capability()
        shown = f"compute capability {capability.as_version_str()}" if capability else "this GPU"
        return f"vLLM has no {form.name} kernel for {shown}"
    return None
