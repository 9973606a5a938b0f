"""Runs a DAG to its end: starts tasks that may run and ends those that are over, in inner DAGs, too."""

from __future__ import annotations

import time

from pipeline.local import growth, memo, mutex, suspension
from pipeline.local.attempt import ProcessSpec
from pipeline.local.folder import save
from pipeline.local.job import ActiveDag, Job, Prepared, Scope
from pipeline.local.references import substitute
from pipeline.local.resources import request
from pipeline.local.runner import Runner
from pipeline.runs.state import Phase
from stages.parts.base.errors import ConfigError


class Scheduler(Runner):
    def complete(self, dag: ActiveDag) -> str | None:
        """Run a DAG until each of its tasks is finished. Returns the node that made it fail, if it failed."""
        self.jobs = {}
        self.know(dag.jobs.values())
        while True:
            self.changed = True
            while self.changed:  # the end of an inner dag can let other tasks start
                self.changed = self.waits_for_lock = False
                self._advance(dag)
            self._name_suspended()
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
                self.begin(job, f"{suspension.SUSPENDED}; to continue: slipway resume {self.state.name}")
            elif job.template.dag:
                self._enter(job)
            else:
                job.prepared = job.prepared or self._prepared(job)
        except ConfigError as error:  # known only now: a reference without a value, or a wrong memo key
            self.end(job, "Error", str(error), error.hint)
            return
        if job.prepared and time.monotonic() >= job.not_before:
            self.start(job, job.prepared)

    def _prepared(self, job: Job) -> Prepared:
        """Resolve every reference of a task with a container."""
        template = job.template
        scope = self._resolved(job)
        resources = template.resources
        requests = {name: substitute(text, scope) for name, text in resources.requests.items()}
        limits = {name: substitute(text, scope) for name, text in resources.limits.items()}
        resolved = request(requests, limits)
        if lack := resolved.lacking_gpus(self.pool.capacity):
            raise ConfigError(f"the task {lack}")
        return Prepared(
            call=ProcessSpec.of(template, self.workflow.volumes(template), self.folders.mounts, scope),
            request=resolved,
            locks=mutex.locks_of(template.synchronization, len(self.pool.capacity.gpus), scope),
        )

    def _resolved(self, job: Job) -> Scope:
        """Return the values of the references in a task's template; also sets the file that keeps its outputs."""
        scope, memoize = Scope({**job.dag.base, **job.inputs()}), job.template.memoize
        if memoize:
            job.memo = memo.path_of(self.folders.memo, memoize.cache.config_map.name, substitute(memoize.key, scope))
        return scope

    def _enter(self, job: Job) -> None:
        self._resolved(job)
        if self.ended_by_memo(job):
            return
        inputs = job.inputs()
        job.inner = growth.active(self.workflow, self.state, job.template, job.dag.base, inputs, parent=job.node.name)
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

    def _name_suspended(self) -> None:
        waiting = [job.node.name for job in self.jobs.values() if job.suspended]
        message = f"{suspension.SUSPENDED} at {', '.join(waiting)}" if waiting else ""
        if message != self.state.message:
            self.state.message = message
            self.run_changed()
