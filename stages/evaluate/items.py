"""lm-eval's result down to single items: which tasks count, by which metric, and the value of each item."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from stages.parts.samples.lines import AccuracyItem, Item, PerplexityItem

ACCURACIES: Final = ("acc", "acc_norm", "exact_match")
"""lm-eval's names; the first one that a task has is used."""
BITS_PER_BYTE: Final = "bits_per_byte"
SUBJECTS: Final = 20
"""Tasks of a group from which on each is a cluster, as MMLU's 57 subjects are. A noise cannot be estimated from few."""


def scored(report: Mapping[str, Any]) -> list[str]:
    """List the tasks that count. If lm-eval aggregates a group, the group counts instead of its tasks."""
    results, subtasks = report["results"], report["subtasks"]
    groups = [group for group in subtasks if metric_of(results.get(group, {}))]
    inside = {task for group in groups for task in _below(group, subtasks)}
    # A group without a score is only a name for its tasks.
    return [task for task in results if task not in inside and (results[task] or task not in subtasks)]


def metric_of(metrics: Mapping[str, float]) -> str | None:
    """Find the ``metric,filter`` of lm-eval that a task is scored by; None if it has none that can be scored."""
    names = {metric.partition(",")[0]: metric for metric in reversed(list(metrics))}
    return next((names[name] for name in (*ACCURACIES, BITS_PER_BYTE) if name in names), None)


def leaves(task: str, subtasks: Mapping[str, list[str]]) -> set[str]:
    """List the tasks of a group and of the groups inside it; for a task, the task itself."""
    return {leaf for leaf in _below(task, subtasks) if not subtasks.get(leaf)} or {task}


def items_of(report: Mapping[str, Any]) -> Iterator[Item]:
    """Yield the items of every task that counts, for paired comparisons between variants."""
    for task in scored(report):
        if metric := metric_of(report["results"][task]):
            yield from task_items(task, metric, report)


def task_items(task: str, metric: str, report: Mapping[str, Any]) -> Iterator[Item]:
    """Yield a task's items.

    Those of a group are the items of its tasks, weighted where not all of them count equally in the group's score. A
    group whose score is not a mean over its tasks has no items.
    """
    if task not in report["subtasks"]:
        yield from _items({"task": task}, metric, report["samples"].get(task, []))
        return
    results = report["results"]
    inside = [leaf for leaf in sorted(leaves(task, report["subtasks"])) if metric in results.get(leaf, {})]
    labels = {leaf: {"task": task, "subtask": leaf} for leaf in inside}
    items = {leaf: list(_items(labels[leaf], metric, report["samples"][leaf])) for leaf in inside}
    counts = {leaf: len(leaf_items) for leaf, leaf_items in items.items()}
    shares = group_shares({leaf: results[leaf][metric] for leaf in inside}, counts, results[task][metric])
    # A text counts by its bytes.
    sizes = {
        leaf: sum(item.bytes if isinstance(item, PerplexityItem) else 1 for item in leaf_items)
        for leaf, leaf_items in items.items()
    }
    for leaf, share in shares.items():
        weight = share * sum(sizes.values()) / sizes[leaf]
        changed: dict[str, Any] = {} if math.isclose(weight, 1) else {"weight": weight}
        # What distinguishes a subject affects all its items; the texts within it are part of that.
        changed |= {"cluster": leaf} if len(shares) >= SUBJECTS else {}
        yield from (item.model_copy(update=changed) for item in items[leaf])


def group_shares(values: Mapping[str, float], counts: Mapping[str, int], aggregate: float) -> dict[str, float]:
    """Each task's share in its group's score, with sum 1. lm-eval weights tasks by their number of items or equally,
    and does not report which: the shares are those that give its *aggregate*. Empty if neither do."""
    if not all(counts.values()):
        return {}
    by_items = {task: count / sum(counts.values()) for task, count in counts.items()}
    equal = {task: 1 / len(counts) for task in counts}
    for shares in (by_items, equal):
        if math.isclose(sum(values[task] * share for task, share in shares.items()), aggregate, rel_tol=1e-9):
            return shares
    return {}


def _items(label: Mapping[str, Any], metric: str, samples: Iterable[Mapping[str, Any]]) -> Iterator[Item]:
    name, _, filtered = metric.partition(",")
    for sample in samples:
        if sample["filter"] != filtered:
            continue
        document = {
            "restart": 0,
            "doc_id": sample["doc_id"],
            "doc_hash": sample["doc_hash"],
            "cluster": sample.get("cluster"),
        }
        if name == BITS_PER_BYTE:
            loglikelihood, size = sample[name]
            yield PerplexityItem(**label, **document, loglikelihood=loglikelihood, bytes=size)
        else:
            yield AccuracyItem(**label, **document, correct=float(sample[name]))


def _below(group: str, subtasks: Mapping[str, list[str]]) -> Iterator[str]:
    for task in subtasks.get(group, []):
        yield task
        yield from _below(task, subtasks)
