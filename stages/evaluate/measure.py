"""One variant on one server: load first, on a server that has seen nothing else; then quality; memory all along."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stages.endpoint import serving_here
from stages.evaluate.conditions import Conditions
from stages.evaluate.load import Measured, check_fits, check_lengths, measure_load
from stages.evaluate.memory import PeakMemory
from stages.evaluate.quality import check_tasks, measure_quality
from stages.program import RUN_VARIABLE
from stages.records import SAMPLES_SUFFIX, Engine, Evaluation, Memory, TaskScore
from stages.server import Server, running
from stages.settings import Serving, Workload
from stages.store import ModelStore, write_text


def measure(store: ModelStore, name: str, conditions: Conditions, workload: Workload, serving: Serving) -> Evaluation:
    """Start the server once, measure everything, stop it, and only then write the result.

    Raises:
        ConfigError: the workload can't be measured: found before anything is started, if possible.
        ServerFailed, MeasurementFailed, HubUnavailable: nothing was written.
    """
    started_at, started = datetime.now(UTC), time.monotonic()
    directory = store.optimized(name)
    check_lengths(directory, workload, serving)
    include_defaults = check_tasks(workload)
    beside = tuple(each.model for each in serving_here(store.root))
    for model in beside:
        say(f"note: {model} is being served on this machine and shares it with this measurement")
    with logs(store) as folder:
        with (
            running(directory, served_name(conditions), serving, log=folder / f"evaluate-{name}.vllm.log") as server,
            PeakMemory(server.process.pid) as memory,
        ):
            say(f"serving {name}: ready in {server.ready_s:.0f} s")
            load, quality, items = figures(server, directory, workload, folder / f"evaluate-{name}", include_defaults)
        facts = server.startup_log.facts()
        engine = Engine(
            name="vllm",
            version=facts.version,
            arguments=server.arguments,
            dtype=facts.dtype,
            quantization=facts.quantization,
            kernel=facts.kernel,
            ready_s=server.ready_s,
        )
    evaluation = Evaluation(
        variant=name,
        variant_digest=conditions.variant.digest,
        base_digest=conditions.variant.base_digest,
        workload=conditions.workload,
        engine=engine,
        hardware=conditions.hardware,
        key=conditions.key,
        tool_versions=conditions.tool_versions,
        quality=tuple(quality),
        load=load.load,
        rounds=load.rounds,
        memory=Memory(
            weights_bytes=conditions.variant.weights_bytes,
            peak_resident_bytes=memory.resident_bytes,
            peak_gpu_bytes=memory.gpu_bytes,
            kv_cache_tokens=facts.kv_cache_tokens,
        ),
        beside=beside,
        started_at=started_at,
        seconds=round(time.monotonic() - started, 3),
    )
    write_samples(store.evaluation(name).with_suffix(SAMPLES_SUFFIX), evaluation.key, [*load.requests, *items])
    evaluation.write(store.evaluation(name))
    return evaluation


def served_name(conditions: Conditions) -> str:
    return f"{conditions.variant.variant}-{conditions.variant.digest[:12]}"


def figures(
    server: Server, directory: Path, workload: Workload, logs_prefix: Path, include_defaults: bool
) -> tuple[Measured, list[TaskScore], list[dict[str, Any]]]:
    """Load, quality and the quality's items, each said as soon as it is known."""
    check_fits(workload, server.max_model_len())
    with tempfile.TemporaryDirectory(prefix="slipway-") as temporary:
        work = Path(temporary)
        load = measure_load(server, directory, workload, work, str(logs_prefix))
        rates = ", ".join(f"{each.output_tokens_per_s:.0f}" for each in load.rounds)
        say(f"load: {load.load.requests_completed}/{load.load.requests} requests; {rates} tokens/s by round")
        quality, items = measure_quality(
            server, directory, workload, work, Path(f"{logs_prefix}.quality.log"), include_defaults=include_defaults
        )
    for score in quality:
        say(f"quality: {score.task} {score.value:.3f} ({score.low:.3f} to {score.high:.3f})")
    server.check_alive()
    return load, quality, items


@contextlib.contextmanager
def logs(store: ModelStore) -> Iterator[Path]:
    """Where the logs go: the run's folder, or outside a run a temporary one that stays only after a failure."""
    if run_id := os.environ.get(RUN_VARIABLE):
        folder = store.run(run_id) / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    folder = Path(tempfile.mkdtemp(prefix="slipway-evaluate-"))
    yield folder
    shutil.rmtree(folder)


def write_samples(path: Path, key: str, items: list[dict[str, Any]]) -> None:
    """One line per request and item, after a first line that names the evaluation they belong to."""
    write_text(path, "".join(json.dumps(each) + "\n" for each in [{"evaluation": key}, *items]))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
