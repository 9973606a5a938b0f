"""The items of the quality tasks that were asked of each variant, so that the same questions are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stages.parts.base.errors import DamagedModel
from stages.parts.samples.figures import by_start
from stages.parts.samples.lines import MEASURE_AGAIN, Item, Samples

if TYPE_CHECKING:
    from scoring.draws import Items

Questions = Mapping[str, Mapping[str, "Items"]]
"""The items of each task, by variant and task."""


def questions(samples: Mapping[str, Samples]) -> dict[str, dict[str, Items]]:
    """``items_of`` by variant. Two items are the same question if task, doc_id and doc_hash agree; if samples have no
    hashes, if task and doc_id do.

    Raises:
        DamagedModel: the starts of a server were asked different items.
    """
    hashed = all(item.doc_hash is not None for sample in samples.values() for item in sample.items)
    found = {}
    for name, each in samples.items():
        try:
            found[name] = items_of(each, hashed=hashed)
        except ValueError as error:
            raise DamagedModel(
                f"the raw samples of {name} do not agree: {error}",
                hint=MEASURE_AGAIN,
            ) from error
    return found


def items_of(samples: Samples, *, hashed: bool) -> dict[str, Items]:
    """The items of each task; for a group of tasks, the items of its tasks.

    Args:
        hashed: whether a document's hash is part of an item's name.

    Raises:
        ValueError: the starts of the server were asked different items.
    """
    accuracy = dict.fromkeys(each.task for each in samples.accuracy)
    perplexity = dict.fromkeys(each.task for each in samples.perplexity)
    return {
        **{task: _accuracy_items(samples, task, hashed) for task in accuracy},
        **{task: _perplexity_items(samples, task, hashed) for task in perplexity},
    }


def _accuracy_items(samples: Samples, task: str, hashed: bool) -> Items:
    import numpy as np

    from scoring.draws import Items

    asked = [sorted(each, key=_place) for each in by_start(samples.accuracy, task)]
    names = _names(task, asked, hashed)
    values = np.array([[item.correct for item in each] for each in asked])
    weights = np.array([item.weight for item in asked[0]])
    weighted = weights if (weights != 1).any() else None
    return Items(values[0] if len(asked) == 1 else values, None, weighted, names, _clusters(asked[0], names))


def _perplexity_items(samples: Samples, task: str, hashed: bool) -> Items:
    import numpy as np

    from scoring.draws import Items

    asked = [sorted(each, key=_place) for each in by_start(samples.perplexity, task)]
    names = _names(task, asked, hashed)
    # A text counts by its bytes.
    values = np.array([[item.loglikelihood * item.weight for item in each] for each in asked])
    sizes = np.array([item.bytes * item.weight for item in asked[0]])
    return Items(values[0] if len(asked) == 1 else values, sizes, None, names, _clusters(asked[0], names))


def _names(task: str, asked: Sequence[Sequence[Item]], hashed: bool) -> tuple[str, ...]:
    """Raises: ValueError: the starts were asked different items."""
    names = {tuple(_name(item, hashed) for item in each) for each in asked}
    if len(names) > 1:
        raise ValueError(f"the starts of the server were asked different questions of {task}")
    return names.pop()


def _clusters(items: Sequence[Item], names: Sequence[str]) -> tuple[str, ...] | None:
    """The cluster of each item; one without a cluster is one by itself."""
    if not any(item.cluster for item in items):
        return None
    return tuple(each.cluster or name for each, name in zip(items, names, strict=True))


def _place(item: Item) -> tuple[str, int]:
    return item.subtask, item.doc_id


def _name(item: Item, hashed: bool) -> str:
    return " ".join(map(str, (*_place(item), *([item.doc_hash] if hashed else []))))
