"""The items of the quality tasks that were asked of each variant, so that the same questions are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stages.parts.samples.lines import Item, Samples

if TYPE_CHECKING:
    from scoring.items import Items

Questions = Mapping[str, Mapping[str, "Items"]]
"""The items of each task, by variant and task."""


def questions(samples: Mapping[str, Samples]) -> dict[str, dict[str, Items]]:
    """Collect ``items_of`` by variant. Two items are the same question if task, doc_id and doc_hash agree; if samples
    have no hashes, if task and doc_id do."""
    hashed = all(item.doc_hash is not None for sample in samples.values() for item in sample.items)
    return {name: items_of(sample, hashed=hashed) for name, sample in samples.items()}


def items_of(samples: Samples, *, hashed: bool) -> dict[str, Items]:
    """Collect the items of each task; for a group of tasks, the items of its tasks.

    Args:
        hashed: whether a document's hash is part of an item's name.
    """
    import numpy as np

    from scoring.items import Items

    tasks: dict[str, Items] = {}
    for task in dict.fromkeys(item.task for item in samples.accuracy):
        answers = sorted((item for item in samples.accuracy if item.task == task), key=_place)
        weights = np.array([item.weight for item in answers])
        names = _names(answers, hashed)
        correct, clusters = np.array([item.correct for item in answers]), _clusters(answers, names)
        tasks[task] = Items(correct, None, weights if (weights != 1).any() else None, names, clusters)
    for task in dict.fromkeys(item.task for item in samples.perplexity):
        texts = sorted((item for item in samples.perplexity if item.task == task), key=_place)
        # A text counts by its bytes.
        nats = np.array([item.loglikelihood * item.weight for item in texts])
        sizes = np.array([item.bytes * item.weight for item in texts])
        names = _names(texts, hashed)
        tasks[task] = Items(nats, sizes, None, names, _clusters(texts, names))
    return tasks


def _place(item: Item) -> tuple[str, int]:
    return item.subtask, item.doc_id


def _names(items: Sequence[Item], hashed: bool) -> tuple[str, ...]:
    return tuple(" ".join(map(str, (*_place(item), *([item.doc_hash] if hashed else [])))) for item in items)


def _clusters(items: Sequence[Item], names: Sequence[str]) -> tuple[str, ...] | None:
    """Name the cluster of each item; one without a cluster is one by itself."""
    if not any(item.cluster for item in items):
        return None
    return tuple(item.cluster or name for item, name in zip(items, names, strict=True))
