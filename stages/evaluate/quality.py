"""Quality, measured through the served endpoint by lm-eval.

A task counts if it has an accuracy (multiple choice, exact match) or is a rolling log-likelihood (perplexity, taken
as bits per byte: unlike a perplexity per token or word it does not depend on the tokenizer or on the kind of text).
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from stages.errors import ConfigError, HubUnavailable, MeasurementFailed, UnknownName
from stages.records import TaskScore
from stages.server import Server, run_against
from stages.server_log import ServerLog
from stages.settings import Workload
from stages.store import write_json

ACCURACIES: Final = ("acc", "acc_norm", "exact_match")
"""lm-eval's names; the first that a task has is taken."""
BITS_PER_BYTE: Final = "bits_per_byte"
SUPPORTED: Final = f"tasks with {', '.join(ACCURACIES)} or {BITS_PER_BYTE}"
CONCURRENCY: Final = 4
RESAMPLES: Final = 1000
SEED: Final = 0
Z_95: Final = 1.959964
OFFLINE: Final = (
    "ConnectionError",
    "ConnectError",
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "ConnectTimeout",
)


def check_tasks(workload: Workload) -> bool:
    """Refuse, before a server is started, tasks that do not exist or can't be scored.

    Returns:
        Whether lm-eval's own tasks are needed; reading all their definitions takes several seconds.

    Raises:
        UnknownName: a task is neither lm-eval's nor in ``tasks_path``.
        ConfigError: a task has no metric that we can score.
    """
    known = _index(workload.tasks_path, include_defaults=False) if workload.tasks_path else {}
    needs_defaults = any(task not in known for task in workload.quality_tasks)
    if needs_defaults:
        known = _index(workload.tasks_path, include_defaults=True)
    for task in workload.quality_tasks:
        if task not in known:
            raise UnknownName("quality task", task, known)
        definition = known[task].cfg or {}
        metrics = [each["metric"] for each in definition.get("metric_list") or []]
        # Without a list, the metrics follow from the output type, and are ours for all but generation.
        scorable = not metrics or any(metric in (*ACCURACIES, BITS_PER_BYTE) for metric in metrics)
        if "task" in definition and "group" not in definition and not scorable:
            raise ConfigError(f"quality task {task!r} has only {', '.join(map(str, metrics))}", hint=f"use {SUPPORTED}")
    return needs_defaults


def measure_quality(
    server: Server, directory: Path, workload: Workload, work: Path, log: Path, *, include_defaults: bool
) -> tuple[list[TaskScore], list[dict[str, Any]]]:
    """Run the workload's tasks.

    Args:
        work: where the harness's request and result are left.

    Returns:
        A score per task (one per group that lm-eval aggregates), and one line per item for later comparisons.

    Raises:
        HubUnavailable: a task's data could not be downloaded.
        ConfigError: a task has no metric that we can score.
        MeasurementFailed: lm-eval failed, or a score is not finite.
        ServerFailed: the server ended.
    """
    request = {
        "url": server.url,
        "model": server.name,
        "tokenizer": str(directory),
        "max_model_len": server.max_model_len(),
        "tasks": list(workload.quality_tasks),
        "tasks_path": workload.tasks_path,
        "include_defaults": include_defaults,
        "limit": workload.quality_limit,
        "concurrency": CONCURRENCY,
    }
    write_json(work / "quality-request.json", request)
    result = work / "quality.json"
    command = [sys.executable, "-m", "stages.evaluate.harness", str(work / "quality-request.json"), str(result)]
    if run_against(server, command, log, {"TOKENIZERS_PARALLELISM": "false"}) != 0:
        said = ServerLog(log)
        why = said.cause()
        if any(name in why for name in OFFLINE):
            raise HubUnavailable(f"a quality task's data could not be downloaded: {why}", hint=f"see {log}")
        raise MeasurementFailed(f"lm-eval failed: {why}", hint=f"see {log}")
    found = json.loads(result.read_text())
    return scores_of(found), list(items_of(found))


def scores_of(found: Mapping[str, Any]) -> list[TaskScore]:
    """A score for each task, but for a group with a score of its own only that.

    Raises:
        ConfigError: a task has no metric that we can score.
        MeasurementFailed: a score is missing or not finite.
    """
    results: Mapping[str, dict[str, float]] = found["results"]
    scored_groups = [group for group in found["subtasks"] if _metric(results.get(group, {}))]
    inside = {task for group in scored_groups for task in _below(group, found["subtasks"])}
    # A group without a score is only a name for its tasks.
    shown = [task for task in results if task not in inside and (results[task] or task not in found["subtasks"])]
    return [_score(task, results[task], found) for task in shown]


def items_of(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What was measured of each item, in few words: for paired comparisons between variants."""
    for task, samples in found["samples"].items():
        metric = _metric(found["results"].get(task, {}))
        if metric is None:
            continue
        name, _, filtered = metric.partition(",")
        for sample in samples:
            if sample["filter"] != filtered:
                continue
            item = {"task": task, "doc_id": sample["doc_id"], "doc_hash": sample["doc_hash"]}
            if name == BITS_PER_BYTE:
                loglikelihood, size = sample[name]
                yield item | {"loglikelihood": loglikelihood, "bytes": size}
            else:
                yield item | {"correct": float(sample[name])}


def bits_per_byte_interval(documents: list[tuple[float, int]]) -> tuple[float, float]:
    """95 % interval of the corpus's bits per byte: percentile bootstrap over documents (Efron 1979), seeded.

    lm-eval gives no standard error for it.
    """
    import numpy as np

    loglikelihoods, sizes = np.array(documents, dtype=float).T
    chosen = np.random.default_rng(SEED).integers(len(sizes), size=(RESAMPLES, len(sizes)))
    resampled = -loglikelihoods[chosen].sum(axis=1) / sizes[chosen].sum(axis=1) / math.log(2)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(low), float(high)


def _score(task: str, metrics: dict[str, float], found: Mapping[str, Any]) -> TaskScore:
    metric = _metric(metrics)
    if metric is None:
        names = sorted({name.partition(",")[0] for name in metrics})
        raise ConfigError(f"quality task {task!r} has only {', '.join(names) or 'no metric'}", hint=f"use {SUPPORTED}")
    value = metrics[metric]
    if not math.isfinite(value):
        raise MeasurementFailed(f"{task}: {metric} is {value}", hint="the variant's answers are not numbers")
    name, _, filtered = metric.partition(",")
    items = sum(found["items"][leaf] for leaf in _leaves(task, found["subtasks"]))
    if name == BITS_PER_BYTE:
        documents = [tuple(each[name]) for each in found["samples"].get(task, []) if each["filter"] == filtered]
        low, high = bits_per_byte_interval(documents) if documents else (value, value)
        return TaskScore(
            task=task, kind="perplexity", value=value, low=low, high=high, score=2**-value, items=items, metrics=metrics
        )
    # A task of a single item has no standard error.
    reach = Z_95 * metrics.get(f"{name}_stderr,{filtered}", 0.0)
    low, high = max(0.0, value - reach), min(1.0, value + reach)
    return TaskScore(
        task=task, kind="accuracy", value=value, low=low, high=high, score=value, items=items, metrics=metrics
    )


def _metric(metrics: Mapping[str, float]) -> str | None:
    """lm-eval's ``metric,filter`` that we score by, or None if the task has none."""
    names = {each.partition(",")[0]: each for each in reversed(list(metrics))}
    return next((names[each] for each in (*ACCURACIES, BITS_PER_BYTE) if each in names), None)


def _below(group: str, subtasks: Mapping[str, list[str]]) -> Iterator[str]:
    for task in subtasks.get(group, []):
        yield task
        yield from _below(task, subtasks)


def _leaves(task: str, subtasks: Mapping[str, list[str]]) -> set[str]:
    below = {each for each in _below(task, subtasks) if not subtasks.get(each)}
    return below or {task}


def _index(tasks_path: str | None, *, include_defaults: bool) -> Mapping[str, Any]:
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    index: Mapping[str, Any] = TaskManager(include_path=tasks_path, include_defaults=include_defaults).task_index
    return index
