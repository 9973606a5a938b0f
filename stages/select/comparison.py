"""Two runs side by side: what was set otherwise, what was measured otherwise, and who won why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from scoring.metrics import METRICS
from stages.parts.base.record import Record
from stages.parts.records.evaluation import Evaluation
from stages.parts.samples.lines import Samples
from stages.select.evidence import different_questions, draws, machine_speeds, questions
from stages.select.kept import Kept
from stages.select.verify import differences

if TYPE_CHECKING:
    from scoring.draws import Items

Z_95: Final = 1.959964
Asked = Mapping[str, Mapping[str, Mapping[str, "Items"]]]
"""By variant and run (0 and 1), the items of each task."""


class Setting(Record):
    """Something that is not the same; both values as text, – where there is none."""

    what: str
    before: str
    after: str


class Change(Record):
    """One metric of one variant, in the unit of ``scoring.metrics.METRICS``."""

    variant: str
    metric: str
    before: float
    after: float
    change: float | None
    """Relative to the first; None where that is 0."""
    beyond_noise: bool | None
    """Whether neither chance (95 %) nor a machine of another speed explains it; None where the noise was not
    measured."""


class Comparison(Record):
    settings: tuple[Setting, ...]
    metrics: tuple[Change, ...]
    """Of the variants that both runs measured."""
    notes: tuple[str, ...]
    """What the noise does not hold, and what else was not the same."""
    winners: tuple[str, ...]
    """A line for each run: who won and why."""
    same_winner: bool


def compare(first: Kept, second: Kept) -> Comparison:
    """Raises: DamagedModel: samples are not what was written."""
    winners = [_winner(each) for each in (first, second)]
    samples = (first.samples(), second.samples())
    asked = {name: _asked(first, second, name, samples) for name in both(first, second)}
    return Comparison(
        settings=tuple(settings(first, second)),
        metrics=tuple(changes(first, second, _noise(first, second, samples, asked))),
        notes=tuple(notes(first, second, asked)),
        winners=tuple(f"{each.folder.name}: {_why(each)}" for each in (first, second)),
        same_winner=winners[0] == winners[1],
    )


def settings(first: Kept, second: Kept) -> Iterator[Setting]:
    """What the runs were told and found: model, profile, price, who was measured, and of who was so by both, how and on
    what. What is otherwise for all of them in the same way stands once, the rest under the variant's name."""
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


def both(first: Kept, second: Kept) -> list[str]:
    """The variants that both runs measured."""
    return [name for name in first.evaluations if name in second.evaluations]


def changes(first: Kept, second: Kept, noise: Mapping[str, Mapping[str, float]]) -> Iterator[Change]:
    """Every metric of the variants that both measured."""
    for name in both(first, second):
        then, now = first.evaluations[name].metrics(), second.evaluations[name].metrics()
        for metric in METRICS:
            if not (math.isfinite(then[metric]) and math.isfinite(now[metric])):
                continue
            limit = noise[name].get(metric)
            yield Change(
                variant=name,
                metric=metric,
                before=then[metric],
                after=now[metric],
                change=now[metric] / then[metric] - 1 if then[metric] else None,
                beyond_noise=None if limit is None else abs(now[metric] - then[metric]) > limit,
            )


def notes(first: Kept, second: Kept, asked: Asked) -> Iterator[str]:
    """What the noise does not hold, and what it holds besides chance."""
    from scoring.machine import NOTED

    evaluations = {name: (first.evaluations[name], second.evaluations[name]) for name in asked}
    if once := [name for name, each in evaluations.items() if min(map(_starts, each)) < 2]:
        yield (
            f"A run started the server of {', '.join(once)} only once: what another start alone moves is not in the "
            "noise (the protocol thorough measures it)."
        )
    slower = {name: _machine(first, second, name) for name in asked}
    for why, gpus in (("it was not recorded", False), ("a GPU's is not probed", True)):
        unknown = [
            name
            for name, share in slower.items()
            if share is None and any(each.hardware.gpus for each in evaluations[name]) == gpus
        ]
        if unknown:
            yield f"The machine's own speed for {', '.join(unknown)} is not in the noise: {why}."
    if told := ", ".join(f"{share:.0%} slower for {name}" for name, share in slower.items() if (share or 0) > NOTED):
        yield (
            f"The machine itself was {told} in one of the runs: differences in latency and throughput have to exceed "
            "that as well."
        )
    yield from {note: None for items in asked.values() for note in different_questions(items)}


def _noise(
    first: Kept, second: Kept, samples: tuple[Mapping[str, Samples], Mapping[str, Samples]], asked: Asked
) -> dict[str, dict[str, float]]:
    """By variant and metric, the change that is no finding: 1.96 standard deviations of what chance explains, and what
    the machine's own speed explains. The runs' rounds are independent of one another; quality is compared on the same
    items, where they are the same."""
    from scoring.draws import quality_draws

    drawn = [draws(each.evaluations, given) for each, given in zip((first, second), samples, strict=True)]
    found: dict[str, dict[str, float]] = {}
    for name, items in asked.items():
        ours = [each[name] for each in drawn]
        values = [each.evaluations[name].metrics() for each in (first, second)]
        slower = _machine(first, second, name) or 0.0
        found[name] = {"memory": 0.0} | {
            metric: math.hypot(
                *(Z_95 * float(each[metric].std()) for each in ours), slower * max(each[metric] for each in values)
            )
            for metric in ("latency", "throughput")
            if all(metric in each for each in ours)
        }
        try:
            quality = quality_draws(items)
        except ValueError:  # not the same tasks
            continue
        found[name]["quality"] = Z_95 * float((quality["0"]["quality"] - quality["1"]["quality"]).std())
    return found


def _machine(first: Kept, second: Kept, variant: str) -> float | None:
    """By which share the machine was slower in the run where it was; None where that is not known."""
    speeds = [machine_speeds(each.evaluations).get(variant, 0.0) for each in (first, second)]
    return 1 - min(speeds) / max(speeds) if all(speeds) else None


def _asked(
    first: Kept, second: Kept, variant: str, samples: tuple[Mapping[str, Samples], Mapping[str, Samples]]
) -> dict[str, dict[str, Items]]:
    return questions(
        {str(number): each.evaluations[variant] for number, each in enumerate((first, second))},
        {str(number): each[variant] for number, each in enumerate(samples)},
    )


def _starts(evaluation: Evaluation) -> int:
    return int(evaluation.workload.get("restarts", 1))


def _told(run: Kept) -> dict[str, Any]:
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


def _winner(run: Kept) -> str | None:
    return run.decision.winner if run.decision else None


def _why(run: Kept) -> str:
    return run.decision.reason if run.decision else "nobody could be chosen"


def _plain(text: str) -> str:
    return "–" if text in ("absent", "null") else text.strip('"')
