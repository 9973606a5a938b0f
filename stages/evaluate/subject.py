"""One variant under measurement: its server and where it runs, what was measured of it so far, and what ended it, if
anything did. Servers run one after another on one GPU or a CPU, or side by side with GPUs of their own."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scoring.names import variant_of
from scoring.profile import Profile
from stages.evaluate import generator, harness
from stages.evaluate.bench import LoadTarget
from stages.evaluate.distributions import measure_distributions
from stages.evaluate.load import Loading, Pace, check_fits
from stages.evaluate.preloaded import Preloaded
from stages.evaluate.quality import SLICE, Part, first_parts, items_of, joined, run_tasks, scores_of
from stages.evaluate.results import Conditions
from stages.evaluate.trace import Trace
from stages.parts.base.errors import Interrupted, ServerFailed, SlipwayError
from stages.parts.base.log import say
from stages.parts.base.serving_settings import Recipe, Serving
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.machine.environment import stack_of
from stages.parts.machine.process import PeakMemory
from stages.parts.model.description import chat_template
from stages.parts.records.evaluation import Engine, Evaluation, Goodput, Probe, Speed, TaskScore, measures_of
from stages.parts.samples.capacity import capacity_of
from stages.parts.samples.evidence import Measured
from stages.parts.samples.figures import goodput_of, load_of, pooled_load
from stages.parts.samples.lines import LoadSamples, Samples
from stages.parts.vllm.arguments import gpu_groups, takes_pictures
from stages.parts.vllm.client import answers_chat
from stages.parts.vllm.parsers import PARSES_CALLS, chat_model, why_calls_stay
from stages.parts.vllm.probes import check_probes, record_probes
from stages.parts.vllm.server import Server, ServerSpec, running


@dataclass(frozen=True)
class Session:
    store: ModelStore
    workload: Workload
    serving: Serving
    profile: Profile
    trace: Trace | None
    include_defaults: bool
    """Whether lm-eval's own tasks are needed."""
    beside: tuple[str, ...]
    """Models that are served on the same machine."""
    logs: Path
    """The folder for logs."""
    recipe: Recipe | None = None
    """Of the candidate whose session this is."""
    gpu_share: float = 1.0
    """``Evaluation.gpu_share``"""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Ends the starts that other threads wait for."""

    def of_candidate(self, name: str) -> Session:
        """Return the session of a candidate, which is served in its own way, with a load in proportion to its GPUs."""
        recipe = self.serving.recipe_of(name)
        serving, workload = self.serving.with_recipe(recipe), self.workload
        share = serving.tensor_parallel_size / self.serving.tensor_parallel_size
        rate_per_s = workload.request_rate_per_s and workload.request_rate_per_s * share
        load = {"concurrency": math.ceil(workload.concurrency * share), "request_rate_per_s": rate_per_s}
        return replace(self, serving=serving, workload=workload.model_copy(update=load), recipe=recipe, gpu_share=share)


@dataclass(frozen=True)
class Lane:
    """A place for one server at a time, with the clients that load and ask it."""

    gpus: str
    """The server's ``CUDA_VISIBLE_DEVICES``; empty without GPUs of its own."""
    generator: Preloaded
    harness: Preloaded


def lanes(standing: contextlib.ExitStack, serving: Serving, variants: int, logs: Path) -> list[Lane]:
    """Start the clients of this machine's lanes, at most one for each variant; they run until *standing* is closed."""
    places = []
    for number, gpus in enumerate(gpu_groups(serving)[:variants]):
        clients = (
            standing.enter_context(
                Preloaded(module.__name__, logs / f"evaluate.{name}{number or ''}.log", module.VARIABLES)
            )
            for name, module in (("generator", generator), ("harness", harness))
        )
        places.append(Lane(gpus, *clients))
    return places


@dataclass
class VariantData:
    """All that was measured of a variant."""

    samples: Samples = field(default_factory=Samples)
    probes: tuple[Probe, ...] = ()
    agreement: float | None = None
    quality: tuple[TaskScore, ...] = ()
    not_asked: dict[str, str] = field(default_factory=dict)
    """Why quality tasks could not be asked, by their names."""
    engine: Engine | None = None
    """That of the first start; None if the server never started."""
    kv_cache_tokens: int = 0
    resident_bytes: int = 0
    gpu_bytes: int = 0
    speeds: list[tuple[Speed, Speed]] = field(default_factory=list)
    """The speed of the machine before and after each block."""
    started_at: datetime | None = None
    seconds: float = 0.0

    def goodput(self, workload: Workload) -> Goodput | None:
        rounds, slo = self.samples.rounds, workload.slo
        return goodput_of(rounds, slo.ttft_ms, slo.tpot_ms) if rounds and slo else None

    def figures(self, workload: Workload) -> dict[str, Any]:
        """Compute the fields of ``Evaluation`` that follow from the load."""
        rounds = self.samples.rounds
        return {
            "engine": self.engine,
            "load": pooled_load(rounds) if rounds else None,
            "rounds": tuple(map(load_of, rounds)),
            "capacity": capacity_of(self.samples),
            "goodput": self.goodput(workload),
            "seconds": round(self.seconds, 3),
        }


class Subject:
    """Restored from an earlier measurement or new; ``start``, then ``check``, ``ask``, ``search`` and ``measure``."""

    def __init__(self, name: str, directory: Path, conditions: Conditions, session: Session) -> None:
        self.name, self.directory, self.conditions, self.session = name, directory, conditions, session
        self.data = VariantData(Samples(gpu_share=session.gpu_share))
        self.failure: SlipwayError | None = None
        self.refused = ""
        """The gates that it failed, in one sentence."""
        self.refused_again = True
        """Whether another run under the same conditions need not try."""
        self.asked = False
        """Whether the quality of all items is known."""
        self.exhausted: set[str] = set()
        """The quality tasks of which all items were asked."""
        self.question_s: dict[str, float] = {}
        """Seconds for an item of each task, as measured now."""
        self.measured_now = False
        self.looks = 0
        """How often the choice was looked at with data of this variant."""
        self.ready_s: list[float] = []
        """Seconds until each start answered."""
        self.load_s: list[float] = []
        """Seconds of the load of each block."""
        self.loading: Loading
        """The load of the present start."""
        self._loading_s = 0.0
        self._standing: tuple[Server, Lane] | None = None
        self._running = contextlib.ExitStack()

    def restore(self, evaluation: Evaluation, samples: Samples) -> None:
        """Continue what was measured before under the same conditions."""
        machine = evaluation.drift.probes() if evaluation.drift else ()
        self.data = VariantData(
            samples=samples,
            probes=evaluation.probes,
            agreement=evaluation.agreement,
            quality=evaluation.quality,
            not_asked=dict(evaluation.not_asked),
            engine=evaluation.engine,
            kv_cache_tokens=evaluation.memory.kv_cache_tokens,
            resident_bytes=evaluation.memory.peak_resident_bytes,
            gpu_bytes=evaluation.memory.peak_gpu_bytes or 0,
            speeds=list(zip(machine[::2], machine[1::2], strict=True)),
            started_at=evaluation.started_at,
            seconds=evaluation.seconds,
        )
        self.asked = True
        self.looks = len(evaluation.looks)
        self.ready_s = [evaluation.engine.ready_s]
        self.load_s = [sum(run.run.duration_s for run in samples.rounds + samples.trials) / self.blocks]

    @property
    def going(self) -> bool:
        return self.failure is None and not self.refused

    @property
    def answers_as(self) -> tuple[str, ...]:
        """What its answers follow from: the weights, how keys and values are stored, and what computes them."""
        serving = self.session.serving
        return variant_of(self.name), serving.kv_cache_dtype, serving.engine_version, *serving.extra_arguments

    @property
    def blocks(self) -> int:
        """The number of the block after the last one in which it was loaded."""
        return max((samples.run.restart + 1 for samples in self.data.samples.rounds), default=0)

    @property
    def standing(self) -> bool:
        return self._standing is not None

    def measured(self) -> Measured:
        """Select what the gates and the looks need."""
        data, rounds = self.data, self.data.samples.rounds
        load = measures_of(pooled_load(rounds), data.goodput(self.session.workload)) if rounds else None
        return Measured(data.samples, self.conditions.variant.weights_bytes, data.agreement, load)

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
            self.data.seconds += time.monotonic() - started

    def start(self, lane: Lane) -> None:
        """Start the server, which the session's ``cancelled`` ends too."""
        session, data = self.session, self.data
        data.started_at = data.started_at or datetime.now(UTC)
        log = session.logs / f"evaluate-{self.name}.vllm.log"
        unlimited = session.serving.model_copy(update={"max_queued_tokens": None})  # a refusal would not be measured
        served_name = f"{self.name}-{self.conditions.variant.digest[:12]}"
        adapters = {name: session.store.adapter(name) for name in session.serving.adapters}
        gpus = ",".join(lane.gpus.split(",")[: session.serving.tensor_parallel_size])  # a lane has room for the widest
        spec = ServerSpec(self.directory, served_name, unlimited, log, adapters=adapters, gpus=gpus)
        server = self._running.enter_context(running(spec, session.cancelled))
        check_fits(session.workload, session.trace, server.max_model_len())
        facts = asdict(server.startup_log.facts())
        kv_cache_tokens = facts.pop("kv_cache_tokens")
        data.kv_cache_tokens = data.kv_cache_tokens or kv_cache_tokens
        if data.engine is None:
            facts |= {"arguments": server.arguments, "ready_s": server.ready_s, "start": server.start}
            data.engine = Engine(name="vllm", stack=stack_of(session.serving.engine_version), **facts)
        self._standing = server, lane
        self.ready_s.append(server.ready_s)

    def check(self, twin: Subject | None = None) -> None:
        """Ask what takes seconds and needs no other variant: fixed questions, and distributions on held-out text, which
        are those of a *twin*. Its answers to the fixed questions have to be given here, too."""
        with self._watched() as (server, _):
            access, data = server.access, self.data
            try:
                data.probes = record_probes(access)
                data.agreement = min(check_probes(access, each.data.probes) for each in (self, twin) if each)
                self._try_tools(server)
                chats = bool(chat_template(self.directory))
                self._try_picture(server, chats=chats)
                if twin:
                    documents = twin.data.samples.held_out
                else:
                    longest = server.max_model_len()
                    documents = tuple(measure_distributions(access, self.session.workload, longest, chats=chats))
                data.samples = replace(data.samples, held_out=documents)
            except SlipwayError:
                server.check_alive()
                raise

    def _try_tools(self, server: Server) -> None:
        """Offer it a tool to call, or note why that can't be done though its chat template offers tools."""
        if PARSES_CALLS in server.arguments:
            if not answers_chat(server.url, server.name, server.api_key, tools=True):
                raise ServerFailed(f"{self.name} did not answer a chat in which it may call a tool")
        elif why := why_calls_stay(self.session.serving, chat_model(self.directory)):
            say(f"note: {why}")
            self.data.not_asked["tool_choice: auto"] = why

    def _try_picture(self, server: Server, *, chats: bool) -> None:
        """Show it a picture, if it takes them in chats."""
        if chats and takes_pictures(self.session.serving, self.directory):
            if not answers_chat(server.url, server.name, server.api_key, picture=True):
                raise ServerFailed(f"{self.name} did not answer a chat with a picture")
            say(f"{self.name} answered a chat with a picture")

    def ask(self) -> None:
        """Ask the next part of the quality tasks: the first slice of the items, then the rest of those that every
        variant is asked."""
        data = self.data
        # The items of a group whose tasks count equally are weighted by the numbers that were asked.
        sliced = bool(data.quality) and all(item.weight == 1 for item in data.samples.items)
        start, stop = (SLICE, None) if sliced else (0, None if data.quality else SLICE)
        parts = first_parts(self.session.workload, start, stop, self.session.serving.adapters)
        scores = self._ask("quality", parts, joining=start > 0)
        self.asked = bool(start) or stop is None or max((score.items for score in scores), default=0) < SLICE
        for score in data.quality if self.asked else ():
            say(f"quality of {self.name}: {score.task} {score.value:.3f} ({score.low:.3f} to {score.high:.3f})")

    def adopt(self, twin: Subject) -> None:
        """Take over the answers of a twin."""
        self.data.samples = replace(self.data.samples, items=twin.data.samples.items)
        self.data.quality = twin.data.quality
        self.data.not_asked |= twin.data.not_asked
        self.asked, self.exhausted, self.question_s = twin.asked, twin.exhausted, twin.question_s
        say(f"quality of {self.name}: as of {twin.name}, which answers alike")

    def ask_further(self, until: Mapping[str, int]) -> None:
        """Ask more items, as far as there are any, until that many of each task were asked. It is safe to repeat."""
        counts = {score.task: score.items for score in self.data.quality}
        if parts := {task: (counts[task], count) for task, count in until.items() if counts.get(task, count) < count}:
            answered = {score.task: score.items for score in self._ask("further", parts, joining=True)}
            self.exhausted |= {task for task, (start, stop) in parts.items() if answered.get(task, 0) < stop - start}
        totals = [f"{score.items} items of {score.task}" for score in self.data.quality if score.task in until]
        say(f"quality of {self.name}: {', '.join(totals)} asked in all")

    def _ask(self, kind: str, parts: Mapping[str, Part], *, joining: bool) -> list[TaskScore]:
        """Ask these parts of the tasks. Their scores join those that are known, or replace them."""
        data, workload, defaults = self.data, self.session.workload, self.session.include_defaults
        log = self.session.logs / f"evaluate-{self.name}.{kind}.log"
        with self._watched() as (server, lane):
            result = run_tasks(lane.harness, server, self.directory, workload, log, parts, include_defaults=defaults)
        server.check_alive()
        data.not_asked |= result["left_out"]
        scores, items = scores_of(result), tuple(items_of(result))
        data.samples = replace(data.samples, items=data.samples.items + items if joining else items)
        data.quality = joined(data.quality, scores, data.samples) if joining else tuple(scores)
        for task, seconds in result["seconds"].items():
            self.question_s[task] = seconds / max(1, result["items"][task])
        return scores

    def search(self, block: int, reference: Samples) -> Iterator[LoadSamples]:
        """Find the capacity of this start, run by run. *reference* has the load so far of the variant that sets the
        pace, which may be this one."""
        server, lane = self._place()
        session = self.session
        log = session.logs / f"evaluate-{self.name}.load{f'-{block + 1}' if block else ''}.log"
        target = LoadTarget(lane.generator, server, self.directory, session.workload, session.trace, log)
        self.loading = Loading(target, block, reference.on(session.gpu_share), self.data.samples)
        self._loading_s = 0.0
        yield from self._run(self.loading.search())

    def measure(self, pace: Pace) -> Iterator[LoadSamples]:
        """Measure the round of this start. Its load counts only once all of it was measured."""
        yield from self._run(self.loading.measure(pace))
        self.load_s.append(self._loading_s)
        self.data.samples = self.data.samples.plus(self.loading.found)

    def _run(self, runs: Iterator[LoadSamples]) -> Iterator[LoadSamples]:
        """Yield the *runs*, and note the time and the memory that they take."""
        while True:
            began = time.monotonic()
            with self._watched():
                samples = next(runs, None)
            self._loading_s += time.monotonic() - began
            if samples is None:
                return
            yield samples

    def refuse(self, why: str, *, lasting: bool = True) -> None:
        """End the measurement of this variant, unless the reason is empty. *lasting*: it would be so again."""
        self.refused, self.refused_again = why, lasting
        if why:
            self.stop()
            say(f"{self.name} is not loaded: {why}")

    def stop(self) -> None:
        """End the server and everything that it started. It is safe to call this again."""
        self._standing = None
        self._running.close()

    def _place(self) -> tuple[Server, Lane]:
        """Return the server and its lane; ServerFailed if it does not run."""
        if self._standing is None:
            raise ServerFailed(f"the server of {self.name} is not running")
        self._standing[0].check_alive()
        return self._standing

    @contextlib.contextmanager
    def _watched(self) -> Iterator[tuple[Server, Lane]]:
        """Observe the server's memory, but only while it has work, because observing takes CPU time."""
        server, lane = self._place()
        with PeakMemory(server.process.pid, lane.gpus) as memory:
            yield server, lane
        data = self.data
        data.resident_bytes = max(data.resident_bytes, memory.resident_bytes)
        data.gpu_bytes = max(data.gpu_bytes, memory.gpu_bytes or 0)
