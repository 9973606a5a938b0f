"""Stores, programs and processes for the tests of evaluate and serve."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil

from stages.parts.base.files import place_tree, sha256_of, swap_link
from stages.parts.base.store import STORE_VARIABLE, ModelStore
from stages.parts.records.acquired import File, files_digest
from stages.parts.records.variant import VARIANT, Variant

REPOSITORY: Final = Path(__file__).parent.parent
DEMO: Final = REPOSITORY / "tests" / "demo"
STAND_IN: Final = REPOSITORY / "tests" / "stages" / "standin"
MODEL: Final = "org/name"
ARCHITECTURE: Final = "StandInForCausalLM"
SERVING: Final[dict[str, Any]] = {"max_model_len": 1024, "kv_cache_mib": 64, "enforce_eager": True, "port": 0}
ROLLOUT: Final = {
    "steps": [50, 100],
    "step_s": 0,
    "min_requests": 5,
    "poll_s": 0.1,
    "agreement": 0,
}
"""Quick steps. The stand-in's answers are not those of a model and are not compared."""
WAIT_S: Final = 120.0
Said = subprocess.CompletedProcess[str]


def variant_of(store: ModelStore, name: str, source: Path, **changed: Any) -> Variant:
    """``optimized/<name>`` from the files of *source*, with a correct manifest and, if asked, a changed config."""
    directory = store.optimized(name)
    place_tree(source, directory, [path.name for path in source.iterdir() if path.is_file()])
    if changed:
        config = json.loads((source / "config.json").read_text())
        (directory / "config.json").unlink()  # it is shared with the source
        (directory / "config.json").write_text(json.dumps(config | changed))
    files = tuple(
        File(path=path.name, size_bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(directory.iterdir())
    )
    record = Variant(
        variant=name,
        method=name,
        parameters={},
        base_digest="b" * 64,
        calibration_digest=None,
        tool_versions={},
        key="k",
        files=files,
        digest=files_digest(files),
        weights_bytes=sum(file.size_bytes for file in files if file.path.endswith(".safetensors")),
        bits=16,
        dtype="float16",
        seconds=1.0,
        peak_memory_bytes=1,
        peak_gpu_memory_bytes=None,
        created_at=datetime.now(UTC),
    )
    record.write(directory / VARIANT)
    return record


def stand_in_variant(store: ModelStore, name: str, **behaviour: Any) -> Variant:
    """A variant for the stand-in, which serves it as *behaviour* says."""
    source = store.root / f"source-{name}"
    source.mkdir(parents=True)
    config = {"architectures": [ARCHITECTURE], "max_position_embeddings": 1024}
    (source / "config.json").write_text(json.dumps(config))
    (source / "behaviour.json").write_text(json.dumps(behaviour))
    (source / "model.safetensors").write_bytes(b"weights")
    return variant_of(store, name, source)


def publish(store: ModelStore, number: int, variant: Variant) -> str:
    """The release of a variant, in production."""
    release = store.releases / f"{number:04d}-{variant.variant}-{variant.digest[:12]}"
    place_tree(store.optimized(variant.variant), release, [file.path for file in variant.files])
    swap_link(store.production, Path("releases") / release.name)
    return release.name


def environment(store: ModelStore, *, stand_in: bool = False, **variables: str) -> dict[str, str]:
    path = [str(STAND_IN)] if stand_in else []
    path += [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {STORE_VARIABLE: str(store.root), "PYTHONPATH": os.pathsep.join(path)} | variables


def one_gpu(folder: Path, count: int = 1) -> dict[str, str]:
    """Variables that make the stand-in vLLM's GPU build, on a machine with one GPU (or *count*) of 1 GiB: what its
    servers take of the memory is taken, until they end."""
    distribution, smi = folder / "vllm-0.0.0.dist-info", folder / "bin" / "nvidia-smi"
    for each in (distribution, smi.parent):
        each.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.0\n")
    lines = 'case "$*" in *name*) echo "Stand-in, 1024 MiB";; *) echo 1024;; esac\n' * count
    smi.write_text(f"#!/bin/sh\n{lines}")
    smi.chmod(0o755)
    return {
        "PATH": os.pathsep.join([str(smi.parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, (folder, STAND_IN, REPOSITORY))),
        "CUDA_VISIBLE_DEVICES": "0",
        "STANDIN_GPU": str(folder / "gpu"),
    }


def stage(name: str, *arguments: str, variables: Mapping[str, str]) -> Said:
    """Run a stage program to its end."""
    return ended([sys.executable, "-m", f"stages.{name}", "--model", MODEL, *arguments], variables)


def ended(command: Sequence[str], variables: Mapping[str, str]) -> Said:
    """Run a program to its end."""
    return subprocess.run(
        command,
        env=dict(variables),
        capture_output=True,
        text=True,
        check=False,
    )


def processes_with(text: str) -> list[psutil.Process]:
    """Every process that has *text* in its arguments, and its descendants."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if any(text in argument for argument in arguments_of(process)):
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {each.pid: each for each in [process, *process.children(recursive=True)]}
    return list(found.values())


def arguments_of(process: psutil.Process) -> list[str]:
    """Empty once it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    left = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    return left


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """The first true value of *condition*."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.1)
    return value


def waits_for(lock: Path) -> bool:
    """Whether the kernel reports a process that waits for *lock*."""
    inode = f":{lock.stat().st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())
