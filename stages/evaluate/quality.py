"""Quality, measured by lm-eval through the served endpoint.

A task counts if it has an accuracy (multiple choice, exact match) or is a rolling log-likelihood. The latter is scored
by bits per byte, which unlike a perplexity per token or word does not depend on the tokenizer or on the kind of text.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stages.evaluate.items import ACCURACIES, BITS_PER_BYTE, leaves, metric_of, scored, task_items
from stages.evaluate.preloaded import Preloaded
from stages.parts.base.errors import ConfigError, HubUnavailable, MeasurementFailed, UnknownName
from stages.parts.base.settings import Workload
from stages.parts.engine.log import ServerLog
from stages.parts.engine.server import Server
from stages.parts.records.evaluation import TaskScore
from stages.parts.samples.figures import bits_per_byte_interval
from stages.parts.samples.lines import PerplexityItem

SUPPORTED: Final = f"tasks with {', '.join(ACCURACIES)} or {BITS_PER_BYTE}"
CONCURRENCY: Final = 4
Z_95: Final = 1.959964
OFFLINE: Final = (
    "ConnectionError",
    "ConnectError",
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "ConnectTimeout",
)


def check_tasks(workload: Workload) -> bool:
    """Refuse tasks that do not exist or cannot be scored, before a server is started.

    Returns:
        Whether lm-eval's own tasks are needed; reading all their definitions takes several seconds.

    Raises:
        UnknownName: a task is neither one of lm-eval's nor in ``tasks_path``.
        ConfigError: a task has no metric that can be scored.
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
    work: Path,
    log: Path,
    *,
    include_defaults: bool,
) -> dict[str, Any]:
    """Run the workload's tasks against the server.

    Args:
        work: the folder for the harness's result.

    Returns:
        What the harness reported, for ``scores_of`` and ``items_of``.

    Raises:
        HubUnavailable: a task's data could not be downloaded.
        MeasurementFailed: lm-eval failed.
        ServerFailed: the server ended.
    """
    result = work / "quality.json"
    request = {
        "result": str(result),
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
    if harness.call(server, request, log) != 0:
        said = ServerLog(log)
        why = said.cause()
        if any(name in why for name in OFFLINE):
            raise HubUnavailable(f"a quality task's data could not be downloaded: {why}", hint=f"see {log}")
        raise MeasurementFailed(f"lm-eval failed: {why}", hint=f"see {log}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def scores_of(found: Mapping[str, Any]) -> list[TaskScore]:
    """A score for each task; a group that lm-eval aggregates has one score instead of those of its tasks.

    Raises:
        ConfigError: a task has no metric that can be scored.
        MeasurementFailed: a score is missing or not finite.
    """
    return [_score(task, found["results"][task], found) for task in scored(found)]


def _score(task: str, metrics: dict[str, float], found: Mapping[str, Any]) -> TaskScore:
    metric = metric_of(metrics)
    if metric is None:
        names = sorted({name.partition(",")[0] for name in metrics})
        raise ConfigError(f"quality task {task!r} has only {', '.join(names) or 'no metric'}", hint=f"use {SUPPORTED}")
    value = metrics[metric]
    if not math.isfinite(value):
        raise MeasurementFailed(f"{task}: {metric} is {value}", hint="the model returns values that are not numbers")
    name, _, filtered = metric.partition(",")
    items = sum(found["items"][leaf] for leaf in leaves(task, found["subtasks"]))
    if name == BITS_PER_BYTE:
        documents = [each for each in task_items(task, metric, found) if isinstance(each, PerplexityItem)]
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


def _index(tasks_path: str | None, *, include_defaults: bool) -> Mapping[str, Any]:
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    index: Mapping[str, Any] = TaskManager(include_path=tasks_path, include_defaults=include_defaults).task_index
    return index
