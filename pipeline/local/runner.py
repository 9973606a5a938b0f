"""Starts attempts, handles their ends, and tells the observer of every change.

One thread decides; each running attempt has a thread that waits for its process. They and the signal handler talk
to the deciding thread through one queue, so that it sleeps until something ends or is due.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, TypeAlias

from pipeline.local.attempt import Attempt, Ended, Prepared, code_path
from pipeline.local.folder import LOCKS, MemoEntry, RunFolders, hold, log_file, remembered, take_resumed
from pipeline.local.resources import Pool, environment_of
from pipeline.local.workflow import Job, Workflow
from pipeline.runs.progress import RunObserver
from pipeline.runs.state import FailedAttempt, Phase, RunState
from stages.parts.base.program import without_secrets

POLL_S: Final = 0.05
"""The interval at which a lock that another process holds is tried."""
LOOK_S: Final = 0.2
"""The interval at which requests to resume are looked for while something is suspended."""
INTERRUPTED: Final = "interrupted"
NEVER: Final = float("inf")

Event: TypeAlias = Ended | None
"""The end of an attempt, or, as None, Ctrl-C or SIGTERM."""


class Runner:
    """What all nodes of a run share: the machine, the queue of events, and the run's state."""

    def __init__(
        self,
        workflow: Workflow,
        state: RunState,
        folders: RunFolders,
        pool: Pool,
        observer: RunObserver,
        environment: Mapping[str, str],
    ) -> None:
        self.workflow, self.state, self.folders, self.pool = workflow, state, folders, pool
        self.observer = observer
        # As in a pod, a task sees the secrets that its template names, beside those of package indexes and of the
        # database of usage.
        secret = {name for _, template in workflow.used() for name in template.program.secrets()}
        self.secrets = {name: value for name, value in environment.items() if name in secret}
        others = {name: value for name, value in environment.items() if name not in secret}
        self.environment = without_secrets(others, "UV_|PIP_|PG|SLIPWAY_USAGE") | code_path(environment)
        if pool.capacity.gpus:  # the numbers of nvidia-smi; CUDA's default is fastest first
            self.environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.jobs: dict[str, Job] = {}
        self.signals = 0
        self.stopping = ""
        """Why the run is being stopped: nothing starts, and running tasks are ended. Empty otherwise."""
        self.deadline = NEVER
        """The deadline of the whole workflow, as time.monotonic()."""
        self.waits_for_lock = False
        self.changed = False
        """Something happened after which other tasks may start."""
        self.unsaved = False

    def know(self, jobs: Iterable[Job]) -> None:
        self.jobs |= {job.node.name: job for job in jobs}
        self.changed = True

    def begin(self, job: Job, message: str) -> None:
        """Mark a DAG, a fan-out or a suspension, which has no process, as running."""
        job.node.phase, job.node.message, job.node.started_at = "Running", message, datetime.now(UTC)
        self.show()
        self.changed = True

    def start(self, job: Job, prepared: Prepared) -> None:
        """Start an attempt, unless its result is known or it has to wait."""
        if busy := hold(job.locks, self.folders.shared / LOCKS, prepared.mutexes):
            self.waits_for_lock = True
            self.wait_for(job, f"waiting for {busy}")
            return
        if self.ended_by_memo(job):
            return
        share = self.pool.take(prepared.request)
        if isinstance(share, str):
            job.release()
            self.wait_for(job, f"waiting for {share}")
            return
        node = job.node
        node.attempts += 1
        node.started_at = node.started_at or datetime.now(UTC)
        secrets = {name: self.secrets[name] for name in job.template.program.secrets() if name in self.secrets}
        environment = {**self.environment, **environment_of(share, self.pool.capacity), **secrets}
        job.running = Attempt(node, prepared, share, environment, self.folders.run, self.events.put)
        node.phase, node.message, node.hint, node.exit_code = "Running", "", "", None
        node.log = log_file(node.name)
        self.show()

    def ended_by_memo(self, job: Job) -> bool:
        """End a task whose outputs an earlier run has kept; False if none has."""
        memoize = job.template.memoize
        entry = remembered(job.memo, memoize.max_age) if memoize and job.memo else None
        if entry is None:
            return False
        job.release()
        job.node.cached, job.node.outputs = True, dict(entry.outputs)
        self.end(job, "Succeeded", f"from run {entry.run}")
        return True

    def succeed(self, job: Job, outputs: dict[str, str]) -> None:
        """End a task that succeeded, and keep its outputs for other runs if it is memoized."""
        job.node.outputs = outputs
        if job.memo:
            template, run = job.node.template, self.state.name
            MemoEntry(template=template, run=run, created_at=datetime.now(UTC), outputs=outputs).write(job.memo)
        self.end(job, "Succeeded", "")

    def await_events(self) -> None:
        """Sleep until an attempt ends, something is due, or a signal comes; then handle all that happened."""
        with contextlib.suppress(queue.Empty):
            self.take_in(self.events.get(timeout=self._until_next()))
            while True:
                self.take_in(self.events.get_nowait())
        now = time.monotonic()
        if now >= self.deadline and not self.stopping:
            self._stop(f"the workflow took longer than {self.workflow.spec.active_deadline_seconds:g} s")
        for job in self.jobs.values():
            if job.running and (deadline := job.deadline()) and now >= deadline[0]:
                job.running.stop(deadline[1])
        for name in take_resumed(self.folders.run, [name for name, job in self.jobs.items() if job.suspended]):
            self.end(self.jobs[name], "Succeeded", "resumed")

    def _until_next(self) -> float | None:
        """Seconds until the next deadline, retry or look at a lock; None if only an event can change something."""
        now, jobs = time.monotonic(), self.jobs.values()
        due = [NEVER if self.stopping else self.deadline]
        due += [deadline[0] for job in jobs if (deadline := job.deadline())]
        due += [job.not_before for job in jobs if job.not_before > now]
        due += [now + POLL_S] if self.waits_for_lock else []
        due += [now + LOOK_S] if any(job.suspended for job in jobs) else []
        return None if min(due) == NEVER else max(0.0, min(due) - now)

    def take_in(self, event: Event) -> None:
        """Handle a signal, which stops everything, or the end of an attempt, which ends its task or is retried."""
        if event is None:
            self.signals += 1
            self._stop(INTERRUPTED)
        elif running := self.jobs[event.task].running:
            self._ended(self.jobs[event.task], running, event)

    def _stop(self, reason: str) -> None:
        self.stopping = self.stopping or reason
        for job in self.jobs.values():
            if job.running:
                job.running.stop(reason)

    def _ended(self, job: Job, running: Attempt, ended: Ended) -> None:
        reason, node = running.reason, job.node
        self.pool.give_back(running.share)
        job.release()
        node.exit_code, node.outputs = ended.exit_code, ended.outputs
        if reason:
            self._failed(job, FailedAttempt(phase="Failed", message=reason, exit_code=-1))
        elif ended.failure:
            self._failed(job, ended.failure)
        else:
            self.succeed(job, ended.outputs)

    def _failed(self, job: Job, failure: FailedAttempt) -> None:
        """Plan another attempt, or end the task."""
        attempts, strategy = job.node.attempts, job.template.retry_strategy
        wait_s = strategy.backoff_s(failure, attempts) if strategy else None
        if wait_s is None or self.stopping:
            self.end(job, failure.phase, failure.message, failure.hint)
            return
        job.not_before = time.monotonic() + wait_s
        job.node.retried.append(failure)
        self.wait_for(job, f"attempt {attempts} failed, the next in {wait_s:g} s: {failure.message}")

    def wait_for(self, job: Job, message: str) -> None:
        if job.node.message != message:
            job.node.message = message
            self.show()

    def end(self, job: Job, phase: Phase, message: str, hint: str = "") -> None:
        node = job.node
        node.phase, node.message, node.hint, node.finished_at = phase, message, hint, datetime.now(UTC)
        self.changed = True
        self.show()

    def show(self) -> None:
        """Tell the observer of a change, and let it be saved."""
        self.unsaved = True
        self.observer.changed(self.state)

    def leave_nothing_running(self) -> None:
        """End every attempt after an error of the engine itself, such as a full disk, before the error is shown."""
        self.stopping = self.stopping or "the engine failed"
        active = [(job, job.running) for job in self.jobs.values() if job.running]
        for _, running in active:
            running.stop("the engine failed")
        for job, running in active:
            running.join()
            self.end(job, "Error", "the engine failed")
        for job in self.jobs.values():
            if job.node.phase == "Running":  # it held other nodes, or waited
                self.end(job, "Error", "the engine failed")
