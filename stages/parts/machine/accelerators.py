"""The catalogue of accelerators: ``configs/accelerators.yaml``, and a file of the user's that is merged over it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from scoring.capacity.accelerator import Accelerator, Tflops
from scoring.units import GIB, MIB
from stages.parts.base.settings import CONFIGS, Settings, parse, read_yaml
from stages.parts.machine.hardware import gpus, hardware, query_gpus

CATALOGUE: Final = CONFIGS / "accelerators.yaml"
VARIABLE: Final = "SLIPWAY_ACCELERATORS"
"""The path of the user's file, for programs that have no flag for it."""


class Catalogue(Settings):
    accelerators: dict[str, Accelerator]


def catalogue(override: Path | None = None) -> dict[str, Accelerator]:
    """Read the accelerators by name. Without *override*, the user's file is that in ``SLIPWAY_ACCELERATORS``, if any.
    Raises: ConfigError: the file can't be read, or has wrong fields; all of them are shown."""
    if override is None and (path := os.environ.get(VARIABLE)):
        override = Path(path)
    data = read_yaml(CATALOGUE)
    for name, fields in (read_yaml(override) if override else {}).items():
        is_merged = isinstance(fields, dict) and isinstance(data.get(name), dict)
        data[name] = data[name] | fields if is_merged else fields
    return parse(Catalogue, {"accelerators": data}, str(override or CATALOGUE)).accelerators


def accelerator_of(device: str, accelerators: Mapping[str, Accelerator]) -> str | None:
    """Find the name of the accelerator that nvidia-smi lists as *device*, such as ``NVIDIA H200, 143771 MiB``."""
    model = device.partition(",")[0].strip()
    return next((name for name, accelerator in accelerators.items() if accelerator.device == model), None)


def accelerator_here() -> tuple[str, Accelerator]:
    """Describe this machine's GPU. Of one that the catalogue lacks only memory and kernels matter, so the rest is made
    up."""
    device, accelerators = gpus()[0], catalogue()
    if name := accelerator_of(device, accelerators):
        return name, accelerators[name]
    memory, capability = query_gpus("memory.total")[0], query_gpus("compute_cap")[0]
    shared = hardware().memory_bytes  # a GPU that names no memory of its own uses the machine's
    unlisted = Accelerator(
        device=device.partition(",")[0],
        memory_gib=(int(memory) * MIB if memory.isdigit() else shared) / GIB,
        bandwidth_gb_per_s=1,
        tflops=Tflops(bf16=1),
        link="pcie",
        link_gb_per_s=1,
        compute_capability=float(capability),
        source="nvidia-smi",
    )
    return unlisted.device, unlisted
