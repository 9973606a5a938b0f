"""From what was measured to what the decision is made of: raw metrics, draws of them, and measures with limits."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.errors import DamagedModel
from stages.records import SAMPLES_SUFFIX, Evaluation, Paired
from stages.store import ModelStore

if TYPE_CHECKING:
    from scoring.draws import Items, Round, Samples

Lines = list[dict[str, Any]]


def read_samples(store: ModelStore, evaluation: Evaluation) -> Lines:
    """The raw samples of an evaluation: a line per request and per item.

    Raises:
        DamagedModel: they are missing, unreadable, or of another evaluation.
    """
    path: Path = store.evaluation(evaluation.variant).with_suffix(SAMPLES_SUFFIX)
    try:
        head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        belongs = head["evaluation"] == evaluation.key
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DamagedModel(f"the raw samples {path} can't be read", hint="remove the file's .json beside it") from error
    if not belongs:
        raise DamagedModel(f"the raw samples {path} are of another evaluation", hint="remove the .json beside them")
    return lines


def draws(evaluations: Mapping[str, Evaluation], samples: Mapping[str, Lines]) -> Samples:
    """Bootstrap draws of latency, throughput and quality by variant; without quality where items can't be paired."""
    from scoring.draws import load_draws, quality_draws

    found = load_draws({name: rounds(lines, evaluations[name]) for name, lines in samples.items()})
    items = {name: items_of(lines, evaluations[name]) for name, lines in samples.items()}
    try:
        quality = quality_draws(items)
    except ValueError:  # the report then says that the noise of quality is not known
        return found
    return {name: {**each, **quality[name]} for name, each in found.items()}


def rounds(lines: Lines, evaluation: Evaluation) -> list[Round]:
    import numpy as np

    from scoring.draws import Round

    latencies: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        if "round" in line:
            latencies[line["round"]].append(line["e2el_ms"])
    return [
        Round(np.array(latencies[number]), each.output_tokens_per_s) for number, each in enumerate(evaluation.rounds)
    ]


def items_of(lines: Lines, evaluation: Evaluation) -> dict[str, Items]:
    """The items of each scored task, in one order for every variant. A group of tasks has none of its own name."""
    import numpy as np

    from scoring.draws import Items

    found = {}
    for score in evaluation.quality:
        items = sorted((line for line in lines if line.get("task") == score.task), key=lambda line: line["doc_id"])
        if score.kind == "perplexity":
            sizes = np.array([float(each["bytes"]) for each in items])
            found[score.task] = Items(np.array([float(each["loglikelihood"]) for each in items]), sizes)
        else:
            found[score.task] = Items(np.array([float(each["correct"]) for each in items]))
    return found


def paired(reference: Mapping[str, Items], variant: Mapping[str, Items]) -> tuple[Paired, ...]:
    """The variant beside the reference on the same items, task by task; a task without common items is left out."""
    import numpy as np

    from scoring.paired import flips, mean_difference

    found = []
    for task, ours in reference.items():
        theirs = variant.get(task)
        if theirs is None or not len(ours.values) or len(ours.values) != len(theirs.values):
            continue
        if ours.sizes is None:
            moved, flipped = mean_difference(ours.values, theirs.values), flips(ours.values > 0.5, theirs.values > 0.5)
        else:
            bits = [-each.values / ours.sizes / np.log(2) for each in (ours, theirs)]
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


def limited(evaluation: Evaluation) -> dict[str, float | None]:
    """What a profile's constraints can limit (``scoring.constraints.MEASURES``), as far as it was measured."""
    load = evaluation.load
    return {
        "ttft_p95_ms": load.ttft_ms.p95,
        "tpot_p95_ms": load.tpot_ms.p95,
        "e2el_p95_ms": load.e2el_ms.p95,
        "requests_failed": float(load.requests_failed),
    }
