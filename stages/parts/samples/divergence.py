"""How far the variants' next-token distributions are from fp16's on the same held-out text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from scoring.divergence import Distributions, divergence
from scoring.results import Divergence
from stages.parts.base.errors import DamagedModel
from stages.parts.samples.lines import MEASURE_AGAIN, HeldOutDocument, Samples


def divergences(samples: Mapping[str, Samples], reference: str) -> dict[str, Divergence]:
    """Compute the divergence of every variant from the *reference*, without variants that were measured on another
    text. Raise DamagedModel if the samples are not distributions."""
    documents = {
        name: sorted(sample.held_out, key=lambda document: document.document) for name, sample in samples.items()
    }
    computed: dict[str, Divergence] = {}
    if not (ours := documents.pop(reference, None)):
        return computed
    for name, theirs in documents.items():
        if [document.tokens for document in theirs] != [document.tokens for document in ours]:
            continue
        answers = [document.continued for document in ours], [document.continued for document in theirs]
        recorded = answers if all(map(any, answers)) else None
        try:
            computed[name] = divergence(distributions(ours), distributions(theirs), recorded)
        except ValueError as error:
            raise DamagedModel(
                f"the raw samples of {name} or {reference} are not distributions: {error}", hint=MEASURE_AGAIN
            ) from error
    return computed


def distributions(documents: Iterable[HeldOutDocument]) -> list[Distributions]:
    """Collect the distributions at each position of each held-out document."""
    return [
        Distributions(np.array(document.listed, dtype=np.int64), np.array(document.logprobs, dtype=float))
        for document in documents
    ]
