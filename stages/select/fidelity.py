"""How near a variant stays to fp16: its next-token distributions on the same text, and its scores task by task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Divergence
from stages.select.evidence import Lines, samples_of

if TYPE_CHECKING:
    from scoring.divergence import Distributions
    from scoring.divergence import Divergence as Apart
    from scoring.normalize import Floats


def divergences(
    evaluations: Mapping[str, Evaluation], samples: Mapping[str, Lines], reference: str
) -> dict[str, Apart]:
    """Of every variant but the *reference*; without those that were not measured on the same text as it.

    Raises:
        DamagedModel: samples are not what was written.
    """
    from scoring.divergence import divergence

    texts, told = {}, {}
    for name, evaluation in evaluations.items():
        with samples_of(evaluation):
            texts[name], told[name] = distributions(samples[name])
    if not texts.get(reference):
        return {}
    comparable = [name for name in evaluations if name != reference and texts[name] == texts[reference]]
    found = {}
    for name in comparable:
        with samples_of(evaluations[name]):
            found[name] = divergence(told[reference], told[name])
    return found


def divergence_draws(apart: Apart) -> dict[str, Floats]:
    """Of what a profile's constraints can limit."""
    return {"kl_divergence": apart.kl.draws, "top1_agreement": apart.top1.draws}


def recorded(apart: Apart) -> Divergence:
    return Divergence(
        documents=apart.documents,
        tokens=apart.places,
        kl=apart.kl.mean,
        kl_low=apart.kl.low,
        kl_high=apart.kl.high,
        top1_agreement=apart.top1.mean,
        top1_low=apart.top1.low,
        top1_high=apart.top1.high,
    )


def distributions(lines: Lines) -> tuple[list[list[int]], list[Distributions]]:
    """The held-out texts as token ids, and the distributions at each place of each.

    Raises:
        LookupError, ValueError: a line lacks something, or holds something else.
    """
    import numpy as np

    from scoring.divergence import Distributions

    documents = sorted((line for line in lines if "document" in line), key=lambda line: int(line["document"]))
    told = [
        Distributions(np.array(each["listed"], dtype=np.int64), np.array(each["logprobs"], dtype=float))
        for each in documents
    ]
    return [each["tokens"] for each in documents], told


def recovery(evaluation: Evaluation | None, reference: Evaluation | None) -> dict[str, float]:
    """By task, the variant's score divided by the reference's: accuracies as they are, perplexities as the probability
    per byte (2^(−bits per byte)), so that 0.99 means the same of both: one percent is lost."""
    if evaluation is None or reference is None:
        return {}
    whole = {each.task: each.score for each in reference.quality}
    return {each.task: each.score / whole[each.task] for each in evaluation.quality if whole.get(each.task, 0.0) > 0}
