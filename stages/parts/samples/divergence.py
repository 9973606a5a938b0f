"""How far the variants' next-token distributions are from fp16's on the same held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from scoring.results import Divergence
from stages.parts.base.errors import DamagedModel
from stages.parts.samples.lines import MEASURE_AGAIN, HeldOutDocument, Samples

if TYPE_CHECKING:
    from scoring.divergence import Distributions


def divergences(samples: Mapping[str, Samples], reference: str) -> dict[str, Divergence]:
    """Compute the divergence of every variant from the *reference*, without variants that were measured on another
    text.

    Raises:
        DamagedModel: the samples are not distributions.
    """
    from scoring.divergence import divergence

    texts = {name: [document.tokens for document in _in_order(sample)] for name, sample in samples.items()}
    if not texts.get(reference):
        return {}
    computed = {}
    for name, sample in samples.items():
        if name == reference or texts[name] != texts[reference]:
            continue
        ours, theirs = _continued(samples[reference]), _continued(sample)
        answers = (ours, theirs) if ours and theirs else None
        try:
            computed[name] = divergence(distributions(samples[reference]), distributions(sample), answers)
        except ValueError as error:
            raise DamagedModel(
                f"the raw samples of {name} or {reference} are not distributions: {error}", hint=MEASURE_AGAIN
            ) from error
    return computed


def divergence_measures(divergence: Divergence | None, *, is_reference: bool) -> dict[str, float | None]:
    """Return what a divergence gives of ``scoring.constraints.MEASURES``; None for what was not measured.

    Args:
        is_reference: whether the variant is fp16, which does not diverge from itself.
    """
    if is_reference:
        return {"kl_divergence": 0.0, "top1_agreement": 1.0, "greedy_agreement": 1.0}
    return {
        "kl_divergence": divergence.kl if divergence else None,
        "top1_agreement": divergence.top1_agreement if divergence else None,
        "greedy_agreement": divergence.greedy_agreement if divergence else None,
    }


def distributions(samples: Samples) -> list[Distributions]:
    """Collect the distributions at each position of each held-out document."""
    import numpy as np

    from scoring.divergence import Distributions

    return [
        Distributions(np.array(document.listed, dtype=np.int64), np.array(document.logprobs, dtype=float))
        for document in _in_order(samples)
    ]


def _continued(samples: Samples) -> list[tuple[int, ...]]:
    """Collect the greedy answers; there are none if they were not recorded."""
    answers = [document.continued for document in _in_order(samples)]
    return answers if any(answers) else []


def _in_order(samples: Samples) -> list[HeldOutDocument]:
    return sorted(samples.held_out, key=lambda document: document.document)
