"""One variant under measurement: its server, the samples taken so far, and what ended it, if anything did."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from stages.evaluate.bench import Target
from stages.evaluate.conditions import Conditions
from stages.evaluate.distributions import measure_distributions
from stages.evaluate.drift import drift_of
from stages.evaluate.gates import SLICE
from stages.evaluate.items import items_of
from stages.evaluate.lanes import Lane
from stages.evaluate.load import Known, Loading, Pace, StartLoad, check_fits
from stages.evaluate.peak_memory import PeakMemory
from stages.evaluate.quality import Part, first_parts, joined, run_tasks, scores_of
from stages.evaluate.trace import Trace
from stages.parts.base.errors import Interrupted, ServerFailed, SlipwayError
from stages.parts.base.serving_settings import Serving
from stages.parts.base.workload import Workload
from stages.parts.records.evaluation import (
    Engine,
    Evaluation,
    Goodput,
    Memory,
    Probe,
    Schedule,
    Smaller,
    Speed,
    TaskScore,
    measures_of,
)
from stages.parts.samples.capacity import capacity_of
from stages.parts.samples.evidence import Measured
from stages.parts.samples.figures import goodput_of, load_of, pooled_load
from stages.parts.samples.lines import AccuracyItem, HeldOutDocument, Item, LoadSamples, PerplexityItem, Samples
from stages.parts.vllm.client import has_chat_template
from stages.parts.vllm.probes import check_probes, record_probes
from stages.parts.vllm.server import Server, ServerSpec, running

QUALITY: Final = 0
"""The start of the server that the items of the quality tasks are noted for: they are asked once."""


class Subject:
    """Restored from an earlier measurement or new; ``start``, then ``check``, ``ask``, ``search`` and ``measure``."""

    def __init__(self, name: str, directory: Path, conditions: Conditions, logs: Path) -> None:
        self.name, self.directory, self.conditions, self._logs = name, directory, conditions, logs
        self.failure: SlipwayError | None = None
        self.refused = ""
        """The gates that it failed, in one sentence."""
        self.asked = False
        """Whether the quality of all items is known."""
        self.exhausted: set[str] = set()
        """The quality tasks of which all items were asked."""
        self.question_s: dict[str, float] = {}
        """Seconds for an item of each task, as measured now."""
        self.measured_now = False
        self.looks = 0
        """How often the choice was looked at with data of this variant."""
        self.rounds: list[LoadSamples] = []
        self.trials: list[LoadSamples] = []
        self.smaller: Smaller | None = None
        """What was measured of it on fewer GPUs, with its samples."""
        self.smaller_load = StartLoad()
        self.speeds: list[tuple[Speed, Speed]] = []
        """The speed of the machine before and after each block."""
        self.ready_s: list[float] = []
        self.load_s: list[float] = []
        """Seconds of each start and of the load of each block, as measured now."""
        self.loading: Loading
        """The load of the present start."""
        self._loading_s = 0.0
        self._items: list[Item] = []
        self._held_out: list[HeldOutDocument] = []
        self._probes: tuple[Probe, ...] = ()
        self._agreement: float | None = None
        self._not_asked: dict[str, str] = {}
        self.quality: tuple[TaskScore, ...] = ()
        self._engine: Engine | None = None
        self._kv_cache_tokens = 0
        self._resident_bytes, self._gpu_bytes = 0, 0
        self.started_at: datetime | None = None
        self.seconds = 0.0
        self._lane: Lane | None = None
        self._server: Server | None = None
        self._running = contextlib.ExitStack()

    def restore(self, evaluation: Evaluation, samples: Samples) -> None:
        """Continue what was measured before under the same conditions."""
        self.rounds, self.trials = list(samples.rounds), list(samples.trials)
        self.smaller = evaluation.smaller
        self.smaller_load = StartLoad(samples.smaller_rounds, samples.smaller_trials)
        self._items, self._held_out = list(samples.items), list(samples.held_out)
        self._probes, self._agreement, self.quality = evaluation.probes, evaluation.agreement, evaluation.quality
        self._not_asked = dict(evaluation.not_asked)
        self._engine, self._kv_cache_tokens = evaluation.engine, evaluation.memory.kv_cache_tokens
        self._resident_bytes = evaluation.memory.peak_resident_bytes
        self._gpu_bytes = evaluation.memory.peak_gpu_bytes or 0
        self.started_at, self.seconds, self.asked = evaluation.started_at, evaluation.seconds, True
        self.looks = len(evaluation.looks)
        self.ready_s = [evaluation.engine.ready_s]
        self.load_s = [sum(each.run.duration_s for each in (*samples.rounds, *samples.trials)) / self.blocks]
        if evaluation.drift:
            probes = evaluation.drift.probes()
            self.speeds = list(zip(probes[::2], probes[1::2], strict=True))

    @property
    def going(self) -> bool:
        return self.failure is None and not self.refused

    @property
    def blocks(self) -> int:
        """The number of the block after the last one in which it was loaded."""
        return max((each.run.restart + 1 for each in self.rounds), default=0)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Time spent on this variant. A failure inside ends its server, and this variant only."""
        started, self.measured_now = time.monotonic(), True
        try:
            yield
        except Interrupted:
            raise
        except SlipwayError as error:
            self.failure = error
            self.stop()
        finally:
            self.seconds += time.monotonic() - started

    @property
    def standing(self) -> bool:
        return self._server is not None

    def start(
        self, lane: Lane, workload: Workload, serving: Serving, trace: Trace | None, cancelled: threading.Event
    ) -> float:
        """Start the server; return the seconds until it answered.

        Args:
            cancelled: ends the start, for a thread.

        Raises:
            ServerFailed, MeasurementFailed, ConfigError.
        """
        self.started_at = self.started_at or datetime.now(UTC)
        log = self._logs / f"evaluate-{self.name}.vllm.log"
        unlimited = serving.model_copy(update={"max_queued_tokens": None})  # a refused request would not be measured
        spec = ServerSpec(self.directory, self.served_name, unlimited, log, gpus=lane.gpus)
        server = self._running.enter_context(running(spec, cancelled))
        check_fits(workload, trace, server.max_model_len())
        facts = server.startup_log.facts()
        self._engine = self._engine or Engine(
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
        self._kv_cache_tokens = self._kv_cache_tokens or facts.kv_cache_tokens
        self._server, self._lane = server, lane
        self.ready_s.append(server.ready_s)
        return server.ready_s

    def check(self, workload: Workload) -> None:
        """Ask what takes seconds and needs no other variant: fixed questions, and distributions on held-out text.

        Raises:
            ServerFailed, ConfigError, TransientError.
        """
        with self._watched() as (server, _):
            where = server.url, server.name, server.api_key
            try:
                self._probes = record_probes(*where)
                self._agreement = check_probes(*where, self._probes).agreement
                chats = has_chat_template(self.directory)
                self._held_out = measure_distributions(*where, workload, server.max_model_len(), chats=chats)
            except SlipwayError:
                server.check_alive()
                raise

    def ask(self, workload: Workload, *, include_defaults: bool) -> None:
        """Ask the next part of the quality tasks: the first slice of the items, then the rest of those that every
        variant is asked.

        Raises:
            ServerFailed, MeasurementFailed, ConfigError, HubUnavailable.
        """
        log = self._logs / f"evaluate-{self.name}.quality.log"
        # The items of a group whose tasks count equally are weighted by the numbers that were asked.
        whole = bool(self.quality) and all(item.weight == 1 for item in self._items)
        start, stop = (SLICE, None) if whole else (0, None if self.quality else SLICE)
        parts = first_parts(workload, start, stop)
        scores = self._answered(parts, workload, log, include_defaults=include_defaults, joining=start > 0)
        self.asked = bool(start) or stop is None or max((score.items for score in scores), default=0) < SLICE

    def ask_further(self, until: Mapping[str, int], workload: Workload, *, include_defaults: bool) -> None:
        """Ask more items, as far as there are any, until that many of each task were asked. It is safe to repeat.

        Raises:
            ServerFailed, MeasurementFailed, ConfigError, HubUnavailable.
        """
        counts = {each.task: each.items for each in self.quality}
        parts = {task: (counts[task], count) for task, count in until.items() if counts.get(task, count) < count}
        if not parts:
            return
        log = self._logs / f"evaluate-{self.name}.further.log"
        scores = self._answered(parts, workload, log, include_defaults=include_defaults, joining=True)
        got = {score.task: score.items for score in scores}
        self.exhausted |= {task for task, (start, stop) in parts.items() if got.get(task, 0) < stop - start}

    def _answered(
        self, parts: Mapping[str, Part], workload: Workload, log: Path, *, include_defaults: bool, joining: bool
    ) -> list[TaskScore]:
        """The scores of these parts, which join those that are known or take their place."""
        with self._watched() as (server, lane):
            found = run_tasks(
                lane.harness, server, self.directory, workload, log, include_defaults=include_defaults, parts=parts
            )
        server.check_alive()
        self._not_asked |= found["left_out"]
        scores, items = scores_of(found), list(items_of(found, QUALITY))
        self._items = [*self._items, *items] if joining else items
        self.quality = joined(self.quality, scores, self.samples()) if joining else tuple(scores)
        for task, seconds in found["seconds"].items():
            self.question_s[task] = seconds / max(1, found["items"][task])
        return scores

    @property
    def loaded(self) -> StartLoad:
        return StartLoad(self.rounds, self.trials)

    def search(
        self, workload: Workload, block: int, trace: Trace | None, reference: StartLoad
    ) -> Iterator[LoadSamples]:
        """Find the capacity of this start, run by run.

        Args:
            reference: the load of the variant whose pace all follow, which may be this one, as far as it is known.

        Raises:
            ServerFailed, MeasurementFailed.
        """
        server, lane = self._place()
        log = self._logs / f"evaluate-{self.name}.load{f'-{block + 1}' if block else ''}.log"
        target = Target(lane.generator, server, self.directory, workload, trace, log)
        self.loading = Loading(target, block, Known(reference, self.loaded))
        self._loading_s = 0.0
        yield from self._run(self.loading.search())

    def measure(self, pace: Pace) -> Iterator[LoadSamples]:
        """The round of this start. Its load counts only once all of it was measured.

        Raises:
            ServerFailed, MeasurementFailed.
        """
        yield from self._run(self.loading.measure(pace))
        self.load_s.append(self._loading_s)
        self.rounds += self.loading.rounds
        self.trials += self.loading.trials

    def _run(self, runs: Iterator[LoadSamples]) -> Iterator[LoadSamples]:
        """As *runs*, with the time and the memory that they take noted."""
        while True:
            began = time.monotonic()
            with self._watched():
                found = next(runs, None)
            self._loading_s += time.monotonic() - began
            if found is None:
                return
            yield found

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
            accuracy=tuple(item for item in self._items if isinstance(item, AccuracyItem)),
            perplexity=tuple(item for item in self._items if isinstance(item, PerplexityItem)),
            held_out=tuple(self._held_out),
            trials=tuple(self.trials),
            smaller_rounds=tuple(self.smaller_load.rounds),
            smaller_trials=tuple(self.smaller_load.trials),
        )

    def measured(self, workload: Workload) -> Measured:
        """For the gates and the looks."""
        load = measures_of(pooled_load(self.rounds), _goodput(self.rounds, workload)) if self.rounds else None
        return Measured(self.samples(), self.conditions.variant.weights_bytes, self._agreement, load)

    def evaluation(
        self,
        workload: Workload,
        samples_sha256: str,
        *,
        beside: tuple[str, ...],
        looks: tuple[float, ...],
        schedule: Schedule,
    ) -> Evaluation:
        """Raises: ServerFailed: its server never stood."""
        if self._engine is None:
            raise ServerFailed(f"the server of {self.name} was never started")
        variant, conditions = self.conditions.variant, self.conditions
        return Evaluation(
            variant=self.name,
            variant_digest=variant.digest,
            base_digest=variant.base_digest,
            workload=conditions.workload,
            engine=self._engine,
            hardware=conditions.hardware,
            key=conditions.key,
            samples_sha256=samples_sha256,
            tool_versions=conditions.tool_versions,
            quality=self.quality,
            load=pooled_load(self.rounds),
            rounds=tuple(map(load_of, self.rounds)),
            capacity=capacity_of(self.rounds, self.trials),
            goodput=_goodput(self.rounds, workload),
            drift=drift_of(self.speeds),
            probes=self._probes,
            agreement=self._agreement,
            not_asked=self._not_asked,
            looks=looks,
            schedule=schedule,
            smaller=self.smaller,
            memory=self._memory(),
            stored=variant.stored,
            beside=beside,
            started_at=self.started_at or datetime.now(UTC),
            seconds=round(self.seconds, 3),
        )

    def _memory(self) -> Memory:
        return Memory(
            weights_bytes=self.conditions.variant.weights_bytes,
            peak_resident_bytes=self._resident_bytes,
            peak_gpu_bytes=self._gpu_bytes or None,
            kv_cache_tokens=self._kv_cache_tokens,
        )

    def as_smaller(self, size: int, workload: Workload, serving: Serving) -> Smaller:
        """What was measured of this subject, as that of the same variant on *size* GPUs, fewer than *serving* says."""
        return Smaller(
            tensor_parallel_size=size,
            instead_of=serving.tensor_parallel_size,
            failure=str(self.failure or ""),
            engine=self._engine,
            load=pooled_load(self.rounds) if self.rounds else None,
            rounds=tuple(map(load_of, self.rounds)),
            capacity=capacity_of(self.rounds, self.trials),
            goodput=_goodput(self.rounds, workload) if self.rounds else None,
            kv_cache_tokens=self._kv_cache_tokens,
            seconds=round(self.seconds, 3),
        )

    def _place(self) -> tuple[Server, Lane]:
        """Raises: ServerFailed: its server does not run."""
        if self._server is None or self._lane is None:
            raise ServerFailed(f"the server of {self.name} is not running")
        self._server.check_alive()
        return self._server, self._lane

    @contextlib.contextmanager
    def _watched(self) -> Iterator[tuple[Server, Lane]]:
        """The server, with its memory observed only while it has work, because observing takes CPU time."""
        server, lane = self._place()
        with PeakMemory(server.process.pid, lane.gpus) as memory:
            yield server, lane
        self._resident_bytes = max(self._resident_bytes, memory.resident_bytes)
        self._gpu_bytes = max(self._gpu_bytes, memory.gpu_bytes or 0)


def _goodput(rounds: Sequence[LoadSamples], workload: Workload) -> Goodput | None:
    return goodput_of(rounds, workload.slo.ttft_ms, workload.slo.tpot_ms) if workload.slo else None
