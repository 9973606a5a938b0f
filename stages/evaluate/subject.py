"""One variant under measurement: its server, the samples taken so far, and the error that ended it, if any."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from stages.evaluate.conditions import Conditions
from stages.evaluate.divergence import measure_distributions
from stages.evaluate.drift import drift_of
from stages.evaluate.items import items_of
from stages.evaluate.load import PlannedRun, check_fits, run_load
from stages.evaluate.memory import PeakMemory
from stages.evaluate.preloaded import Preloaded
from stages.evaluate.quality import run_tasks, scores_of
from stages.evaluate.trace import Trace
from stages.parts.base.errors import Interrupted, ServerFailed, SlipwayError
from stages.parts.base.settings import Serving, Workload
from stages.parts.engine.probes import record_probes
from stages.parts.engine.server import Server, ServerSpec, running
from stages.parts.records.evaluation import Engine, Evaluation, Memory, Probe, Speed, TaskScore
from stages.parts.samples.figures import goodput_of, load_of, pooled_load
from stages.parts.samples.lines import AccuracyItem, HeldOutDocument, Item, LoadSamples, PerplexityItem, Samples


class Subject:
    """``start``, ``load`` and ``measure_quality`` are called for each start of its server; then ``evaluation``."""

    def __init__(self, name: str, directory: Path, conditions: Conditions, logs: Path) -> None:
        self.name, self.directory, self.conditions, self._logs = name, directory, conditions, logs
        self.failure: SlipwayError | None = None
        self.rounds: list[LoadSamples] = []
        self.sweep: list[LoadSamples] = []
        self.speeds: list[tuple[Speed, Speed]] = []
        """The speed of the machine before and after the load of each start."""
        self.measured_again = 0
        self._items: list[Item] = []
        self._held_out: list[HeldOutDocument] = []
        self._probes: tuple[Probe, ...] = ()
        self._quality: list[list[TaskScore]] = []
        self._engines: list[tuple[Engine, int]] = []
        self._resident_bytes, self._gpu_bytes = 0, 0
        self._started_at: datetime | None = None
        self._seconds = 0.0
        self._server: Server | None = None
        self._running = contextlib.ExitStack()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Time spent on this variant. A failure inside ends its server, and this variant only."""
        started = time.monotonic()
        try:
            yield
        except Interrupted:
            raise
        except SlipwayError as error:
            self.failure = error
            self.stop()
        finally:
            self._seconds += time.monotonic() - started

    @property
    def standing(self) -> bool:
        return self._server is not None

    def start(
        self, workload: Workload, serving: Serving, trace: Trace | None, cancelled: threading.Event | None = None
    ) -> float:
        """Start the server; return the seconds until it answered.

        Args:
            cancelled: ends the start, for a thread.

        Raises:
            ServerFailed, MeasurementFailed, ConfigError.
        """
        self._started_at = self._started_at or datetime.now(UTC)
        log = self._logs / f"evaluate-{self.name}.vllm.log"
        spec = ServerSpec(self.directory, self.served_name, serving, log)
        server = self._running.enter_context(running(spec, cancelled))
        check_fits(workload, trace, server.max_model_len())
        facts = server.startup_log.facts()
        engine = Engine(
            name="vllm",
            version=facts.version,
            arguments=server.arguments,
            dtype=facts.dtype,
            quantization=facts.quantization,
            kernel=facts.kernel,
            fallbacks=facts.fallbacks,
            cores=facts.cores,
            ready_s=server.ready_s,
        )
        self._server = server
        self._engines.append((engine, facts.kv_cache_tokens))
        return server.ready_s

    def load(self, generator: Preloaded, workload: Workload, planned: PlannedRun, trace: Trace | None) -> LoadSamples:
        """Raises: ServerFailed, MeasurementFailed."""
        which = f"load-{planned.number + 1}" if planned.phase == "round" else f"sweep-{planned.number}"
        log = self._logs / f"evaluate-{self.name}.{which}.log"
        with self._watched() as server:
            return run_load(generator, server, self.directory, workload, planned, trace, log)

    def measure_quality(
        self, harness: Preloaded, workload: Workload, restart: int, work: Path, *, include_defaults: bool
    ) -> list[TaskScore]:
        """Measure quality at one start of the server, and at the first one also distributions and probes.

        Raises:
            ServerFailed, MeasurementFailed, ConfigError, HubUnavailable.
        """
        log = self._logs / f"evaluate-{self.name}.quality{f'-{restart + 1}' if restart else ''}.log"
        with self._watched() as server:
            found = run_tasks(harness, server, self.directory, workload, work, log, include_defaults=include_defaults)
        server.check_alive()
        scores = scores_of(found)
        self._quality.append(scores)
        self._items += items_of(found, restart)
        if restart == 0:
            self._measure_once(server, workload)
        return scores

    def _measure_once(self, server: Server, workload: Workload) -> None:
        """Measure distributions and record probes; once is enough, because a restart does not change the weights.

        Raises:
            ServerFailed, ConfigError, TransientError.
        """
        where = server.url, server.name, server.api_key
        try:
            self._held_out += measure_distributions(*where, workload, server.max_model_len())
            self._probes = record_probes(*where)
        except SlipwayError:
            server.check_alive()
            raise

    def stop(self) -> None:
        """End the server and everything that it started. It is safe to call this again."""
        self._server = None
        self._running.close()

    @property
    def served_name(self) -> str:
        return f"{self.name}-{self.conditions.variant.digest[:12]}"

    def samples(self) -> Samples:
        """Everything that was measured so far."""
        return Samples(
            rounds=tuple(self.rounds),
            sweep=tuple(self.sweep),
            accuracy=tuple(each for each in self._items if isinstance(each, AccuracyItem)),
            perplexity=tuple(each for each in self._items if isinstance(each, PerplexityItem)),
            held_out=tuple(self._held_out),
        )

    def evaluation(
        self, workload: Workload, samples_sha256: str, *, beside: tuple[str, ...], interleaved_with: tuple[str, ...]
    ) -> Evaluation:
        variant, conditions = self.conditions.variant, self.conditions
        engine, kv_cache_tokens = self._engines[0]
        slo = workload.slo
        return Evaluation(
            variant=self.name,
            variant_digest=variant.digest,
            base_digest=variant.base_digest,
            workload=conditions.workload,
            engine=engine,
            hardware=conditions.hardware,
            key=conditions.key,
            samples_sha256=samples_sha256,
            tool_versions=conditions.tool_versions,
            quality=tuple(mean_score(list(scores)) for scores in zip(*self._quality, strict=True)),
            load=pooled_load(self.rounds),
            rounds=tuple(map(load_of, self.rounds)),
            sweep=tuple(map(load_of, self.sweep)),
            goodput=goodput_of(self.rounds, slo.ttft_ms, slo.tpot_ms) if slo else None,
            interleaved_with=interleaved_with,
            drift=drift_of(self.speeds, self.measured_again),
            probes=self._probes,
            memory=Memory(
                weights_bytes=variant.weights_bytes,
                peak_resident_bytes=self._resident_bytes,
                peak_gpu_bytes=None if interleaved_with else self._gpu_bytes or None,
                kv_cache_tokens=kv_cache_tokens,
            ),
            beside=beside,
            started_at=self._started_at or datetime.now(UTC),
            seconds=round(self._seconds, 3),
        )

    @contextlib.contextmanager
    def _watched(self) -> Iterator[Server]:
        """The server, with its memory observed only while it has work, because observing takes CPU time."""
        if self._server is None:
            raise ServerFailed(f"the server of {self.name} is not running")
        self._server.check_alive()
        with PeakMemory(self._server.process.pid) as memory:
            yield self._server
        self._resident_bytes = max(self._resident_bytes, memory.resident_bytes)
        self._gpu_bytes = max(self._gpu_bytes, memory.gpu_bytes or 0)


def mean_score(scores: list[TaskScore]) -> TaskScore:
    """The mean score of a task over the starts of the server. The interval does not shrink: the items are the same."""
    first = scores[0]
    names = [name for name in first.metrics if all(name in each.metrics for each in scores)]
    return first.model_copy(
        update={
            **{name: fmean(getattr(each, name) for each in scores) for name in ("value", "low", "high", "score")},
            "metrics": {name: fmean(each.metrics[name] for each in scores) for name in names},
        }
    )
