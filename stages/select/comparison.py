"""Two runs side by side: which settings differ, which metrics changed beyond noise, and who won and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scoring.lead import Lead
from scoring.losses import mean_quality, task_quality
from scoring.metrics import METRICS
from stages.parts.base.store import Record
from stages.parts.records.evaluation import Evaluation
from stages.parts.samples.capacity import throughput_of
from stages.parts.samples.evidence import Questions, questions
from stages.parts.samples.figures import percentiles
from stages.parts.samples.lines import Samples
from stages.select.sentences import different_questions, machine_speeds, slower_shares
from stages.select.stored import StoredDecision, differences


class SettingChange(Record):
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
    """Whether the change exceeds what chance (95 %) and a machine of another speed explain; None if the noise is not
    known."""


class RunComparison(Record):
    settings: tuple[SettingChange, ...]
    metrics: tuple[MetricChange, ...]
    """The changes of the variants that both runs measured."""
    notes: tuple[str, ...]
    """What the noise does not include, and other differences between the measurements."""
    winners: tuple[str, ...]
    """A line for each run: who won and why."""
    same_winner: bool


@dataclass(frozen=True)
class MeasuredTwice:
    """A variant that both runs measured."""

    name: str
    evaluations: tuple[Evaluation, Evaluation]
    samples: tuple[Samples, Samples]

    @cached_property
    def questions(self) -> Questions:
        """The questions that were asked, by run."""
        return questions(dict(zip(("first", "second"), self.samples, strict=True)))

    @cached_property
    def slower_share(self) -> float | None:
        """How much slower the machine was in the run where it was slower, as a share; None if that is not known."""
        speeds = [machine_speeds({"": evaluation}).get("", 0.0) for evaluation in self.evaluations]
        return 1 - min(speeds) / max(speeds) if all(speeds) else None

    def noise(self, metric: str) -> float:
        """Compute how far chance (95 %) and the machine's speed may move ln of a metric from run to run; infinite if
        the noise is not known. Quality is compared on the items that both runs asked."""
        if metric == "memory":
            return 0.0
        if metric == "quality":
            first, second = self.questions.values()
            if not first or first.keys() != second.keys():
                return math.inf
            quality = mean_quality([task_quality([first[task], second[task]]) for task in first])
            return Lead(0.0, 0.0, quality.difference_variance(0, 1), math.inf).reach()
        before, after = (_by_starts(sample, metric) for sample in self.samples)
        return math.hypot(after.minus(before).reach(), math.log1p(-(self.slower_share or 0.0)))


def compare(first: StoredDecision, second: StoredDecision) -> RunComparison:
    """Compare two runs; DamagedModel if samples are not what was written."""
    before, after = first.samples(), second.samples()
    variants = [
        MeasuredTwice(name, (evaluation, second.evaluations[name]), (before[name], after[name]))
        for name, evaluation in first.evaluations.items()
        if name in second.evaluations
    ]
    winners = [run.decision.winner if run.decision else None for run in (first, second)]
    reasons = [run.decision.reason if run.decision else "no variant could be chosen" for run in (first, second)]
    return RunComparison(
        settings=(*_settings(first, second), *_conditions(variants)),
        metrics=tuple(change for variant in variants for change in _changes(variant)),
        notes=(*_notes(variants), *_costs(first, second)),
        winners=tuple(f"{run.folder.name}: {why}" for run, why in zip((first, second), reasons, strict=True)),
        same_winner=winners[0] == winners[1],
    )


def _settings(first: StoredDecision, second: StoredDecision) -> Iterator[SettingChange]:
    """Yield what differs of model, profile, price and measured variants."""

    def settings(run: StoredDecision) -> dict[str, Any]:
        basis = run.basis.model_dump(mode="json")
        return {
            "model": {name: basis["base"][name] for name in ("model", "commit", "digest")},
            "profile": basis["profile"],
            "price": basis["price"],
            "measured": ", ".join(run.evaluations),
            "not measured": basis["excluded"],
        }

    yield from (_setting(*difference) for difference in differences(settings(first), settings(second)))


def _conditions(variants: Sequence[MeasuredTwice]) -> Iterator[SettingChange]:
    """Yield how and on what was measured otherwise: once if it is so for all variants, else under each one's name."""

    def conditions(evaluation: Evaluation) -> dict[str, Any]:
        document = evaluation.model_dump(mode="json")
        engine = {key: document["engine"][key] for key in ("version", "arguments", "dtype", "quantization", "kernel")}
        names = ("variant_digest", "workload", "hardware", "tool_versions", "interleaved_with", "beside")
        return {name: document[name] for name in names} | {"engine": engine}

    by_variant = {
        variant.name: list(differences(conditions(variant.evaluations[0]), conditions(variant.evaluations[1])))
        for variant in variants
    }
    for difference in dict.fromkeys(difference for changed in by_variant.values() for difference in changed):
        names = [name for name, changed in by_variant.items() if difference in changed]
        for prefix in [""] if len(names) == len(by_variant) else [f"{name}." for name in names]:
            yield _setting(prefix + difference[0], *difference[1:])


def _setting(path: str, before: str, after: str) -> SettingChange:
    before, after = ("–" if text in ("absent", "null") else text.strip('"') for text in (before, after))
    return SettingChange(what=path, before=before, after=after)


def _changes(variant: MeasuredTwice) -> Iterator[MetricChange]:
    metrics = [evaluation.metrics() for evaluation in variant.evaluations]
    for metric in METRICS:
        before, after = metrics[0][metric], metrics[1][metric]
        if not (math.isfinite(before) and math.isfinite(after)):
            continue
        noise = variant.noise(metric)
        apart = abs(math.log(after / before)) if before > 0 and after > 0 else math.inf if before != after else 0.0
        yield MetricChange(
            variant=variant.name,
            metric=metric,
            before=before,
            after=after,
            change=after / before - 1 if before else None,
            beyond_noise=apart > noise if math.isfinite(noise) else None,
        )


def starts_of(samples: Samples) -> list[int]:
    """List the numbers of the server's starts."""
    return sorted({run.run.restart for run in samples.rounds})


def _by_starts(samples: Samples, metric: str) -> Lead:
    """Estimate ln of the latency (95th percentile) or of the throughput over the starts of the server."""
    values = []
    for start in starts_of(samples):
        load = samples.of_start(start)
        times = [request.e2el_ms for run in load.rounds for request in run.requests]
        values.append(percentiles(times).p95 if metric == "latency" else throughput_of(load))
    return Lead.of_starts([math.log(value) for value in values])


def _costs(first: StoredDecision, second: StoredDecision) -> Iterator[str]:
    """Yield what a million output tokens of each candidate cost in both runs, such as those on two cards."""
    costs = [
        {each.variant: each.cost for each in run.decision.candidates if each.cost} if run.decision else {}
        for run in (first, second)
    ]
    for name in costs[0]:
        if name in costs[1]:
            before, after = (f"{each[name].value:.3g} {each[name].currency}" for each in costs)
            yield f"A million output tokens of {name} cost {before} in the first run, and {after} in the second."


def _notes(variants: Sequence[MeasuredTwice]) -> Iterator[str]:
    """Yield what the noise does not include, and what it includes besides chance."""
    if names := [variant.name for variant in variants if any(len(starts_of(runs)) < 2 for runs in variant.samples)]:
        yield (
            f"One of the runs started the server of {', '.join(names)} only once: the noise of latency and throughput "
            "is not known."
        )
    for why, gpus in (("it was not recorded", False), ("that of a GPU is not probed", True)):
        unknown = [
            variant.name
            for variant in variants
            if variant.slower_share is None and any(run.hardware.gpus for run in variant.evaluations) == gpus
        ]
        if unknown:
            yield f"The noise of {', '.join(unknown)} does not include the speed of the machine: {why}."
    if slower := slower_shares({variant.name: variant.slower_share or 0.0 for variant in variants}):
        yield (
            f"The machine itself was {slower} in one of the runs: differences in latency and throughput must exceed "
            "that as well to count."
        )
    yield from dict.fromkeys(note for variant in variants for note in different_questions(variant.questions))
