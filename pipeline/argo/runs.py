"""Finds runs on a cluster, shows them, reads their logs, stops and resumes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

from rich.console import Group

from pipeline.argo.follow import follow_logs, read_logs
from pipeline.argo.status import Rooms, ended, nodes_of, run_state, templates
from pipeline.runs.engine import Printout, choose_run
from pipeline.runs.state import RunState
from pipeline.runs.tables import tasks_table
from pipeline.workflow.parameters import NAME
from stages.parts.base.errors import ClusterRefused, ConfigError, MissingRun
from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import WORKFLOWS, Object

UI_VARIABLES: Final = ("ARGO_UI", "ARGO_SERVER")
"""Environment variables with the address of Argo's user interface; the first that is set counts."""
RESULTS: Final = ("winner", "outcome", "promotion", "reason", "release", "url")


@dataclass(frozen=True)
class ClusterRun:
    """A run: a Workflow as it was when it was read. See ``pipeline.runs.engine.PipelineRun``."""

    cluster: Cluster
    workflow: Object

    @cached_property
    def state(self) -> RunState:
        return run_state(self.workflow)

    @property
    def id(self) -> str:
        return self.state.name

    @property
    def namespace(self) -> str:
        return str(self.workflow["metadata"]["namespace"])

    @property
    def directory(self) -> str:
        """The run's folder, relative to the store."""
        return f"{self.state.arguments.get('model-directory', 'MODEL')}/runs/{self.id}"

    @cached_property
    def results(self) -> dict[str, str]:
        """The outputs of select and serve."""
        stages = [node for node in self.state.nodes if node.name in ("select", "serve")]
        return {name: value for node in stages for name, value in node.outputs.items()}

    @property
    def winner(self) -> str | None:
        return self.results.get("winner")

    @property
    def outcome(self) -> str | None:
        """The choice's and, if the winner did not take the place of what is in production, why not."""
        outcome, promotion = self.results.get("outcome"), self.results.get("promotion", "promoted")
        return outcome if outcome is None or promotion == "promoted" else f"{outcome}, {promotion}"

    @property
    def link(self) -> str | None:
        """The run's page in Argo's user interface, if its address is known."""
        base = next((os.environ[name] for name in UI_VARIABLES if os.environ.get(name)), None)
        if base is None:
            return None
        base = base if "://" in base else f"https://{base}"
        return f"{base.rstrip('/')}/workflows/{self.namespace}/{self.id}"

    def show(self) -> Printout:
        Rooms(self.cluster).fill(self.state, templates(self.workflow), nodes_of(self.workflow.get("status", {})))
        title = f"{self.state.model}  run {self.id}  {self.state.phase}  {self.state.message}".rstrip()
        report = self.report()
        document = report.document | {"run": self.state.model_dump(mode="json")}
        return Printout(document, Group(f"{title}\n", tasks_table(self), "", report.text))

    def report(self) -> Printout:
        """Return the results: the scores and the reason, if the workflow has them, and where everything is."""
        document: dict[str, Any] = {
            "run": self.id,
            "engine": "argo",
            "namespace": self.namespace,
            "model": self.state.model,
            "phase": self.state.phase,
            "message": self.state.message,
            **{name: self.results.get(name) for name in RESULTS},
            "link": self.link,
        }
        lines = [self.results[name] for name in ("table", "reason") if name in self.results]
        places = {"release": self.results.get("release"), "endpoint": self.results.get("url"), "workflow": self.link}
        return Printout(document, Group(*lines, *(f"{name:<9} {place}" for name, place in places.items() if place)))

    def logs(self, task: str | None, *, follow: bool) -> Iterator[str]:
        names = [node.name for node in self.state.nodes]
        if task is None and follow:
            hint = f"name one of {', '.join(names)}"
            raise ConfigError("logs on a cluster are followed one task at a time", hint=hint)
        if task is not None:
            task = self.state.with_log(task)
            if follow:
                yield from follow_logs(self.cluster, self.id, task)
                return
            names = [task]
        is_empty = True
        for name in names:
            for line in read_logs(self.cluster, self.workflow, name):
                is_empty = False
                yield line if task else f"{name}: {line}"
        if is_empty:
            raise MissingRun(
                f"{task or 'no task'} of run {self.id} has a log: it has not started, was cached, or its pods are gone",
                hint=f"the store's volume keeps the logs of stages: {self.directory}/logs",
            )

    def stop(self) -> bool:
        if ended(self.workflow):
            return False
        self.cluster.merge(WORKFLOWS, self.id, {"spec": {"shutdown": "Stop"}})
        return True

    def resume(self, task: str | None = None) -> list[str]:
        """Resume suspended tasks, *task* or all, as ``argo resume`` does."""
        tasks, status = self.state.suspended(task), self.workflow["status"]
        if not status.get("nodes"):  # only Argo's own tools can change it then
            raise ClusterRefused(f"the state of run {self.id} is compressed", hint=f"argo resume {self.id}")
        nodes = nodes_of(status)
        approved = {
            "phase": "Succeeded",
            "finishedAt": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "message": "approved with slipway resume",
        }
        changes = {nodes[f"{self.id}.{name}"]["id"]: approved for name in tasks}
        self.cluster.merge(WORKFLOWS, self.id, {"status": {"nodes": changes}})
        return tasks


def all_runs(cluster: Cluster) -> list[ClusterRun]:
    """Find all runs of our template, however they were submitted, the newest first."""
    try:
        workflows, _ = cluster.list(WORKFLOWS)
    except Absent:
        cluster.require(WORKFLOWS)
        raise
    ours = [workflow for workflow in workflows if workflow["spec"].get("workflowTemplateRef", {}).get("name") == NAME]
    ours.sort(key=lambda workflow: (workflow["metadata"]["creationTimestamp"], workflow["metadata"]["name"]))
    return [ClusterRun(cluster, workflow) for workflow in reversed(ours)]


def find(cluster: Cluster, name: str) -> ClusterRun:
    """Find a run by its name, the beginning of its name, or 'latest'."""
    return choose_run(name, {run.id: run for run in all_runs(cluster)}, f"namespace {cluster.namespace}")
