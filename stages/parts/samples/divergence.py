"""How far the variants' next-token distributions are from fp16's on the same held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from stages.parts.base.errors import DamagedModel
from stages.parts.records.production import Divergence
from stages.parts.samples.lines import MEASURE_AGAIN, HeldOutDocument, Samples

if TYPE_CHECKING:
    from scoring.arrays import Floats
    from scoring.divergence import Distributions
    from scoring.divergence import Divergence as Computed


def divergences(samples: Mapping[str, Samples], reference: str) -> dict[str, Computed]:
    """The divergence of every variant from the *reference*, without variants that were measured on another text.

    Raises:
        DamagedModel: the samples are not distributions.
    """
    from scoring.divergence import divergence, greedy_agreement

    texts = {name: [each.tokens for each in _in_order(given)] for name, given in samples.items()}
    if not texts.get(reference):
        return {}
    found = {}
    for name, given in samples.items():
        if name == reference or texts[name] != texts[reference]:
            continue
        try:
            computed = divergence(distributions(samples[reference]), distributions(given))
        except ValueError as error:
            raise DamagedModel(
                f"the raw samples of {name} or {reference} are not distributions: {error}", hint=MEASURE_AGAIN
            ) from error
        ours, theirs = _continued(samples[reference]), _continued(given)
        found[name] = replace(computed, greedy=greedy_agreement(ours, theirs)) if ours and theirs else computed
    return found


def divergence_draws(computed: Computed) -> dict[str, Floats]:
    """The draws of what a profile's constraints can limit."""
    drawn = {"kl_divergence": computed.kl.draws, "top1_agreement": computed.top1.draws}
    return drawn | {"greedy_agreement": computed.greedy.same.draws} if computed.greedy else drawn


def divergence_record(computed: Computed) -> Divergence:
    greedy = computed.greedy
    return Divergence(
        documents=computed.documents,
        tokens=computed.positions,
        kl=computed.kl.mean,
        kl_low=computed.kl.low,
        kl_high=computed.kl.high,
        top1_agreement=computed.top1.mean,
        top1_low=computed.top1.low,
        top1_high=computed.top1.high,
        greedy_agreement=greedy.same.mean if greedy else None,
        greedy_low=greedy.same.low if greedy else None,
        greedy_high=greedy.same.high if greedy else None,
        greedy_prefix=greedy.prefix.mean if greedy else None,
    )


def distributions(samples: Samples) -> list[Distributions]:
    """The distributions at each position of each held-out document.

    Raises:
        ValueError: a document lists different numbers of tokens at its positions.
    """
    import numpy as np

    from scoring.divergence import Distributions

    return [
        Distributions(np.array(each.listed, dtype=np.int64), np.array(each.logprobs, dtype=float))
        for each in _in_order(samples)
    ]


def _continued(samples: Samples) -> list[tuple[int, ...]]:
    """The greedy answers; none if they were not recorded."""
    answers = [each.continued for each in _in_order(samples)]
    return answers if any(answers) else []


def _in_order(samples: Samples) -> list[HeldOutDocument]:
    return sorted(samples.held_out, key=lambda each: each.document)
