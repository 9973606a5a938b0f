"""Whether the installed vLLM has a kernel for a variant's weights on this machine's processor or GPU."""

from __future__ import annotations

import contextlib
import json
import sys

from stages.parts.base.formats import FORMATS, Kernel
from stages.parts.base.store import digest_of, write_json
from stages.parts.machine.hardware import hardware
from stages.parts.machine.processor import processor
from stages.parts.vllm.arguments import cache_folder, serves_on_gpu


def missing_kernels() -> dict[str, str]:
    """Ask vLLM which formats it can't serve here. Each has one sentence that says why.

    vLLM takes seconds to import, so its answer is kept in the user's cache, for this version, hardware and formats.
    """
    cached = cache_folder() / f"kernels-{digest_of([digest_of(hardware()), *FORMATS])}.json"
    try:
        missing: dict[str, str] = json.loads(cached.read_text())
    except (OSError, ValueError):
        missing = {}
        with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to stdout
            reason = _missing_on_gpu if serves_on_gpu() else _missing_on_cpu
            for name, record in FORMATS.items():
                if record.kernel and (why := reason(record.kernel, record.storage.label)):
                    missing[name] = why
        write_json(cached, missing)
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


def _missing_on_gpu(kernel: Kernel, label: str) -> str | None:
    from vllm.platforms import current_platform

    try:
        kernel.choose_on_gpu()
    except ValueError:
        capability = current_platform.get_device_capability()
        gpu = f"compute capability {capability.as_version_str()}" if capability else "this GPU"
        return f"vLLM has no {label} kernel for {gpu}"
    return None
