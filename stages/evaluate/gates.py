"""What a variant has to pass before it is loaded, against the reference: its own answers, the divergence of its
distributions, and the loss on every quality task, first on a slice of the items."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from stages.parts.samples.lines import Item, Samples

if TYPE_CHECKING:
    from scoring.profile import Profile
    from stages.parts.samples.evidence import Measured

SLICE: Final = 100
"""Items of each task in the first slice: enough to notice a variant that is broken."""


def refusal(variant: Measured, reference: Measured | None, profile: Profile, *, whole: bool) -> str:
    """Name the gates that the variant fails; empty if it fails none, or if more items may show that it passes.

    *whole*: all items were asked that every variant is asked. Until then the quality recovery does not count.
    """
    from stages.parts.samples.evidence import gates_of

    limits = profile.constraints if whole else profile.constraints.model_copy(update={"quality_recovery": None})
    measured = {"": replace(variant, load=None)}
    if reference is not None:
        reference_samples = common(reference.samples, variant.samples)
        measured[profile.reference_variant] = replace(reference, samples=reference_samples, load=None)
    gate = gates_of(measured, profile, limits)[""]
    return "; ".join(gate.reasons) if gate.verdict == "fail" else ""


def common(samples: Samples, others: Samples) -> Samples:
    """Leave out of *samples* the items that the *others* do not have."""
    places = {_place(item) for item in others.items}
    return replace(
        samples,
        accuracy=tuple(item for item in samples.accuracy if _place(item) in places),
        perplexity=tuple(item for item in samples.perplexity if _place(item) in places),
    )


def _place(item: Item) -> tuple[str, str, int]:
    return item.task, item.subtask, item.doc_id
