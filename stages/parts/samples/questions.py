"""The items of the quality tasks that were asked of each variant, so that the same questions are compared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scoring.items import Items
from stages.parts.samples.lines import AccuracyItem, Item, PerplexityItem, Samples

Questions = Mapping[str, Mapping[str, Items]]
"""The items of each task, by variant and task."""


def questions(samples: Mapping[str, Samples]) -> dict[str, dict[str, Items]]:
    """Collect ``items_of`` by variant. Two items are the same question if task, doc_id and doc_hash agree; if samples
    have no hashes, if task and doc_id do."""
    hashed = all(item.doc_hash is not None for sample in samples.values() for item in sample.items)
    return {name: items_of(sample, hashed=hashed) for name, sample in samples.items()}


def items_of(samples: Samples, *, hashed: bool) -> dict[str, Items]:
    """Collect the items of each task; for a group of tasks, the items of its tasks. *hashed*: whether a document's hash
    is part of an item's name."""
    by_task: dict[str, list[Item]] = {}
    for item in sorted(samples.items, key=lambda item: item.kind):
        by_task.setdefault(item.task, []).append(item)
    return {task: _items(sorted(items, key=lambda item: item.place), hashed=hashed) for task, items in by_task.items()}


def _items(items: list[Item], *, hashed: bool) -> Items:
    names = tuple(
        " ".join(map(str, (item.subtask, item.doc_id, *([item.doc_hash] if hashed else [])))) for item in items
    )
    clusters = None
    if any(item.cluster for item in items):
        clusters = tuple(item.cluster or name for item, name in zip(items, names, strict=True))
    answers = [item for item in items if isinstance(item, AccuracyItem)]
    if answers:
        weights = np.array([item.weight for item in answers])
        correct = np.array([item.correct for item in answers])
        return Items(correct, None, weights if (weights != 1).any() else None, names, clusters)
    texts = [item for item in items if isinstance(item, PerplexityItem)]
    # A text counts by its bytes.
    nats = np.array([item.loglikelihood * item.weight for item in texts])
    return Items(nats, np.array([item.bytes * item.weight for item in texts]), None, names, clusters)
