"""Completes a DAG: starts what may run, closes what is over, until every task is finished, inner ones too."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pipeline.local import fanout, growth, suspension
from pipeline.local.dag import Graph
from pipeline.local.frame import Frame, group_outcome, member_outputs
from pipeline.local.job import Job, Prepared, skipped_by
from pipeline.local.manifest import Template
from pipeline.local.runner import NEVER, TOO_MANY, Runner
from pipeline.local.state import Phase, save
from stages.parts.base.errors import ConfigError


class Scheduler(Runner):
    def complete(
        self,
        graph: Graph,
        base: Mapping[str, str],
        inputs: Mapping[str, str] | None = None,
        template: Template | None = None,
    ) -> str | None:
        """Run a graph until each of its tasks is finished; the node for which it failed, if it did.

        Args:
            base: what references to the workflow stand for.
            inputs: the same of the template that the graph is of.
        """
        self.jobs = {}
        whole = growth.frame(self.workflow, self.state, graph, template=template, base=base, inputs=inputs or {})
        self.know(whole.jobs.values())
        while True:
            self._advance_as_far_as_possible(whole)
            if self.unsaved:  # after the starts, so that the disk's time is not theirs
                save(self.places.run, self.state)
                self.unsaved = False
            if whole.finished:
                culprit = whole.culprit()
                return culprit.node.name if culprit else None
            self.await_events()

    def _advance_as_far_as_possible(self, whole: Frame) -> None:
        """Until nothing more follows from what is known; a hook or an inner dag can be all it takes."""
        self.changed = True
        while self.changed:
            self.changed = self.waits_for_lock = False
            self._advance(whole, "")
        self._tell_what_is_suspended()

    def _advance(self, frame: Frame, blocked: str) -> None:
        """Start or finish every task that can be, parents first."""
        for name, job in frame.jobs.items():
            if job.done:
                continue
            blocked_here = blocked or frame.blocked()
            may_run = True if job.entered or job.node.finished else frame.may_run(name)
            if may_run is False and not (self.stopping or blocked_here):
                self.end(job, "Omitted", f"not started: {frame.graph.condition(name)} does not hold")
            elif may_run or self.stopping or blocked_here:
                self._step(job, blocked_here)

    def _step(self, job: Job, blocked: str) -> None:
        """One step further with a task whose turn it is, or which can't have one any more."""
        if job.running:
            return
        if job.node.finished:
            if job.hook:
                self._step(job.hook, "")
        elif job.inner:
            self._advance(job.inner, blocked)
            if job.inner.finished:
                self._close(job, job.inner)
        elif job.members:
            for member in job.members:
                if not member.done:
                    self._step(member, blocked)
            if all(member.done for member in job.members):
                self._close_group(job, job.members)
        elif self.stopping:
            self.end(job, "Failed" if job.node.attempts or job.suspended else "Omitted", self.stopping)
        elif job.suspended:
            self._look_at(job)
        elif blocked and not job.node.attempts:
            self._cut(job, blocked)
        else:
            self._go(job)

    def _go(self, job: Job) -> None:
        """One step further with a task whose dependencies are met: skipped, cached, started, or told why it waits."""
        try:
            if job.task.expands and not job.values:
                self._expand(job)
                return
            if not job.prepared and (condition := skipped_by(job.task.when, job.scope)):
                self.end(job, "Skipped", f"when {condition!r} is false")
                return
            if job.template.container is None:
                self._enter(job)
                return
            places = self.places
            job.prepared = job.prepared or Prepared.of(
                job, self.workflow.volumes(job.template), places.mounts, places.memo, len(self.pool.capacity.gpus)
            )
        except ConfigError as error:  # known only now: a reference without a value, a bad memo key
            self.end(job, "Error", str(error), error.hint)
            return
        if time.monotonic() >= job.not_before:
            self.start(job, job.prepared)

    def _enter(self, job: Job) -> None:
        """Begin a dag or steps within, or a suspension."""
        if job.template.suspend:
            duration_s = job.template.suspend.duration
            job.suspended_until = time.monotonic() + duration_s if duration_s is not None else NEVER
            self.begin(job, suspension.message(self.state.name, duration_s))
        elif self.parallelism_allows(job):
            job.inner = growth.inner(self.workflow, self.state, job)
            self.know(job.inner.jobs.values())
            self.begin(job, "")
        else:
            self.wait_for(job, TOO_MANY)

    def _expand(self, job: Job) -> None:
        made = growth.members(self.state, job)
        if not made:
            self.end(job, "Skipped", "there are no items")
            return
        job.members = made
        self.know(made)
        self.begin(job, "")

    def _close(self, job: Job, inner: Frame) -> None:
        """A dag or steps is over: it is as its leaves are."""
        culprit = inner.culprit()
        if self.stopping:
            self.end(job, "Failed", self.stopping)
        elif culprit:
            phase: Phase = "Error" if culprit.node.phase == "Error" else "Failed"
            self.end(job, phase, f"{culprit.node.name}: {culprit.node.message}")
        elif inner.cut:
            self._cut(job, inner.cut)
        else:
            try:
                job.node.outputs = inner.outputs()
            except ConfigError as error:
                self.end(job, "Error", str(error), error.hint)
                return
            self.end(job, "Succeeded", "")

    def _close_group(self, job: Job, members: list[Job]) -> None:
        phase, message = group_outcome(members)
        job.node.outputs = fanout.aggregated(member_outputs(members))
        self.end(job, phase, message)

    def _cut(self, job: Job, reason: str) -> None:
        """It does not run, or not to its end, because of what happened elsewhere; nor does what holds it."""
        job.frame.cut = reason
        self.end(job, "Omitted", reason)

    def _look_at(self, job: Job) -> None:
        """Whether a suspended task may go on: asked for, or its time is over."""
        if job.supplied is None and time.monotonic() < (job.suspended_until or 0.0):
            return
        try:
            job.node.outputs = suspension.outputs_of(job.template, job.supplied or {})
        except ConfigError as error:
            self.end(job, "Error", str(error))
            return
        self.end(job, "Succeeded", "resumed" if job.supplied is not None else "")

    def _tell_what_is_suspended(self) -> None:
        waiting = [job.node.name for job in self.jobs.values() if job.suspended]
        message = f"{suspension.SUSPENDED} at {', '.join(waiting)}" if waiting else ""
        if message != self.state.message:
            self.state.message = message
            self.run_changed()
