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
from typing import Any, Final, Literal

from pipeline.local.attempt import Prepared
from pipeline.local.folder import LOCKS, LOGS, MEMO, RunFolders, hold, memo_path, opened, save
from pipeline.local.manifest import substitute
from pipeline.local.resources import MachineResources, Pool
from pipeline.local.runner import INTERRUPTED, NEVER, POLL_S, Event, Runner
from pipeline.local.workflow import ActiveDag, Job, Scope, parse
from pipeline.runs.progress import RunObserver
from pipeline.runs.state import Phase, RunState
from stages.parts.base.errors import ConfigError, Interrupted, SlipwayError

SUSPENDED: Final = "suspended"


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
    nodes = [node for dag in filter(None, (workflow.entrypoint, workflow.exit_handler)) for node in workflow.nodes(dag)]
    state = RunState(name=name, workflow=workflow.name, arguments=parameters, nodes=nodes)
    run = _Run(workflow, state, folders, Pool(capacity), observer, inherited)
    with opened(folders.run, manifest, state):
        run.to_its_end()
    if run.signals:
        raise Interrupted("interrupted; every task was stopped", hint=f"logs are in {folders.run / LOGS}")
    return state


class _Run(Runner):
    """Runs the workflow and its DAGs: starts tasks that may run and ends those that are over, in inner DAGs, too."""

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
        save(self.folders.run, state)  # before there is a task that can be stopped or resumed
        culprit = self.complete(ActiveDag.of(self.workflow, state, self.workflow.entrypoint, self._values()))
        phase, message = self._verdict(culprit)
        if ending := self.workflow.exit_handler:
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
        """Run a DAG until each of its tasks is finished. Returns the node that made it fail, if it failed."""
        self.jobs = {}
        self.know(dag.jobs.values())
        while True:
            self.changed = True
            while self.changed:  # the end of an inner dag can let other tasks start
                self.changed = self.waits_for_lock = False
                self._advance(dag)
            waiting = [job.node.name for job in self.jobs.values() if job.suspended]
            message = f"{SUSPENDED} at {', '.join(waiting)}" if waiting else ""
            if message != self.state.message:
                self.state.message = message
                self.show()
            if self.unsaved:  # after the starts, so that they do not wait for the disk
                save(self.folders.run, self.state)
                self.unsaved = False
            if dag.finished:
                culprit = dag.culprit()
                return culprit.origin().node.name if culprit else None
            self.await_events()

    def _advance(self, dag: ActiveDag) -> None:
        """Start or finish every task that is ready, parents first."""
        for name, job in dag.jobs.items():
            if job.node.finished:
                continue
            may_run = self.stopping or job.entered or dag.graph.may_run(name, dag.phases())
            if may_run is False:
                self.end(job, "Omitted", dag.graph.why_not(name, dag.phases()))
            elif may_run:
                self._step(job)

    def _step(self, job: Job) -> None:
        """Advance a task that may run, or end it if the run is being stopped."""
        if job.running:
            return
        if job.inner:
            self._advance(job.inner)
            if job.inner.finished:
                self._close(job, job.inner)
        elif self.stopping:
            self.end(job, "Failed" if job.node.attempts or job.suspended else "Omitted", self.stopping)
        elif not job.suspended:
            self._go(job)

    def _go(self, job: Job) -> None:
        """Advance a task whose dependencies are met: skip it, reuse its outputs, start it, or say why it waits."""
        try:
            if not job.prepared and (condition := job.skipped_by()):
                self.end(job, "Skipped", f"when {condition!r} is false")
            elif job.template.suspend:
                self.begin(job, f"{SUSPENDED}; to continue: slipway resume {self.state.name}")
            elif job.template.dag:
                self._enter(job)
            elif not job.prepared:
                scope, volumes = self._resolved(job), self.workflow.volumes(job.template)
                job.prepared = Prepared.of(job.template, volumes, self.folders.mounts, scope)
        except ConfigError as error:  # known only now: a reference without a value, or a wrong memo key
            self.end(job, "Error", str(error), error.hint)
            return
        if job.prepared and time.monotonic() >= job.not_before:
            self.start(job, job.prepared)

    def _resolved(self, job: Job) -> Scope:
        """Return the values of the references in a task's template; also sets the file that keeps its outputs."""
        scope, memoize = Scope({**job.dag.base, **job.inputs()}), job.template.memoize
        if memoize:
            job.memo = memo_path(
                self.folders.shared / MEMO, memoize.cache.config_map.name, substitute(memoize.key, scope)
            )
        return scope

    def _enter(self, job: Job) -> None:
        self._resolved(job)
        if self.ended_by_memo(job):
            return
        inputs = job.inputs()
        job.inner = ActiveDag.of(self.workflow, self.state, job.template, job.dag.base, inputs, job.node.name)
        self.know(job.inner.jobs.values())
        self.begin(job, "")

    def _close(self, job: Job, inner: ActiveDag) -> None:
        """End a task whose dag has ended: its phase is that of the dag's leaves."""
        culprit = inner.culprit()
        if self.stopping:
            self.end(job, "Failed", self.stopping)
        elif culprit:
            node = culprit.origin().node
            phase: Phase = "Error" if node.phase == "Error" else "Failed"
            self.end(job, phase, f"{node.name}: {node.message}")
        else:
            try:
                self.succeed(job, inner.outputs())
            except ConfigError as error:
                self.end(job, "Error", str(error), error.hint)


@contextlib.contextmanager
def _signals_to(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into events. Only possible in the main thread; elsewhere the caller handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # SimpleQueue.put is reentrant, so that a signal handler may call it.
    handlers = {each: signal.signal(each, lambda *_: events.put(None)) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
