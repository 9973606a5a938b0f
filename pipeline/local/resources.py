"""The resources of this machine, the requests of tasks, and the shares of running tasks.

The shares of CPU and memory decide which tasks run at the same time. They are not enforced on a running process, except
that OMP_NUM_THREADS follows the cores and CUDA_VISIBLE_DEVICES the GPUs. Two engines do not know each other's shares.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.local.references import references
from scoring.units import GIB
from stages.parts.base.errors import ConfigError
from stages.parts.cluster.nodes import quantity

CGROUP: Final = Path("/sys/fs/cgroup")
GPU_RESOURCE: Final = re.compile(r"[a-z0-9.-]+/gpu")
VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class ResourceRequest:
    """What one task asks for. What it does not ask for is not reserved, as on a cluster."""

    cores: float = 0.0
    memory_bytes: int = 0
    gpus: int = 0

    def lacking_gpus(self, capacity: MachineResources) -> str:
        """Say which GPUs a task that asks for this lacks on a machine; empty if it lacks none."""
        if self.gpus <= len(capacity.gpus):
            return ""
        return f"asks for {self.gpus} GPU{'s' * (self.gpus > 1)}, this machine has {len(capacity.gpus)}"


@dataclass(frozen=True)
class Share:
    """The share of one running task."""

    cores: float
    memory_bytes: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class MachineResources:
    """The resources to share. ``gpus`` are CUDA device numbers as in nvidia-smi (CUDA_DEVICE_ORDER=PCI_BUS_ID)."""

    cores: float
    memory_bytes: int
    gpus: tuple[str, ...] = ()

    @classmethod
    def of_this_machine(cls, environment: Mapping[str, str] = os.environ) -> MachineResources:
        """Read the visible GPUs, and the cores and memory that this process may use (affinity, cgroup limits)."""
        cores = float(len(os.sched_getaffinity(0)))
        quota, _, period = _cgroup("cpu.max").partition(" ")
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = _cgroup("memory.max")
        return cls(
            cores=min(cores, int(quota) / int(period)) if quota.isdigit() else cores,
            memory_bytes=min(memory_bytes, int(limit)) if limit.isdigit() else memory_bytes,
            gpus=_gpus(environment),
        )


class Pool:
    """The capacity that running tasks leave."""

    def __init__(self, capacity: MachineResources) -> None:
        self.capacity, self.gpus = capacity, list(capacity.gpus)
        self.cores, self.memory_bytes = capacity.cores, capacity.memory_bytes

    def take(self, request: ResourceRequest) -> Share | str:
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
        return Share(cores, memory, tuple(gpus))

    def give_back(self, share: Share) -> None:
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


def literal(quantities: Mapping[str, str]) -> dict[str, str]:
    """Those without references, which are known before a run."""
    return {name: text for name, text in quantities.items() if not any(references(text))}


def environment_of(share: Share, capacity: MachineResources) -> dict[str, str]:
    """Return the environment variables that keep a task to its share. A task that asks for no GPU sees none."""
    variables = {}
    if share.cores:
        variables["OMP_NUM_THREADS"] = str(max(1, math.floor(share.cores)))
    if capacity.gpus:
        variables[VISIBLE_DEVICES] = ",".join(share.gpus)
    return variables


def _cgroup(name: str) -> str:
    try:
        return (CGROUP / name).read_text().strip()
    except OSError:
        return ""


def _gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Read the device numbers in CUDA_VISIBLE_DEVICES, else all that ``nvidia-smi -L`` lists; none without a driver."""
    if VISIBLE_DEVICES in environment:
        listed = (part.strip() for part in environment[VISIBLE_DEVICES].split(","))
        return tuple(itertools.takewhile(lambda device: device and device != "-1", listed))  # as CUDA reads it
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(re.findall(r"^GPU (\d+):", listing, re.MULTILINE))
