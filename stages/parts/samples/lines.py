"""The raw samples of an evaluation: a file of JSON lines, each a closed record with its kind.

head         the first line: the evaluation that the file belongs to
load         a round of the load, or a trial in the search for the capacity
request      one request of such a run
accuracy     one item of a task that is scored by accuracy
perplexity   one document of a task that is scored by bits per byte
held_out     the next-token distributions at each position of one held-out document
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from stages.parts.base.errors import ConfigError, DamagedModel
from stages.parts.base.files import sha256_of, write_text
from stages.parts.base.store import ModelStore
from stages.parts.records.answers import KeptAnswers, all_answers, answers_paths
from stages.parts.records.evaluation import Evaluation

MEASURE_AGAIN: Final = "remove the evaluation's .json beside them and run again: it is then measured again"
Phase = Literal["round", "trial"]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Head(_Line):
    kind: Literal["head"] = "head"
    evaluation: str
    """The evaluation's key."""


class _OfRun(_Line):
    """What identifies a run of the load generator within the file."""

    restart: int
    """The start of the server, from 0."""
    phase: Phase
    number: int
    """The round or trial over all starts, from 0."""

    @property
    def of_run(self) -> tuple[object, ...]:
        return self.phase, self.restart, self.number


class LoadRun(_OfRun):
    """A round of steady load, or a trial of a rate. Requests before and after do not count and are not here."""

    kind: Literal["load"] = "load"
    rate_per_s: float | None = None
    """Requests per second that were sent (a Poisson process); None if the same number is in flight all the time, which
    is how the search for the capacity begins too."""
    concurrency: int
    """Requests in flight at a time; where they arrive at a rate, the mean."""
    duration_s: float = Field(gt=0)
    """From the arrival of the first request to that of the first one which does not count any more."""
    targets_ms: tuple[float, float] | None = None
    """The highest TTFT and TPOT that a trial allowed; None for all else."""
    held: bool | None = None
    """Whether the targets held in a trial. One that was ended early, because too many missed them, has no requests."""


class TimedRequest(_OfRun):
    kind: Literal["request"] = "request"
    start_s: float
    """Seconds after the first request of the run."""
    ttft_ms: float
    tpot_ms: float
    e2el_ms: float
    itl_ms: tuple[float, ...]
    """Every gap between two tokens; empty in a trial."""
    prompt_tokens: int
    output_tokens: int


class _OfTask(_Line):
    restart: int
    task: str
    """The task that is scored; for an item of a group of tasks, the group."""
    subtask: str = ""
    """The item's own task where ``task`` is a group."""
    doc_id: int
    doc_hash: str | None = None
    weight: float = 1.0
    """How much the item counts in the score of its group."""
    cluster: str | None = None
    """What the item shares with others of its task, such as a text; None in older samples."""

    @property
    def place(self) -> tuple[str, str, int]:
        return self.task, self.subtask, self.doc_id


class AccuracyItem(_OfTask):
    kind: Literal["accuracy"] = "accuracy"
    correct: float
    """1 right, 0 wrong."""
    tokens: int | None = None
    """Of the answer; None where lm-eval asked, and in older samples."""


class PerplexityItem(_OfTask):
    kind: Literal["perplexity"] = "perplexity"
    loglikelihood: float
    """In nats."""
    bytes: int = Field(ge=0)


class HeldOutDocument(_Line):
    kind: Literal["held_out"] = "held_out"
    document: int
    tokens: tuple[int, ...]
    """The document's token ids."""
    listed: tuple[tuple[int, ...], ...]
    """Ids of the likeliest tokens at each position after the first, the likeliest first."""
    logprobs: tuple[tuple[float, ...], ...]
    """Their natural logarithms of probability."""
    continued: tuple[int, ...] = ()
    """The greedy answer to the beginning of the document; empty in older samples."""


Item = AccuracyItem | PerplexityItem
Line = Annotated[
    Head | LoadRun | TimedRequest | AccuracyItem | PerplexityItem | HeldOutDocument, Field(discriminator="kind")
]
_LINE: Final[TypeAdapter[Line]] = TypeAdapter(Line)


@dataclass(frozen=True)
class LoadSamples:
    """One run of the load and its requests in the order of their arrival, at least one unless it was ended early."""

    run: LoadRun
    requests: tuple[TimedRequest, ...]

    @property
    def output_tokens_per_s(self) -> float:
        return sum(request.output_tokens for request in self.requests) / self.run.duration_s


@dataclass(frozen=True)
class StartLoad:
    """The load of one start of a server, or of several, each run in the order of its number."""

    rounds: tuple[LoadSamples, ...] = ()
    trials: tuple[LoadSamples, ...] = ()

    def plus(self, later: StartLoad) -> Self:
        return replace(self, rounds=self.rounds + later.rounds, trials=self.trials + later.trials)

    def of_start(self, restart: int) -> StartLoad:
        return StartLoad(
            tuple(run for run in self.rounds if run.run.restart == restart),
            tuple(run for run in self.trials if run.run.restart == restart),
        )


@dataclass(frozen=True)
class Samples(StartLoad):
    """Everything that was measured of one variant."""

    items: tuple[Item, ...] = ()
    held_out: tuple[HeldOutDocument, ...] = ()
    gpu_share: float = 1.0
    """``Evaluation.gpu_share``"""

    @property
    def runs(self) -> tuple[LoadSamples, ...]:
        return self.rounds + self.trials

    def on(self, gpu_share: float) -> StartLoad:
        """Return the load with its rates in proportion to another share of the GPUs."""

        def scaled(load: LoadSamples) -> LoadSamples:
            rate_per_s = load.run.rate_per_s and load.run.rate_per_s * gpu_share / self.gpu_share
            return replace(load, run=load.run.model_copy(update={"rate_per_s": rate_per_s}))

        return StartLoad(tuple(map(scaled, self.rounds)), tuple(map(scaled, self.trials)))

    def lines(self) -> Iterator[_Line]:
        """Yield every line but the head."""
        for run in self.runs:
            yield run.run
            yield from run.requests
        yield from sorted(self.items, key=lambda item: item.kind)
        yield from self.held_out


def write_samples(path: Path, evaluation: str, samples: Samples) -> str:
    """Write the samples of the evaluation with this key. Returns the file's sha256."""
    lines = (Head(evaluation=evaluation), *samples.lines())
    write_text(path, "".join(line.model_dump_json(exclude_none=True) + "\n" for line in lines))
    return sha256_of(path)


def read_samples(path: Path, evaluation: Evaluation) -> Samples:
    """Read the samples that *evaluation* was computed from. Raise DamagedModel if the file is missing, holds a line
    that is none of ours, belongs to another evaluation, or lacks a round or the requests of a run."""
    lines = _lines_of(path, evaluation.key)
    runs = _runs(lines)
    read = sum(run.run.phase == "round" for run in runs)
    if read != (measured := len(evaluation.rounds)):
        raise DamagedModel(
            f"the raw samples {path} hold {read} rounds, but {measured} were measured", hint=MEASURE_AGAIN
        )
    if not all(run.requests or run.run.held is False for run in runs):
        raise DamagedModel(f"the raw samples {path} lack the requests of a run", hint=MEASURE_AGAIN)
    rounds, trials = (tuple(run for run in runs if run.run.phase == phase) for phase in ("round", "trial"))
    return replace(_answered(lines), rounds=rounds, trials=trials, gpu_share=evaluation.gpu_share)


def read_answers(path: Path, key: str) -> Samples:
    """Read the samples of the answers with this key. Raises DamagedModel like ``read_samples``."""
    return _answered(_lines_of(path, key))


def _lines_of(path: Path, key: str) -> list[Line]:
    """Read the lines of a file that belongs to the evaluation or the answers with this key, without the head."""
    try:
        head, *lines = _parsed(path.read_bytes())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise DamagedModel(f"the raw samples {path} cannot be read: {why}", hint=MEASURE_AGAIN) from error
    if not isinstance(head, Head) or head.evaluation != key:
        raise DamagedModel(f"the raw samples {path} belong to another evaluation", hint=MEASURE_AGAIN)
    return lines


def _answered(lines: list[Line]) -> Samples:
    return Samples(
        items=tuple(line for line in lines if isinstance(line, Item)),
        held_out=tuple(line for line in lines if isinstance(line, HeldOutDocument)),
    )


def _parsed(content: bytes) -> Iterator[Line]:
    """Parse the lines of a file; a ValueError names the first that is wrong."""
    for number, line in enumerate(content.splitlines(), 1):
        try:
            yield _LINE.validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"line {number}: {'.'.join(map(str, first['loc']))} {first['msg']}") from error


def _runs(lines: list[Line]) -> list[LoadSamples]:
    """Pair the runs with their requests, in the order of their numbers."""
    requests: dict[tuple[object, ...], list[TimedRequest]] = defaultdict(list)
    for line in lines:
        if isinstance(line, TimedRequest):
            requests[line.of_run].append(line)
    runs = [LoadSamples(line, tuple(requests[line.of_run])) for line in lines if isinstance(line, LoadRun)]
    return sorted(runs, key=lambda run: run.run.number)


def export_answers(store: ModelStore) -> str:
    """Write all answers that are kept of a model. Raises DamagedModel if samples are not what was written."""
    texts = []
    for answers in all_answers(store):
        samples = answers_paths(store, answers.key)[1]
        read_answers(samples, answers.key)
        texts.append(f"{answers.model_dump_json()}\n{samples.read_text()}")
    return "".join(texts)


def import_answers(root: Path, text: str) -> list[KeptAnswers]:
    """Keep the answers that ``export_answers`` wrote in the store at *root*. Raises: ConfigError: the text is something
    else, or was changed; what precedes the mistake is kept."""
    imported = []
    for record, lines in _divided(text):
        try:
            answers = KeptAnswers.model_validate_json(record)
            if hashlib.sha256(lines.encode()).hexdigest() != answers.samples_sha256:
                raise ConfigError(f"the answers of {answers.variant} were changed since they were exported")
            path, samples = answers_paths(ModelStore(root, answers.model), answers.key)
            write_text(samples, lines)
            read_answers(samples, answers.key)
        except (ValidationError, DamagedModel) as error:
            hint = "write the file with: slipway samples export MODEL"
            raise ConfigError("these are no answers of a reference", hint=hint) from error
        answers.write(path)
        imported.append(answers)
    return imported


def _divided(text: str) -> Iterator[tuple[str, str]]:
    """Yield each record with the lines that follow it."""
    lines = text.splitlines(keepends=True) or [""]
    starts = [number for number, line in enumerate(lines) if line.startswith('{"model":')]
    if starts[:1] != [0]:
        starts.insert(0, 0)
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start], "".join(lines[start + 1 : end])
