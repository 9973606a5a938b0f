"""What the processor of this machine can calculate. vLLM's CPU build has three libraries, one for each of AVX2, AVX-512
and AVX-512 with bf16, and loads the one that the processor can run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from stages.parts.base.record import Record

CPUINFO: Final = Path("/proc/cpuinfo")
LIMIT: Final = "ONEDNN_MAX_CPU_ISA"
BELOW_AVX2: Final = {"SSE41", "AVX"}
BELOW_AVX512: Final = BELOW_AVX2 | {"AVX2", "AVX2_VNNI", "AVX2_VNNI_2"}
BELOW_BF16: Final = BELOW_AVX512 | {"AVX512_CORE", "AVX512_CORE_VNNI"}
BELOW_AMX: Final = BELOW_BF16 | {"AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"}


class Processor(Record):
    """The instructions of an x86-64 processor that decide which arithmetic is fast and which kernels vLLM has."""

    avx2: bool
    avx512: bool
    """AVX-512 F. Without it vLLM's CPU build loads its AVX2 library, which has no kernel for 4-bit weights."""
    bf16: bool
    """bfloat16 arithmetic, by AVX512_BF16 or AMX_BF16. Without it bfloat16 is converted before every operation."""
    amx: bool
    """AMX tiles."""

    @property
    def name(self) -> str:
        """``AMX``, ``AVX-512 with bf16``, ``AVX-512``, ``AVX2`` or ``no AVX2``."""
        if self.amx:
            return "AMX"
        if self.avx512:
            return "AVX-512 with bf16" if self.bf16 else "AVX-512"
        return "AVX2" if self.avx2 else "no AVX2"


def processor(cpuinfo: Path = CPUINFO) -> Processor | None:
    """Describe the processor as the kernel describes it, limited to what ``ONEDNN_MAX_CPU_ISA`` allows.

    None where nothing is known, as on ARM, whose processors are described in other words.
    """
    try:
        line = re.search(r"^flags\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        line = None
    if not line:
        return None
    flags = set(line[1].split())
    # oneDNN ignores case, and values that it does not know.
    limit = os.environ.get(LIMIT, "").upper()
    return Processor(
        avx2="avx2" in flags and limit not in BELOW_AVX2,
        avx512="avx512f" in flags and limit not in BELOW_AVX512,
        bf16=bool(flags & {"avx512_bf16", "amx_bf16"}) and limit not in BELOW_BF16,
        amx="amx_tile" in flags and limit not in BELOW_AMX,
    )


def cpu_dtype(here: Processor | None) -> str:
    """Choose the arithmetic that is fast on a processor: ``float32`` on one without bf16, otherwise ``bfloat16``."""
    return "bfloat16" if here is None or here.bf16 else "float32"
