"""The resources of this machine, the requests of tasks, and the shares of running tasks.

The shares of CPU and memory decide which tasks run at the same time. They are not enforced on a running process, except
that OMP_NUM_THREADS follows the cores and CUDA_VISIBLE_DEVICES the GPUs. Two engines do not know each other's shares.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scoring.units import GIB
from stages.parts.base.errors import ConfigError
from stages.parts.cluster.nodes import quantity
from stages.parts.machine.hardware import gpu_ids, memory_bytes

CPU_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")
GPU_RESOURCE: Final = re.compile(r"[a-z0-9.-]+/gpu")


@dataclass(frozen=True)
class ResourceRequest:
    """What one task asks for. What it does not ask for is not reserved, as on a cluster."""

    cores: float = 0.0
    memory_bytes: int = 0
    gpus: int = 0


@dataclass(frozen=True)
class MachineResources:
    """What a machine has, or the share of one running task. ``gpus`` are CUDA device numbers as in nvidia-smi
    (CUDA_DEVICE_ORDER=PCI_BUS_ID)."""

    cores: float
    memory_bytes: int
    gpus: tuple[str, ...] = ()

    @classmethod
    def of_this_machine(cls) -> MachineResources:
        """Read the visible GPUs, and the cores and memory that this process may use (affinity, cgroup limits)."""
        cores, quota, period = float(len(os.sched_getaffinity(0))), "", ""
        with contextlib.suppress(OSError):
            quota, _, period = CPU_LIMIT.read_text().strip().partition(" ")
        cores = min(cores, int(quota) / int(period)) if quota.isdigit() else cores
        return cls(cores, memory_bytes(), tuple(gpu_ids()))


class Pool:
    """The capacity that running tasks leave."""

    def __init__(self, capacity: MachineResources) -> None:
        self.capacity, self.gpus = capacity, list(capacity.gpus)
        self.cores, self.memory_bytes = capacity.cores, capacity.memory_bytes

    def take(self, request: ResourceRequest) -> MachineResources | str:
        """Take a share, or return what is missing now. A request above the machine's CPU or memory takes all of it."""
        cores = min(request.cores, self.capacity.cores)
        memory = min(request.memory_bytes, self.capacity.memory_bytes)
        if request.gpus > len(self.gpus):
            return f"{request.gpus} of {len(self.capacity.gpus)} GPUs"
        if cores > self.cores + 1e-9:
            return f"{cores:g} of {self.capacity.cores:g} cores"
        if memory > self.memory_bytes:
            return f"{memory / GIB:.1f} of {self.capacity.memory_bytes / GIB:.1f} GiB of memory"
        gpus, self.gpus = self.gpus[: request.gpus], self.gpus[request.gpus :]
        self.cores -= cores
        self.memory_bytes -= memory
        return MachineResources(cores, memory, tuple(gpus))

    def give_back(self, share: MachineResources) -> None:
        self.cores += share.cores
        self.memory_bytes += share.memory_bytes
        self.gpus = sorted([*self.gpus, *share.gpus], key=self.capacity.gpus.index)


def request(requests: Mapping[str, str], limits: Mapping[str, str]) -> ResourceRequest:
    """Read a container's ``resources``. A limit without a request is also the request, as in Kubernetes."""
    amounts = {"cpu": "0", "memory": "0", **limits, **requests}
    gpus = 0
    for name, text in amounts.items():
        if GPU_RESOURCE.fullmatch(name):
            gpus += int(quantity(text))
        elif name not in ("cpu", "memory", "ephemeral-storage"):
            raise ConfigError(f"{name!r} is a resource that the local engine does not know")
    return ResourceRequest(
        cores=float(quantity(amounts["cpu"])), memory_bytes=int(quantity(amounts["memory"])), gpus=gpus
    )


def environment_of(share: MachineResources, capacity: MachineResources) -> dict[str, str]:
    """Return the environment variables that keep a task to its share. A task that asks for no GPU sees none."""
    variables = {}
    if share.cores:
        variables["OMP_NUM_THREADS"] = str(max(1, math.floor(share.cores)))
    if capacity.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    return variables
