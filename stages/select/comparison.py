"""Two runs side by side: what was set otherwise, what was measured otherwise, and who won why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from scoring.metrics import METRICS
from stages.records import Evaluation, Record
from stages.select.evidence import draws, items_of
from stages.select.kept import Kept
from stages.select.verify import differences

Z_95: Final = 1.959964


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
    """Whether chance does not explain it (95 %); None where the noise was not measured."""


class Comparison(Record):
    settings: tuple[Setting, ...]
    metrics: tuple[Change, ...]
    """Of the variants that both runs measured."""
    winners: tuple[str, ...]
    """A line for each run: who won and why."""
    same_winner: bool


def compare(first: Kept, second: Kept) -> Comparison:
    """Raises: DamagedModel: samples are not what was written."""
    winners = [_winner(each) for each in (first, second)]
    return Comparison(
        settings=tuple(settings(first, second)),
        metrics=tuple(changes(first, second)),
        winners=tuple(f"{each.folder.name}: {_why(each)}" for each in (first, second)),
        same_winner=winners[0] == winners[1],
    )


def settings(first: Kept, second: Kept) -> Iterator[Setting]:
    """What the runs were told and found: model, profile, price, and by variant how it was measured and on what."""
    told, made = (_told(each) for each in (first, second))
    for path, before, after in differences(told, made):
        yield Setting(what=path, before=_plain(before), after=_plain(after))


def changes(first: Kept, second: Kept) -> Iterator[Change]:
    """Every metric of the variants that both measured."""
    noise = _noise(first, second)
    for name, before in first.evaluations.items():
        if name not in second.evaluations:
            continue
        then, now = before.metrics(), second.evaluations[name].metrics()
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


def _noise(first: Kept, second: Kept) -> dict[str, dict[str, float]]:
    """By variant and metric, the change that chance explains: 1.96 standard deviations of it. The runs' rounds are
    independent of one another; quality is compared on the same items, where they are the same."""
    from scoring.draws import quality_draws

    lines = [each.lines() for each in (first, second)]
    drawn = [draws(each.evaluations, text) for each, text in zip((first, second), lines, strict=True)]
    found: dict[str, dict[str, float]] = {}
    for name in first.evaluations.keys() & second.evaluations.keys():
        both = [each[name] for each in drawn]
        found[name] = {"memory": 0.0} | {
            metric: Z_95 * math.hypot(both[0][metric].std(), both[1][metric].std())
            for metric in ("latency", "throughput")
            if all(metric in each for each in both)
        }
        asked = {
            str(number): items_of(text[name], each.evaluations[name])
            for number, (each, text) in enumerate(zip((first, second), lines, strict=True))
        }
        try:
            quality = quality_draws(asked)
        except ValueError:  # not the same items
            continue
        found[name]["quality"] = Z_95 * float((quality["0"]["quality"] - quality["1"]["quality"]).std())
    return found


def _told(run: Kept) -> dict[str, Any]:
    basis = run.basis.model_dump(mode="json")
    return {
        "model": {name: basis["base"][name] for name in ("model", "commit", "digest")},
        "profile": basis["profile"],
        "price": basis["price"],
        "not measured": basis["excluded"],
        **_by_variant({name: _conditions(each) for name, each in run.evaluations.items()}),
    }


def _conditions(evaluation: Evaluation) -> dict[str, Any]:
    told = evaluation.model_dump(mode="json")
    engine = {name: told["engine"][name] for name in ("version", "arguments", "dtype", "quantization", "kernel")}
    names = ("variant_digest", "workload", "hardware", "tool_versions", "interleaved_with", "beside")
    return {name: told[name] for name in names} | {"engine": engine}


def _by_variant(each: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What all variants have in common stands once; the rest under the variant's name."""
    shared = {
        name: value
        for name, value in next(iter(each.values())).items()
        if all(other.get(name) == value for other in each.values())
    }
    own = {
        variant: {name: value for name, value in values.items() if name not in shared}
        for variant, values in each.items()
    }
    return shared | own


def _winner(run: Kept) -> str | None:
    return run.decision.winner if run.decision else None


def _why(run: Kept) -> str:
    return run.decision.reason if run.decision else "nobody could be chosen"


def _plain(text: str) -> str:
    return "–" if text in ("absent", "null") else text.strip('"')
