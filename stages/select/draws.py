"""Bootstrap draws of the metrics, computed from the raw samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from stages.parts.base.errors import DamagedModel
from stages.parts.records.evaluation import Evaluation
from stages.parts.samples.figures import by_start, within_targets
from stages.parts.samples.lines import MEASURE_AGAIN, Item, Samples

if TYPE_CHECKING:
    from scoring.draws import Draws, Items, Round

Questions = Mapping[str, Mapping[str, "Items"]]
"""The items of each task, by variant and task."""
LIMITED: Final = {"ttft_p95_ms": "ttft_ms", "tpot_p95_ms": "tpot_ms"}
"""Constraints on the 95th percentile of a request's time, with the name of that time in the samples."""


def metric_draws(
    evaluations: Mapping[str, Evaluation],
    samples: Mapping[str, Samples],
    questions: Questions,
    limits: Collection[str] = (),
) -> Draws:
    """Draws of latency, throughput, goodput and quality by variant, widened by how much the speed of the machine
    differed between variants; without quality if the variants have different tasks.

    Args:
        limits: the constrained measures; those that the load gives are drawn too.
    """
    from scoring.draws import allowing_for_few, load_draws, quality_draws
    from scoring.machine import widened

    measured = {name: rounds(each, evaluations[name], limits) for name, each in samples.items()}
    turns = took_turns(evaluations)
    found = allowing_for_few(load_draws(measured, paired=turns), measured, paired=turns)
    found = widened(found, {} if turns else machine_speeds(evaluations))
    try:
        quality = quality_draws(questions)
    except ValueError:  # the decision then says that the noise of quality is not known
        return found
    return {name: {**each, **quality[name]} for name, each in found.items()}


def rounds(samples: Samples, evaluation: Evaluation, limits: Collection[str] = ()) -> list[Round]:
    """The measurements of each round, with the times of requests that the *limits* apply to."""
    import numpy as np

    from scoring.draws import Round

    slo = evaluation.goodput
    found = []
    for each in samples.rounds:
        others = {
            name: [getattr(one, time) for one in each.requests] for name, time in LIMITED.items() if name in limits
        }
        good = [within_targets(one, slo.ttft_ms, slo.tpot_ms) for one in each.requests] if slo else []
        if slo and "goodput_share" in limits:
            others["goodput_share"] = good
        good_tokens = sum(one.output_tokens for one, met in zip(each.requests, good, strict=False) if met)
        found.append(
            Round(
                latencies_ms=np.array([one.e2el_ms for one in each.requests]),
                output_tokens_per_s=each.output_tokens_per_s,
                start=each.run.restart,
                good_tokens_per_s=good_tokens / each.run.duration_s if slo else None,
                others={name: np.array(values, dtype=float) for name, values in others.items()},
            )
        )
    return found


def took_turns(evaluations: Mapping[str, Evaluation]) -> bool:
    """Whether all variants were measured side by side, round by round, so that the machine affected all equally."""
    names = set(evaluations)
    return len(names) > 1 and all({name, *each.interleaved_with} >= names for name, each in evaluations.items())


def machine_speeds(evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """The speed of the machine when each variant was measured: the geometric mean of its probes. Variants measured on
    GPUs are missing, because GPUs are not probed."""
    found = {}
    for name, each in evaluations.items():
        if each.drift and not each.hardware.gpus:
            speeds = [speed for probe in each.drift.probes() for speed in probe.model_dump().values()]
            found[name] = math.exp(sum(map(math.log, speeds)) / len(speeds))
    return found


def questions(evaluations: Mapping[str, Evaluation], samples: Mapping[str, Samples]) -> dict[str, dict[str, Items]]:
    """``items_of`` by variant. Two items are the same question if task, doc_id and doc_hash agree; if samples have no
    hashes, if task and doc_id do."""
    hashed = all(item.doc_hash is not None for each in samples.values() for item in each.items)
    return {name: items_of(each, evaluations[name], hashed=hashed) for name, each in samples.items()}


def items_of(samples: Samples, evaluation: Evaluation, *, hashed: bool) -> dict[str, Items]:
    """The items of each scored task; for a group of tasks, the items of its tasks.

    Args:
        hashed: whether a document's hash is part of an item's name.

    Raises:
        DamagedModel: the starts of the server were asked different items.
    """
    found = {}
    for score in evaluation.quality:
        made = _perplexity_items if score.kind == "perplexity" else _accuracy_items
        try:
            found[score.task] = made(samples, score.task, hashed)
        except ValueError as error:
            raise DamagedModel(
                f"the raw samples of {evaluation.variant} do not agree: the starts of the server were asked different "
                f"questions of {score.task}",
                hint=MEASURE_AGAIN,
            ) from error
    return found


def _accuracy_items(samples: Samples, task: str, hashed: bool) -> Items:
    import numpy as np

    from scoring.draws import Items

    asked = [sorted(each, key=_place) for each in by_start(samples.accuracy, task)]
    values = np.array([[item.correct for item in each] for each in asked])
    weights = np.array([item.weight for item in asked[0]]) if asked else np.ones(0)
    weighted = weights if (weights != 1).any() else None
    return Items(values[0] if len(asked) == 1 else values, weights=weighted, names=_names(asked, hashed))


def _perplexity_items(samples: Samples, task: str, hashed: bool) -> Items:
    import numpy as np

    from scoring.draws import Items

    asked = [sorted(each, key=_place) for each in by_start(samples.perplexity, task)]
    # A text counts by its bytes.
    values = np.array([[item.loglikelihood * item.weight for item in each] for each in asked])
    sizes = np.array([item.bytes * item.weight for item in asked[0]]) if asked else None
    return Items(values[0] if len(asked) == 1 else values, sizes=sizes, names=_names(asked, hashed))


def _names(asked: Sequence[Sequence[Item]], hashed: bool) -> tuple[str, ...] | None:
    """Raises: ValueError: the starts were asked different items."""
    names = {tuple(_name(item, hashed) for item in each) for each in asked}
    if len(names) > 1:
        raise ValueError(f"{len(names)} different sets of items")
    return next(iter(names), None)


def _place(item: Item) -> tuple[str, int]:
    return item.subtask, item.doc_id


def _name(item: Item, hashed: bool) -> str:
    return " ".join(map(str, (*_place(item), *([item.doc_hash] if hashed else []))))
