"""The hardware of this machine. Two evaluations can be compared only if their hardware is the same.

vLLM's CPU build has three libraries, one for each of AVX2, AVX-512 and AVX-512 with bf16, and loads the one that the
processor can run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import psutil
from pydantic import Field

from scoring.units import MIB
from stages.parts.base.errors import NotInstalled
from stages.parts.base.store import Record

NVIDIA_SMI_TIMEOUT_S: Final = 30
DRIVER: Final = Path("/usr/local/nvidia")
"""Where GKE and NVIDIA's own images have the driver's programs and libraries, on no path."""
MIG: Final = "MIG-"
"""How the name of a slice of a GPU begins."""
GPUS_VARIABLE: Final = "SLIPWAY_GPUS"
"""How many GPUs a cluster gave to this pod. Not set on one machine."""
CPUS: Final = Path("/sys/devices/system/cpu")
CGROUP_LIMITS: Final = tuple(Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes"))
"""A container's limit of memory, by the version of the kernel's control groups."""
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
    if not (flags := set(_cpuinfo("flags", cpuinfo).split())):
        return None
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


class Hardware(Record):
    cpu: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    processor: Processor | None = Field(default=None, exclude_if=lambda value: value is None)
    """Absent if it is not known, as on ARM and in records of older versions, whose digests are without it."""


def hardware() -> Hardware:
    """Describe what this process may use of the machine: cores (affinity), memory (cgroup limit) and GPUs."""
    return Hardware(
        cpu=_cpuinfo("model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes(),
        gpus=tuple(gpus()),
        processor=processor(),
    )


def core_parts(count: int, cpus: Path = CPUS) -> tuple[tuple[int, ...], ...] | None:
    """Divide the logical CPUs into equal parts, for the threads of servers side by side; None if there are too few.

    Each physical core contributes one logical CPU, as in vLLM's own choice. They are divided in the order of their
    numbers, so that on two sockets each half is a socket. A single physical core contributes its two. If a part has
    several CPUs, its last one stays free for the processes that pass work to the threads.
    """
    allowed = os.sched_getaffinity(0)
    physical = {min(_siblings(cpus, cpu) & allowed) for cpu in allowed}
    divided = sorted(physical if len(physical) > 1 else allowed)
    size = len(divided) // count
    if not size:
        return None
    used = max(1, size - 1)
    return tuple(tuple(divided[start : start + used]) for start in range(0, size * count, size))


def gpus() -> list[str]:
    """List name and memory of each GPU that CUDA may use, such as ``NVIDIA H200, 143771 MiB``."""
    return query_gpus("name,memory.total", units=True)


def asked_gpus() -> int:
    """Return how many GPUs a cluster gave to this pod; 0 also where no cluster did."""
    return int(os.environ.get(GPUS_VARIABLE) or 0)


def no_gpu(why: str) -> NotInstalled:
    """Make the error of a pod that got GPUs and sees none: its CPU would work for hours, or measure something else."""
    return NotInstalled(
        f"this pod asked for {asked_gpus()} GPU, and sees none: {why}",
        hint=f"look at the node's driver and device plugin, and that the image finds the driver's libraries in "
        f"{DRIVER}/lib64 or by ldconfig; without GPUs on purpose: 'gpus: 0' for the stage in the platform's file",
    )


def check_gpus() -> None:
    """Refuse, with NotInstalled, a pod to which the cluster gave GPUs and the driver shows none."""
    if asked_gpus() and not gpus():
        raise no_gpu("nvidia-smi lists none")


def compute_capability() -> float | None:
    """Find the lowest compute capability of the GPUs that CUDA may use, such as 9.0; None if it is not known."""
    capabilities = [float(line) for line in query_gpus("compute_cap") if re.fullmatch(r"\d+(\.\d+)?", line)]
    return min(capabilities, default=None)


def gpu_ids() -> list[str]:
    """List the numbers or names of the GPUs that CUDA may use, as in ``CUDA_VISIBLE_DEVICES``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(len(gpus()))]
    names = (name.strip() for name in visible.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # as CUDA reads it


def gpu_memory_used_bytes(visible: str | None = None) -> int | None:
    """Sum the used memory of all GPUs that CUDA may use, or of the *visible* ones, in bytes; None without a GPU.

    It is counted per GPU, because in a container the driver does not show which processes are ours.
    """
    used = [int(line) for line in query_gpus("memory.used", visible=visible) if line.isdigit()]
    return sum(used) * MIB if used else None


def query_gpus(fields: str, *, units: bool = False, visible: str | None = None) -> list[str]:
    """Ask nvidia-smi for one line per GPU, only the *visible* ones, or those in ``CUDA_VISIBLE_DEVICES``; an empty list
    without a driver."""
    visible = visible or os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    program = shutil.which("nvidia-smi") or str(DRIVER / "bin" / "nvidia-smi")
    libraries = os.pathsep.join(filter(None, (os.environ.get("LD_LIBRARY_PATH"), str(DRIVER / "lib64"))))
    command = [program, f"--query-gpu={fields}", f"--format=csv,noheader{'' if units else ',nounits'}"]
    selections = [["--id", visible]] if visible else [[]]
    if visible and MIG in visible:
        selections.append([])  # --id does not accept MIG devices: then all GPUs are listed
    for selection in selections:
        try:
            output = subprocess.run(
                [*command, *selection],
                capture_output=True,
                text=True,
                timeout=NVIDIA_SMI_TIMEOUT_S,
                check=True,
                env=os.environ | {"LD_LIBRARY_PATH": libraries},
            ).stdout
        except subprocess.CalledProcessError:
            continue
        except (OSError, subprocess.TimeoutExpired):
            return []
        return [line.strip() for line in output.splitlines() if line.strip()]
    return []


def _siblings(cpus: Path, cpu: int) -> set[int]:
    """List the logical CPUs of the physical core of *cpu*, from a list such as ``0-1,8``."""
    try:
        listed = (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        ends = [tuple(map(int, part.split("-"))) for part in listed.split(",")]
    except (OSError, ValueError):  # some virtual machines have no such file
        return {cpu}
    return {cpu}.union(*(range(end[0], end[-1] + 1) for end in ends))


def _cpuinfo(field: str, path: Path = CPUINFO) -> str:
    """Read what the kernel says of a processor; empty if it does not: on ARM it describes them in other words."""
    with contextlib.suppress(OSError):
        if line := re.search(rf"^{field}\s*:\s*(.+)$", path.read_text(), re.MULTILINE):
            return line[1].strip()
    return ""


def memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or what its container is limited to."""
    limits = [psutil.virtual_memory().total]
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" in a group without a limit
            limits.append(int(path.read_text()))
    return min(limits)
