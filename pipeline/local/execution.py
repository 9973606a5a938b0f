"""The engine: runs a workflow from its lock to its exit handler."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from pipeline.local.attempt import Prepared
from pipeline.local.folder import LOCKS, LOGS, MEMO, RunFolders, hold, memo_path, opened, save
from pipeline.local.manifest import substitute
from pipeline.local.resources import MachineResources, Pool
from pipeline.local.runner import INTERRUPTED, NEVER, POLL_S, Event, Runner
from pipeline.local.workflow import ActiveDag, Job, Scope, parse
from pipeline.runs.progress import RunObserver
from pipeline.runs.state import Node, RunState
from stages.parts.base.errors import ConfigError, Interrupted, SlipwayError


def execute(
    manifest: Mapping[str, Any],
    *,
    arguments: Mapping[str, str],
    name: str,
    folders: RunFolders,
    capacity: MachineResources,
    observer: RunObserver,
    environment: Mapping[str, str] | None = None,
) -> RunState:
    """Run a compiled WorkflowTemplate or Workflow to its end, including its exit handler.

    Args:
        name: the run's, ``{{workflow.name}}``.
        environment: what tasks inherit, and where secrets come from. Default: this process's own.

    Returns:
        The state at the end, after a success or a failure: see ``phase``, ``culprit`` and ``message``.

    Raises:
        ConfigError: the workflow can't run here; nothing was started.
        Busy: another engine runs in the run's folder.
        NotEnoughSpace: the disk is full; what ran was stopped.
        Interrupted: Ctrl-C or SIGTERM; what ran was stopped, and the exit handler ran.
    """
    workflow = parse(manifest)
    parameters = workflow.bind(arguments)
    inherited = dict(os.environ if environment is None else environment)
    workflow.check_machine(folders.mounts, capacity, inherited)
    nodes = [Node(name=task.name, template=task.template) for task in (*workflow.tasks, *workflow.ending)]
    state = RunState(name=name, workflow=workflow.name, arguments=parameters, nodes=nodes)
    run = _Run(workflow, state, folders, Pool(capacity), observer, inherited)
    with opened(folders.run, manifest, state):
        run.to_its_end()
    if run.signals:
        raise Interrupted("interrupted; every task was stopped", hint=f"logs are in {folders.run / LOGS}")
    return state


class _Run(Runner):
    """Runs the workflow's tasks and its exit handler: starts tasks that may run, and ends those that never will."""

    def to_its_end(self) -> None:
        """Run to the end; save and show the last state also after an error of the engine itself."""
        try:
            with _signals_to(self.events), contextlib.ExitStack() as locks:
                if self._lock(locks):
                    self._workflow()
                self._save_last()
        except Exception as error:
            self.leave_nothing_running()
            self.state.phase, self.state.message = "Error", str(error)
            with contextlib.suppress(SlipwayError):
                self._save_last()
            raise
        finally:
            self.observer.finished(self.state)

    def _lock(self, locks: contextlib.ExitStack) -> bool:
        """Hold the workflow's mutexes as long as *locks* is open; False if a signal comes first."""
        mutexes = self.workflow.spec.synchronization.names(Scope(self._values()))
        while busy := hold(locks, self.folders.shared / LOCKS, mutexes):
            if self.state.message != (message := f"waiting for {busy}"):
                self.state.message = message
                self.show()
                save(self.folders.run, self.state)
            with contextlib.suppress(queue.Empty):
                self.take_in(self.events.get(timeout=POLL_S))
                self.state.phase, self.state.message = "Failed", INTERRUPTED
                return False
        return True

    def _workflow(self) -> None:
        state = self.state
        limit_s = self.workflow.spec.active_deadline_seconds
        state.phase, state.message, state.started_at = "Running", "", datetime.now(UTC)
        self.deadline = time.monotonic() + limit_s if limit_s is not None else NEVER
        self.show()
        save(self.folders.run, state)  # before there is a task that can be stopped
        culprit = self.complete(ActiveDag.of(self.workflow, state, self.workflow.tasks, self._values()))
        phase, message = self._verdict(culprit)
        if ending := self.workflow.ending:
            # It runs once, whatever happened; only a second interrupt skips it.
            self.deadline, self.stopping = NEVER, INTERRUPTED if self.signals > 1 else ""
            values = {**self._values(), "workflow.status": phase}
            handler = self.complete(ActiveDag.of(self.workflow, state, ending, values))
            if phase == "Succeeded":
                culprit = handler
                phase, message = self._verdict(culprit)
        state.phase, state.culprit = phase, culprit
        state.message = INTERRUPTED if self.signals else message

    def _verdict(self, culprit: str | None) -> tuple[Literal["Succeeded", "Failed", "Error"], str]:
        if self.stopping:
            return "Failed", self.stopping
        if culprit is None:
            return "Succeeded", ""
        node = self.state.node(culprit)
        return "Error" if node.phase == "Error" else "Failed", f"{culprit}: {node.message}"

    def _values(self) -> dict[str, str]:
        parameters = {f"workflow.parameters.{name}": value for name, value in self.state.arguments.items()}
        return {"workflow.name": self.state.name, **parameters}

    def _save_last(self) -> None:
        self.state.finished_at = datetime.now(UTC)
        save(self.folders.run, self.state)

    def complete(self, dag: ActiveDag) -> str | None:
        """Run a DAG until each of its tasks is finished. Returns the task that made it fail, if it failed."""
        self.jobs = dag.jobs
        while True:
            self.waits_for_lock = False
            self._advance(dag)
            if self.unsaved:  # after the starts, so that they do not wait for the disk
                save(self.folders.run, self.state)
                self.unsaved = False
            if all(job.node.finished for job in dag.jobs.values()):
                return dag.graph.culprit(dag.phases())
            self.await_events()

    def _advance(self, dag: ActiveDag) -> None:
        """Start or finish every task that is ready, parents first."""
        for name, job in dag.jobs.items():
            if job.node.finished or job.running:
                continue
            may_run = True if job.prepared else dag.graph.may_run(name, dag.phases())
            if self.stopping:
                self.end(job, "Failed" if job.node.attempts else "Omitted", self.stopping)
            elif may_run is False:
                self.end(job, "Omitted", dag.graph.why_not(name, dag.phases()))
            elif may_run:
                self._go(job)

    def _go(self, job: Job) -> None:
        """Advance a task whose dependencies are met: skip it, reuse its outputs, start it, or say why it waits."""
        try:
            if not job.prepared:
                if condition := job.skipped_by():
                    self.end(job, "Skipped", f"when {condition!r} is false")
                    return
                job.prepared = self._prepared(job)
        except ConfigError as error:  # known only now: a reference without a value, or a wrong memo key
            self.end(job, "Error", str(error), error.hint)
            return
        if time.monotonic() >= job.not_before:
            self.start(job, job.prepared)

    def _prepared(self, job: Job) -> Prepared:
        """Resolve the references in a task's template; also sets the file that keeps its outputs."""
        scope = Scope({**job.dag.base, **job.inputs()})
        if memoize := job.template.memoize:
            key = substitute(memoize.key, scope)
            job.memo = memo_path(self.folders.shared / MEMO, memoize.cache.config_map.name, key)
        return Prepared.of(job.template, self.workflow.volumes(job.template), self.folders.mounts, scope)


@contextlib.contextmanager
def _signals_to(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into events. Only possible in the main thread; elsewhere the caller handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # SimpleQueue.put is reentrant, so that a signal handler may call it.
    handlers = {
        number: signal.signal(number, lambda *_: events.put(None)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
