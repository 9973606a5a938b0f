"""From what was measured to what the decision is made of: raw metrics, draws of them, and measures with limits."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic_core import from_json

from stages.parts.base.errors import DamagedModel
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.production import Change, Cost, Interval, Paired, Price
from stages.parts.samples.figures import Point, met, point_load

if TYPE_CHECKING:
    from scoring.draws import Items, Round, Samples
    from scoring.normalize import Floats

Lines = list[dict[str, Any]]
LIMITED: Final = {"ttft_p95_ms": "ttft_ms", "tpot_p95_ms": "tpot_ms"}
"""Constraints on the 95th percentile of a request's time, by the time's name in the samples."""
REMEASURE: Final = "remove the evaluation's .json beside them and run again: it is measured anew"


def read_samples(store: ModelStore, evaluation: Evaluation) -> Lines:
    """The raw samples of an evaluation: a line per request and per item.

    Raises:
        DamagedModel: they are missing, unreadable, or of another evaluation.
    """
    return samples_at(store.evaluation(evaluation.variant).with_suffix(SAMPLES_SUFFIX), evaluation)


def samples_at(path: Path, evaluation: Evaluation) -> Lines:
    """As ``read_samples``, from a file."""
    try:
        head, *lines = map(from_json, path.read_bytes().splitlines())  # twice as fast as json, and there are thousands
        belongs = head["evaluation"] == evaluation.key
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DamagedModel(f"the raw samples {path} can't be read", hint=REMEASURE) from error
    if not belongs:
        raise DamagedModel(f"the raw samples {path} are of another evaluation", hint=REMEASURE)
    return lines


def draws(evaluations: Mapping[str, Evaluation], samples: Mapping[str, Lines], limits: Collection[str] = ()) -> Samples:
    """Bootstrap draws of latency, throughput, goodput and quality by variant, widened by what the machine's own speed
    differed between variants; without quality where not all have the same tasks.

    Args:
        limits: what is constrained; what of it the load tells is drawn as well.
    """
    from scoring.draws import allowing_for_few, load_draws, quality_draws
    from scoring.machine import widened

    measured = {name: rounds(lines, evaluations[name], limits) for name, lines in samples.items()}
    turns = took_turns(evaluations)
    found = allowing_for_few(load_draws(measured, paired=turns), measured, paired=turns)
    found = widened(found, {} if turns else machine_speeds(evaluations))
    try:
        quality = quality_draws(questions(evaluations, samples))
    except ValueError:  # the report then says that the noise of quality is not known
        return found
    return {name: {**each, **quality[name]} for name, each in found.items()}


def rounds(lines: Lines, evaluation: Evaluation, limits: Collection[str] = ()) -> list[Round]:
    """What was measured in each round, with what *limits* need of each request.

    Raises:
        DamagedModel: the samples lack a round or a figure.
    """
    import numpy as np

    from scoring.draws import Round

    slo = evaluation.goodput
    found = []
    with samples_of(evaluation):
        for total, requests in points(lines, "round"):
            good = met(requests, slo.ttft_ms, slo.tpot_ms) if slo else []
            others = {each: [line[field] for line in requests] for each, field in LIMITED.items() if each in limits}
            if slo and "goodput_share" in limits:
                others["goodput_share"] = [bool(met([line], slo.ttft_ms, slo.tpot_ms)) for line in requests]
            found.append(
                Round(
                    latencies_ms=np.array([each["e2el_ms"] for each in requests]),
                    output_tokens_per_s=point_load((total, requests)).output_tokens_per_s,
                    start=total.get("restart", 0),
                    good_tokens_per_s=sum(each["output_tokens"] for each in good) / total["duration_s"]
                    if slo
                    else None,
                    others={name: np.array(each, dtype=float) for name, each in others.items()},
                )
            )
    if len(found) != len(evaluation.rounds):
        raise DamagedModel(
            f"the raw samples of {evaluation.variant} hold {len(found)} rounds, not the {len(evaluation.rounds)} that "
            "were measured",
            hint=REMEASURE,
        )
    return found


def points(lines: Lines, kind: str) -> list[Point]:
    """The calls of the load generator of one *kind* (``round`` or ``sweep``), in the order of their numbers or, for a
    sweep, of their lines."""
    totals = [line for line in lines if kind in line and "duration_s" in line]
    requests: dict[tuple[int, int], Lines] = defaultdict(list)
    for line in lines:
        if kind in line and "e2el_ms" in line:
            requests[line.get("restart", 0), line[kind]].append(line)
    ordered = sorted(totals, key=lambda each: each[kind]) if kind == "round" else totals
    return [(each, requests[each.get("restart", 0), each[kind]]) for each in ordered]


def took_turns(evaluations: Mapping[str, Evaluation]) -> bool:
    """Whether all were measured side by side, round by round: what the machine did then met all alike."""
    names = set(evaluations)
    return len(names) > 1 and all({name, *each.interleaved_with} >= names for name, each in evaluations.items())


def machine_speeds(evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """By variant, how fast the machine itself was around its measurement: the geometric mean of its probes. Not where
    there are GPUs, of which the probes say nothing."""
    found = {}
    for name, each in evaluations.items():
        if each.drift and not each.hardware.gpus:
            speeds = [speed for probe in each.drift.probes() for speed in probe.model_dump().values()]
            found[name] = math.exp(sum(map(math.log, speeds)) / len(speeds))
    return found


@contextlib.contextmanager
def samples_of(evaluation: Evaluation) -> Iterator[None]:
    """Turn a line that lacks a figure, or holds something else, into DamagedModel."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise DamagedModel(
            f"the raw samples of {evaluation.variant} are not what was written: {type(error).__name__} {error}",
            hint=REMEASURE,
        ) from error


def questions(evaluations: Mapping[str, Evaluation], samples: Mapping[str, Lines]) -> dict[str, dict[str, Items]]:
    """By variant, ``items_of``. Two items are the same question where task, doc_id and doc_hash agree; where samples
    have no hashes, by task and doc_id alone."""
    hashed = all("doc_hash" in line for lines in samples.values() for line in lines if "task" in line)
    return {name: items_of(lines, evaluations[name], hashed=hashed) for name, lines in samples.items()}


def items_of(lines: Lines, evaluation: Evaluation, *, hashed: bool) -> dict[str, Items]:
    """The items of each scored task; of a group of tasks, those of its tasks.

    Args:
        hashed: whether a document's hash belongs to an item's name.

    Raises:
        DamagedModel: a line lacks a figure, or the starts of the server were not asked the same items.
    """
    import numpy as np

    from scoring.draws import Items

    found = {}
    with samples_of(evaluation):
        for score in evaluation.quality:
            starts: dict[int, Lines] = defaultdict(list)
            for line in lines:
                if line.get("task") == score.task:
                    starts[line.get("restart", 0)].append(line)
            asked = [sorted(each, key=_place) for _, each in sorted(starts.items())]
            named = {tuple(_name(line, hashed=hashed) for line in each) for each in asked}
            if len(named) > 1:
                raise ValueError(f"the starts were asked different questions of {score.task}")
            name = "loglikelihood" if score.kind == "perplexity" else "correct"
            values = np.array([[float(line[name]) for line in each] for each in asked])
            sizes = np.array([float(line["bytes"]) for line in asked[0]]) if name == "loglikelihood" and asked else None
            weights = None
            if asked and any("weight" in line for line in asked[0]):
                weights = np.array([float(line.get("weight", 1.0)) for line in asked[0]])
            if weights is not None and sizes is not None:  # a text counts by its bytes
                values, sizes, weights = values * weights, sizes * weights, None
            found[score.task] = Items(values[0] if len(asked) == 1 else values, sizes, weights, *named)
    return found


def _place(line: Mapping[str, Any]) -> tuple[str, int]:
    return line.get("subtask", ""), line["doc_id"]


def _name(line: Mapping[str, Any], *, hashed: bool) -> str:
    return " ".join(map(str, (*_place(line), *([line["doc_hash"]] if hashed else []))))


def different_questions(asked: Mapping[str, Mapping[str, Items]]) -> tuple[str, ...]:
    """A note for each task of which not all variants were asked the same."""
    found = []
    for task in {task: None for each in asked.values() for task in each}:
        names = [set(each[task].named()) for each in asked.values() if task in each]
        common, most = len(set.intersection(*names)), max(map(len, names))
        if common < len(set.union(*names)):
            found.append(
                f"Of {task} {common} of {most} questions are the same for all: the others count as different ones, and "
                "are not compared in pairs."
            )
    return tuple(found)


def paired(reference: Mapping[str, Items], variant: Mapping[str, Items]) -> tuple[Paired, ...]:
    """The variant beside the reference on the items that both were asked, task by task; a task without such is left
    out."""
    import numpy as np

    from scoring.draws import common
    from scoring.paired import flips, mean_difference

    found = []
    for task in reference:
        if task not in variant:
            continue
        ours, theirs = common(reference[task], variant[task])
        if not ours.values.size:
            continue
        # Of several starts an item counts with its mean; it is right if it was so more often than not.
        mine, other = (np.atleast_2d(each.values).mean(axis=0) for each in (ours, theirs))
        if ours.sizes is None:
            moved, flipped = mean_difference(mine, other, ours.weights), flips(mine > 0.5, other > 0.5)
        else:
            bits = [-each / ours.sizes / np.log(2) for each in (mine, other)]
            moved, flipped = mean_difference(bits[0], bits[1], ours.sizes), None
        found.append(
            Paired(
                task=task,
                kind="accuracy" if flipped else "perplexity",
                difference=moved.mean,
                low=moved.low,
                high=moved.high,
                lost=flipped.lost if flipped else None,
                gained=flipped.gained if flipped else None,
                p_value=flipped.p_value if flipped else None,
            )
        )
    return tuple(found)


def intervals(values: Mapping[str, float], drawn: Mapping[str, Floats]) -> dict[str, Interval]:
    """The 95 % interval of each metric that has draws: their percentiles 2.5 and 97.5."""
    import numpy as np

    found = {}
    for metric, draws in drawn.items():
        if metric in values and math.isfinite(values[metric]):
            low, high = (float(each) for each in np.percentile(draws, [2.5, 97.5]))
            found[metric] = Interval(low=min(low, values[metric]), high=max(high, values[metric]))
    return found


def changes(
    values: Mapping[str, float],
    reference: Mapping[str, float],
    drawn: Mapping[str, Floats],
    drawn_reference: Mapping[str, Floats],
) -> dict[str, Change]:
    """Each metric beside the reference's, as a share of it; exact where neither has draws."""
    import numpy as np

    found = {}
    for metric, whole in reference.items():
        if not (whole > 0 and math.isfinite(values.get(metric, math.nan))):
            continue
        value = values[metric] / whole - 1
        ours, theirs = drawn.get(metric, values[metric]), drawn_reference.get(metric, whole)
        if np.all(np.asarray(theirs) > 0):
            low, high = (float(each) for each in np.percentile(ours / theirs - 1, [2.5, 97.5]))
            found[metric] = Change(value=value, low=min(low, value), high=max(high, value))
    return found


def cost_of(evaluation: Evaluation, price: Price | None, drawn: Mapping[str, Floats]) -> Cost | None:
    """What a million output tokens cost: at the goodput if the workload has targets, else at the measured throughput.
    None without a price or a rate, as where no request met the targets."""
    from scoring.cost import per_million

    if price is None:
        return None
    basis: Literal["goodput", "throughput"] = "goodput" if evaluation.goodput else "throughput"
    rate = (evaluation.goodput or evaluation.load).output_tokens_per_s
    found = per_million(price.per_hour, rate, drawn.get(basis))
    if found is None:
        return None
    high = found.high if math.isfinite(found.high) else None
    return Cost(value=found.value, low=found.low, high=high, currency=price.currency, tokens_per_s=rate, basis=basis)
