"""How near a variant stays to fp16: its next-token distributions on the same text, and its scores task by task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stages.parts.base.errors import DamagedModel
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Divergence
from stages.parts.samples.lines import MEASURE_AGAIN, HeldOutDocument, Samples

if TYPE_CHECKING:
    from scoring.divergence import Distributions
    from scoring.divergence import Divergence as Apart
    from scoring.normalize import Floats


def divergences(samples: Mapping[str, Samples], reference: str) -> dict[str, Apart]:
    """The divergence of every variant from the *reference*, without the variants that were measured on another text.

    Raises:
        DamagedModel: the samples hold something else than distributions.
    """
    from scoring.divergence import divergence

    texts = {name: [each.tokens for each in _in_order(given)] for name, given in samples.items()}
    if not texts.get(reference):
        return {}
    found = {}
    for name, given in samples.items():
        if name == reference or texts[name] != texts[reference]:
            continue
        try:
            found[name] = divergence(distributions(samples[reference]), distributions(given))
        except ValueError as error:
            raise DamagedModel(
                f"the raw samples of {name} or {reference} hold no distributions: {error}", hint=MEASURE_AGAIN
            ) from error
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


def distributions(samples: Samples) -> list[Distributions]:
    """The distributions at each position of each held-out document.

    Raises:
        ValueError: a document has not the same number of tokens at each position.
    """
    import numpy as np

    from scoring.divergence import Distributions

    return [
        Distributions(np.array(each.listed, dtype=np.int64), np.array(each.logprobs, dtype=float))
        for each in _in_order(samples)
    ]


def _in_order(samples: Samples) -> list[HeldOutDocument]:
    return sorted(samples.held_out, key=lambda each: each.document)


def recovery(evaluation: Evaluation | None, reference: Evaluation | None) -> dict[str, float]:
    """By task, the variant's score divided by the reference's: accuracies as they are, perplexities as the probability
    per byte (2^(−bits per byte)), so that 0.99 means the same of both: one percent is lost."""
    if evaluation is None or reference is None:
        return {}
    whole = {each.task: each.score for each in reference.quality}
    return {each.task: each.score / whole[each.task] for each in evaluation.quality if whole.get(each.task, 0.0) > 0}
