"""Quality, measured through the served endpoint, by lm-eval and by our own questions.

A task counts if it has an accuracy (multiple choice, exact match) or is a log-likelihood. The latter is scored
by bits per byte, which unlike a perplexity per token or word does not depend on the tokenizer or on the kind of text.
lm-eval's result is read down to single items: which tasks count, by which metric, and the value of each item.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from scoring.student import Z_95
from stages.evaluate.preloaded import Preloaded
from stages.evaluate.questions import DEFINED, OWN
from stages.evaluate.questions.question import DATA
from stages.parts.base.errors import ConfigError, HubUnavailable, MeasurementFailed, UnknownName
from stages.parts.base.log import say
from stages.parts.base.workload import Workload
from stages.parts.model.hub import dataset_file
from stages.parts.records.evaluation import TaskScore
from stages.parts.samples.figures import bits_per_byte_interval, task_score
from stages.parts.samples.lines import AccuracyItem, Item, PerplexityItem, Samples
from stages.parts.vllm.arguments import serves_on_gpu
from stages.parts.vllm.parsers import PARSES_CALLS
from stages.parts.vllm.server import Server
from stages.parts.vllm.server_log import ServerLog

ACCURACIES: Final = ("acc", "acc_norm", "exact_match")
"""lm-eval's names; the first one that a task has is used."""
BITS_PER_BYTE: Final = "bits_per_byte"
SUBJECTS: Final = 20
"""Tasks of a group from which on each is a cluster, as MMLU's 57 subjects are. A noise cannot be estimated from few."""
SUPPORTED: Final = f"tasks with {', '.join(ACCURACIES)} or {BITS_PER_BYTE}"
CONCURRENCY: Final = {True: 64, False: 8}
"""Requests at a time with and without a GPU, unless the workload says how many."""
OURS: Final = OWN.keys() | DEFINED
FIRST: Final = 2000
"""Items of our own tasks that are asked of every variant if the workload does not say how many."""
SLICE: Final = 100
"""Items of each task in the first slice: enough to notice a variant that is broken."""
OF_ADAPTER: Final = "@"
"""Between a task's name and that of the adapter that was asked: these items count as a task of their own."""
Part = tuple[int, int | None]
"""The number of the first item, and that of the one after the last, or None for all."""
OFFLINE: Final = (
    *("ConnectionError", "ConnectError", "ConnectTimeout", "OfflineModeIsEnabled", "LocalEntryNotFoundError"),
)


def check_tasks(workload: Workload) -> bool:
    """Refuse tasks that do not exist or cannot be scored, before a server is started.

    Returns:
        Whether lm-eval's own tasks are needed; reading all their definitions takes several seconds.

    Raises:
        UnknownName: a task is neither one of our own or of lm-eval's nor in ``tasks_path``.
        ConfigError: a task has no metric that can be scored, or the name of one of our own.
        HubUnavailable, PermanentError: the data of one of our own tasks cannot be downloaded.
    """
    for task in workload.quality_tasks:
        if task in DATA:
            dataset_file(DATA[task])
    index = _index(workload.tasks_path, include_defaults=False) if workload.tasks_path else {}
    if clashing := [task for task in workload.quality_tasks if task in index and task in OURS]:
        hint = "give it another name"
        raise ConfigError(f"{workload.tasks_path} has a task {clashing[0]!r}, as Slipway has", hint=hint)
    needs_defaults = any(task not in index and task not in OURS for task in workload.quality_tasks)
    if needs_defaults:
        index = _index(workload.tasks_path, include_defaults=True)
    for task in workload.quality_tasks:
        if task in OURS:
            continue
        if task not in index:
            raise UnknownName("quality task", task, index.keys() | OURS)
        definition = index[task].cfg or {}
        metrics = [metric["metric"] for metric in definition.get("metric_list") or []]
        # Without a list, the metrics follow from the output type; all but generation have one that can be scored.
        scorable = not metrics or any(metric in (*ACCURACIES, BITS_PER_BYTE) for metric in metrics)
        if "task" in definition and "group" not in definition and not scorable:
            raise ConfigError(f"quality task {task!r} has only {', '.join(map(str, metrics))}", hint=f"use {SUPPORTED}")
    return needs_defaults


def run_tasks(
    harness: Preloaded,
    server: Server,
    directory: Path,
    workload: Workload,
    log: Path,
    parts: Mapping[str, Part] | None = None,
    *,
    include_defaults: bool,
) -> dict[str, Any]:
    """Run tasks against the server.

    Args:
        parts: by task, the first item and the one after the last; by default all up to ``quality_limit`` of all the
            workload's tasks. The items have the same numbers however they are divided. A task of which nothing is left
            has no result. Either all parts begin with the first item, and end alike, or none does.

    Returns:
        What the harness reported, for ``scores_of`` and ``items_of``.

    Raises:
        ConfigError: no task can be asked of this model.
        HubUnavailable: a task's data could not be downloaded.
        MeasurementFailed: a task failed.
        ServerFailed: the server ended.
    """
    items, report = parts or first_parts(workload), defaultdict[str, dict[str, Any]](dict)
    by_adapter: dict[str, dict[str, Part]] = defaultdict(dict)
    for name, part in items.items():
        task, _, adapter = (name, "", "") if name in workload.quality_tasks else name.rpartition(OF_ADAPTER)
        by_adapter[adapter][task] = part
    for adapter, asked in by_adapter.items():
        request = {
            "url": server.url,
            "model": adapter or server.name,
            "tokenizer": str(directory),
            "max_model_len": server.max_model_len(),
            "parses_calls": PARSES_CALLS in server.arguments,
            "tasks": list(asked),
            "tasks_path": workload.tasks_path,
            "parts": {task: list(part) for task, part in asked.items()},
            "concurrency": workload.quality_concurrency or CONCURRENCY[serves_on_gpu()],
            "include_defaults": include_defaults,
        }
        for field, entries in _asked(harness, server, request, log, adapter).items():
            report[field] |= entries
    for task, why in report["left_out"].items():
        say(f"note: {task} is left out: {why}")
    if len(report["left_out"]) == len(items):
        hint = "add one such as perplexity_prose"
        raise ConfigError("no quality task of the workload can be asked of this model", hint=hint)
    return report


def _asked(harness: Preloaded, server: Server, request: dict[str, Any], log: Path, adapter: str) -> dict[str, Any]:
    """Return what the harness reports of a request, with an adapter's tasks under names of their own."""
    with tempfile.TemporaryDirectory(prefix="slipway-quality-") as work:
        result = Path(work) / "quality.json"
        if harness.call(server, request | {"result": str(result)}, log) != 0:
            why = ServerLog(log).cause()
            if any(name in why for name in OFFLINE):
                raise HubUnavailable(f"a quality task's data could not be downloaded: {why}", hint=f"see {log}")
            raise MeasurementFailed(f"a quality task failed: {why}", hint=f"see {log}")
        report: dict[str, Any] = json.loads(result.read_text())
    ending = f"{OF_ADAPTER}{adapter}" if adapter else ""
    groups = report["subtasks"].items()
    report["subtasks"] = {group: [f"{task}{ending}" for task in tasks] for group, tasks in groups}
    return {field: {f"{task}{ending}": entry for task, entry in tasks.items()} for field, tasks in report.items()}


def first_parts(
    workload: Workload, start: int = 0, stop: int | None = None, adapters: Iterable[str] = ()
) -> dict[str, Part]:
    """Select the items that are asked of every variant, and of it with each of the *adapters*, from *start* on and
    before *stop*."""
    parts: dict[str, Part] = {}
    for task in workload.quality_tasks:
        limits = (stop, workload.quality_limit or (FIRST if task in OWN else None))
        for name in (task, *(f"{task}{OF_ADAPTER}{adapter}" for adapter in adapters)):
            parts[name] = start, min(filter(None, limits), default=None)
    return parts


def scores_of(report: Mapping[str, Any]) -> list[TaskScore]:
    """Compute a score for each task; a group that lm-eval aggregates has one score instead of those of its tasks."""
    return [_score(task, report["results"][task], report) for task in scored(report)]


def joined(first: Sequence[TaskScore], rest: Sequence[TaskScore], samples: Samples) -> tuple[TaskScore, ...]:
    """Join the scores of tasks that were asked in two parts; *samples* has the items of both."""
    second = {score.task: score for score in rest}
    return tuple(_joined(score, second[score.task], samples) if score.task in second else score for score in first)


def _joined(first: TaskScore, second: TaskScore, samples: Samples) -> TaskScore:
    items = first.items + second.items
    shares = (first.items / items, second.items / items)

    def mean(ours: float, theirs: float) -> float:
        return shares[0] * ours + shares[1] * theirs

    value = mean(first.value, second.value)
    reach = math.hypot(shares[0] * (first.high - first.value), shares[1] * (second.high - second.value))
    # Only the accuracies among lm-eval's metrics are means over the items.
    names = [name for name in first.metrics if name.partition(",")[0] in ACCURACIES and name in second.metrics]
    score = first.model_copy(
        update={
            "value": value,
            "low": max(0.0, value - reach),
            "high": min(1.0, value + reach),
            "score": mean(first.score, second.score),
            "items": items,
            "metrics": {name: mean(first.metrics[name], second.metrics[name]) for name in names},
        }
    )
    return task_score(score, samples) or score


def _score(task: str, metrics: dict[str, float], report: Mapping[str, Any]) -> TaskScore:
    metric = metric_of(metrics)
    if metric is None:
        names = sorted({name.partition(",")[0] for name in metrics})
        raise ConfigError(f"quality task {task!r} has only {', '.join(names) or 'no metric'}", hint=f"use {SUPPORTED}")
    value = metrics[metric]
    if not math.isfinite(value):
        raise MeasurementFailed(f"{task}: {metric} is {value}", hint="the model returns values that are not numbers")
    name, _, filtered = metric.partition(",")
    kind: Literal["accuracy", "perplexity"]
    items = sum(report["items"][leaf] for leaf in leaves(task, report["subtasks"]))
    if name == BITS_PER_BYTE:
        documents = [item for item in task_items(task, metric, report) if isinstance(item, PerplexityItem)]
        low, high = bits_per_byte_interval(documents) if documents else (value, value)
        kind, score = "perplexity", 2**-value
    else:
        # A task of a single item has no standard error.
        reach = Z_95 * metrics.get(f"{name}_stderr,{filtered}", 0.0)
        low, high = max(0.0, value - reach), min(1.0, value + reach)
        kind, score = "accuracy", value
    return TaskScore(task=task, kind=kind, value=value, low=low, high=high, score=score, items=items, metrics=metrics)


def _index(tasks_path: str | None, *, include_defaults: bool) -> Mapping[str, Any]:
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    index: Mapping[str, Any] = TaskManager(include_path=tasks_path, include_defaults=include_defaults).task_index
    return index


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
        fields = {
            "restart": 0,
            "doc_id": sample["doc_id"],
            "doc_hash": sample["doc_hash"],
            "cluster": sample.get("cluster"),
        }
        if name == BITS_PER_BYTE:
            loglikelihood, size = sample[name]
            yield PerplexityItem(**label, **fields, loglikelihood=loglikelihood, bytes=size)
        else:
            yield AccuracyItem(**label, **fields, correct=float(sample[name]), tokens=sample.get("tokens"))


def _below(group: str, subtasks: Mapping[str, list[str]]) -> Iterator[str]:
    for task in subtasks.get(group, []):
        yield task
        yield from _below(task, subtasks)
