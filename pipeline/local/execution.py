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

from pipeline.local import growth, mutex
from pipeline.local.folder import LOGS, RunFolders, opened, save
from pipeline.local.job import Scope
from pipeline.local.resources import MachineResources, Pool
from pipeline.local.runner import INTERRUPTED, NEVER, POLL_S, Event, Signal
from pipeline.local.scheduler import Scheduler
from pipeline.local.workflow import parse
from pipeline.runs.progress import RunObserver
from pipeline.runs.state import RunState
from stages.parts.base.errors import Interrupted, SlipwayError


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
    nodes = growth.outermost(workflow)
    state = RunState(name=name, workflow=workflow.name, arguments=parameters, nodes=nodes)
    scheduler = Scheduler(workflow, state, folders, Pool(capacity), observer, inherited)
    with opened(folders.run, manifest, state):
        _Run(scheduler).run()
    if scheduler.signals:
        raise Interrupted("interrupted; every task was stopped", hint=f"logs are in {folders.run / LOGS}")
    return state


class _Run:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.state, self.workflow = scheduler, scheduler.state, scheduler.workflow

    def run(self) -> None:
        """Run to the end; save and show the last state also after an error of the engine itself."""
        try:
            with _signals_to(self.scheduler.events), contextlib.ExitStack() as locks:
                if self._lock(locks):
                    self._workflow()
                self._save_last()
        except Exception as error:
            self.scheduler.leave_nothing_running()
            self.state.phase, self.state.message = "Error", str(error)
            with contextlib.suppress(SlipwayError):
                self._save_last()
            raise
        finally:
            self.scheduler.observer.finished(self.state)

    def _lock(self, locks: contextlib.ExitStack) -> bool:
        """Hold the workflow's mutexes as long as *locks* is open; False if a signal comes first."""
        scope = Scope(self._values())
        gpus = len(self.scheduler.pool.capacity.gpus)
        mutexes = mutex.locks_of(self.workflow.spec.synchronization, gpus, scope)
        while busy := mutex.hold(locks, self.scheduler.folders.locks, mutexes):
            if self.state.message != (message := f"waiting for {busy}"):
                self.state.message = message
                self.scheduler.run_changed()
                save(self.scheduler.folders.run, self.state)
            with contextlib.suppress(queue.Empty):
                self.scheduler.take_in(self.scheduler.events.get(timeout=POLL_S))
                self.state.phase, self.state.message = "Failed", INTERRUPTED
                return False
        return True

    def _workflow(self) -> None:
        state, scheduler = self.state, self.scheduler
        limit_s = self.workflow.spec.active_deadline_seconds
        state.phase, state.message, state.started_at = "Running", "", datetime.now(UTC)
        scheduler.deadline = time.monotonic() + limit_s if limit_s is not None else NEVER
        scheduler.run_changed()
        save(scheduler.folders.run, state)  # before there is a task that can be stopped or resumed
        culprit = scheduler.complete(growth.active(self.workflow, state, self.workflow.entrypoint, self._values()))
        phase, message = self._verdict(culprit)
        if on_exit := self.workflow.spec.on_exit:
            # It runs once, whatever happened; only a second interrupt skips it.
            scheduler.deadline, scheduler.stopping = NEVER, INTERRUPTED if scheduler.signals > 1 else ""
            values = {**self._values(), "workflow.status": phase}
            handler = scheduler.complete(growth.exit_handler(self.workflow, state, on_exit, values))
            if phase == "Succeeded":
                culprit = handler
                phase, message = self._verdict(culprit)
        state.phase, state.culprit = phase, culprit
        state.message = INTERRUPTED if scheduler.signals else message

    def _verdict(self, culprit: str | None) -> tuple[Literal["Succeeded", "Failed", "Error"], str]:
        if self.scheduler.stopping:
            return "Failed", self.scheduler.stopping
        if culprit is None:
            return "Succeeded", ""
        node = self.state.node(culprit)
        return "Error" if node.phase == "Error" else "Failed", f"{culprit}: {node.message}"

    def _values(self) -> dict[str, str]:
        parameters = {f"workflow.parameters.{name}": value for name, value in self.state.arguments.items()}
        return {"workflow.name": self.state.name, **parameters}

    def _save_last(self) -> None:
        self.state.finished_at = datetime.now(UTC)
        save(self.scheduler.folders.run, self.state)


@contextlib.contextmanager
def _signals_to(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into events. Only possible in the main thread; elsewhere the caller handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # SimpleQueue.put is reentrant, so that a signal handler may call it.
    handlers = {
        number: signal.signal(number, lambda *_: events.put(Signal())) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
