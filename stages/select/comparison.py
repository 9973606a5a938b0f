"""Two runs side by side: which settings differ, which metrics changed beyond noise, and who won and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scoring.metrics import METRICS
from scoring.student import Z_95
from stages.parts.base.record import Record
from stages.parts.records.evaluation import Evaluation
from stages.parts.samples.questions import Questions, questions
from stages.select.differences import differences
from stages.select.draws import machine_speeds, metric_draws
from stages.select.notes import different_questions
from stages.select.stored import StoredDecision

if TYPE_CHECKING:
    from scoring.draws import Draws


class Setting(Record):
    """A setting that differs; both values as text, – where there is none."""

    what: str
    before: str
    after: str


class MetricChange(Record):
    """One metric of one variant, in the unit of ``scoring.metrics.METRICS``."""

    variant: str
    metric: str
    before: float
    after: float
    change: float | None
    """Relative to the first run; None if the first value is 0."""
    beyond_noise: bool | None
    """Whether the change exceeds what chance (95 %) and a machine of another speed explain; None if the noise was not
    measured."""


class Comparison(Record):
    settings: tuple[Setting, ...]
    metrics: tuple[MetricChange, ...]
    """The changes of the variants that both runs measured."""
    notes: tuple[str, ...]
    """What the noise does not include, and other differences between the measurements."""
    winners: tuple[str, ...]
    """A line for each run: who won and why."""
    same_winner: bool


@dataclass(frozen=True)
class Runs:
    """Two runs with their evidence."""

    first: StoredDecision
    second: StoredDecision
    draws: tuple[Draws, Draws]
    asked: Mapping[str, Questions]
    """The questions that each run (``0`` and ``1``) asked a variant, by variant measured in both."""
    starts: Mapping[str, int]
    """How often the server of each of these variants was started, in the run where that was less often."""

    def evaluations(self, variant: str) -> tuple[Evaluation, Evaluation]:
        return self.first.evaluations[variant], self.second.evaluations[variant]

    def slower_share(self, variant: str) -> float | None:
        """How much slower the machine was in the run where it was slower, as a share; None if that is not known."""
        speeds = [machine_speeds(each.evaluations).get(variant, 0.0) for each in (self.first, self.second)]
        return 1 - min(speeds) / max(speeds) if all(speeds) else None


def compare(first: StoredDecision, second: StoredDecision) -> Comparison:
    """Raises: DamagedModel: samples are not what was written."""
    samples = (first.samples(), second.samples())
    pairs = list(zip((first, second), samples, strict=True))
    before, after = (metric_draws(each.evaluations, given, questions(given)) for each, given in pairs)
    asked = {
        name: questions({str(number): given[name] for number, (_, given) in enumerate(pairs)})
        for name in both(first, second)
    }
    starts = {name: min(len({each.run.restart for each in given[name].rounds}) for given in samples) for name in asked}
    runs = Runs(first, second, (before, after), asked, starts)
    winners = [each.decision.winner if each.decision else None for each in (first, second)]
    return Comparison(
        settings=tuple(settings(first, second)),
        metrics=tuple(change for name in asked for change in changes(runs, name)),
        notes=tuple(notes(runs)),
        winners=tuple(f"{each.folder.name}: {_reason(each)}" for each in (first, second)),
        same_winner=winners[0] == winners[1],
    )


def settings(first: StoredDecision, second: StoredDecision) -> Iterator[Setting]:
    """The settings that differ: model, profile, price and measured variants, then for the variants that both runs
    measured how and on what. A difference that all of them share appears once, any other under the variant's name."""
    for path, before, after in differences(_told(first), _told(second)):
        yield Setting(what=path, before=_plain(before), after=_plain(after))
    by_variant = {
        name: list(differences(_conditions(first.evaluations[name]), _conditions(second.evaluations[name])))
        for name in both(first, second)
    }
    for each in {each: None for found in by_variant.values() for each in found}:
        having = [name for name, found in by_variant.items() if each in found]
        for prefix in [""] if len(having) == len(by_variant) else [f"{name}." for name in having]:
            yield Setting(what=prefix + each[0], before=_plain(each[1]), after=_plain(each[2]))


def both(first: StoredDecision, second: StoredDecision) -> list[str]:
    """The variants that both runs measured."""
    return [name for name in first.evaluations if name in second.evaluations]


def changes(runs: Runs, variant: str) -> Iterator[MetricChange]:
    """The change of every metric of a variant."""
    before, after = (evaluation.metrics() for evaluation in runs.evaluations(variant))
    noise = noise_of(runs, variant)
    for metric in METRICS:
        if not (math.isfinite(before[metric]) and math.isfinite(after[metric])):
            continue
        limit = noise.get(metric)
        yield MetricChange(
            variant=variant,
            metric=metric,
            before=before[metric],
            after=after[metric],
            change=after[metric] / before[metric] - 1 if before[metric] else None,
            beyond_noise=None if limit is None else abs(after[metric] - before[metric]) > limit,
        )


def noise_of(runs: Runs, variant: str) -> dict[str, float]:
    """The change that noise explains, for each metric: 1.96 standard deviations of chance, and the difference in
    the machine's speed. The runs' rounds are independent of each other; quality is compared on the items that both were
    asked.
    """
    from scoring.draws import quality_draws

    drawn = [draw[variant] for draw in runs.draws]
    metrics = [evaluation.metrics() for evaluation in runs.evaluations(variant)]
    slower = runs.slower_share(variant) or 0.0
    found = {"memory": 0.0}
    for metric in ("latency", "throughput"):
        if all(metric in each for each in drawn):
            by_chance = [Z_95 * float(each[metric].std()) for each in drawn]
            found[metric] = math.hypot(*by_chance, slower * max(each[metric] for each in metrics))
    try:
        quality = quality_draws(runs.asked[variant])
    except ValueError:  # not the same tasks
        return found
    return found | {"quality": Z_95 * float((quality["0"]["quality"] - quality["1"]["quality"]).std())}


def notes(runs: Runs) -> Iterator[str]:
    """What the noise does not include, and what it includes besides chance."""
    from scoring.machine import NOTED

    if once := [name for name, starts in runs.starts.items() if starts < 2]:
        yield (
            f"One of the runs started the server of {', '.join(once)} only once: the noise does not include the "
            "variation between starts."
        )
    slower = {name: runs.slower_share(name) for name in runs.asked}
    for why, gpus in (("it was not recorded", False), ("that of a GPU is not probed", True)):
        unknown = [
            name
            for name, share in slower.items()
            if share is None and any(evaluation.hardware.gpus for evaluation in runs.evaluations(name)) == gpus
        ]
        if unknown:
            yield f"The noise of {', '.join(unknown)} does not include the speed of the machine: {why}."
    if told := ", ".join(f"{share:.0%} slower for {name}" for name, share in slower.items() if (share or 0) > NOTED):
        yield (
            f"The machine itself was {told} in one of the runs: differences in latency and throughput must exceed that "
            "as well to count."
        )
    yield from {note: None for asked in runs.asked.values() for note in different_questions(asked)}


def _told(run: StoredDecision) -> dict[str, Any]:
    basis = run.basis.model_dump(mode="json")
    return {
        "model": {name: basis["base"][name] for name in ("model", "commit", "digest")},
        "profile": basis["profile"],
        "price": basis["price"],
        "measured": ", ".join(run.evaluations),
        "not measured": basis["excluded"],
    }


def _conditions(evaluation: Evaluation) -> dict[str, Any]:
    told = evaluation.model_dump(mode="json")
    engine = {name: told["engine"][name] for name in ("version", "arguments", "dtype", "quantization", "kernel")}
    names = ("variant_digest", "workload", "hardware", "tool_versions", "interleaved_with", "beside")
    return {name: told[name] for name in names} | {"engine": engine}


def _reason(run: StoredDecision) -> str:
    return run.decision.reason if run.decision else "no variant could be chosen"


def _plain(text: str) -> str:
    return "–" if text in ("absent", "null") else text.strip('"')
