"""One dag or steps template on its way; the entrypoint's is the outermost, others lie within one of its tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pipeline.local import expressions
from pipeline.local.dag import FAILED, Graph
from pipeline.local.job import Job, Scope, succeeded
from pipeline.local.manifest import Template, ValueFrom
from pipeline.local.names import plain
from pipeline.local.state import Phase
from pipeline.local.templates import Unresolved, bare


@dataclass
class Frame:
    template: Template | None
    """None: the one task of a container entrypoint, or of the exit handler."""
    graph: Graph
    base: Mapping[str, str]
    """What references to the workflow stand for."""
    inputs: Mapping[str, str]
    jobs: dict[str, Job] = field(default_factory=dict)
    """By task name, in DAG order."""
    cut: str = ""
    """Why tasks within it did not start, if the reason lies outside."""

    @property
    def scope(self) -> Scope:
        return Scope({**self.base, **self.inputs}, self.jobs)

    @property
    def finished(self) -> bool:
        return all(job.done for job in self.jobs.values())

    def phases(self) -> dict[str, Phase]:
        return {name: job.node.phase for name, job in self.jobs.items() if job.done}

    def members(self) -> dict[str, tuple[Phase, ...]]:
        return {
            name: tuple(member.node.phase for member in job.members)
            for name, job in self.jobs.items()
            if job.members is not None
        }

    def may_run(self, task: str) -> bool | None:
        return self.graph.may_run(task, self.phases(), self.members())

    def blocked(self) -> str:
        """Why nothing of it starts any more; empty while it may."""
        culprit = self._culprit() if self.graph.fail_fast else self._fast_failed()
        return f"not started: {culprit.node.name} failed (failFast)" if culprit else ""

    def culprit(self) -> Job | None:
        """The task for which it failed, down to the one that really did."""
        found = self._culprit()
        return found and found.frame.origin(found)

    def origin(self, failed: Job) -> Job:
        """The failed task within *failed* that made it fail, or itself."""
        if failed.members is not None:
            return next((self.origin(each) for each in failed.members if each.node.phase == failed.node.phase), failed)
        return (failed.inner and failed.inner.culprit()) or failed

    def outputs(self) -> dict[str, str]:
        """Those of its template; its tasks have ended.

        Raises:
            Unresolved, ConfigError: one has no value and no default.
        """
        scope, template = self.scope, self.template
        declared = template.outputs.parameters if template else ()
        return {each.name: _output(each.value_from, scope) for each in declared}

    def all_jobs(self) -> Iterator[Job]:
        """Its tasks and their items."""
        for job in self.jobs.values():
            yield job
            yield from job.members or ()

    def _culprit(self) -> Job | None:
        name = self.graph.culprit(self.phases(), self.members())
        return self.jobs[name] if name else self._fast_failed()

    def _fast_failed(self) -> Job | None:
        """A template's own ``failFast`` counts only beside ``parallelism``, and then every child (checkParallelism)."""
        if not (self.template and self.template.fail_fast and self.template.parallelism):
            return None
        return next((job for job in self.all_jobs() if job.node.phase in FAILED), None)


def group_outcome(members: list[Job]) -> tuple[Phase, str]:
    """How a fanned-out task ended: as the last of its failed items, if any (executeDAGTask); and what to say."""
    failed = [member for member in members if member.node.phase in FAILED]
    if failed:
        first = next(member for member in failed if member.node.phase == failed[-1].node.phase)
        return failed[-1].node.phase, f"{len(failed)} of {len(members)} failed: {first.node.name}: {first.node.message}"
    left_out = [member for member in members if member.node.phase == "Omitted"]
    return ("Omitted", left_out[0].node.message) if left_out else ("Succeeded", "")


def member_outputs(members: list[Job]) -> list[dict[str, str]]:
    return [member.node.outputs for member in succeeded(members)]


def _output(source: ValueFrom, scope: Scope) -> str:
    if source.parameter:
        reference = bare(source.parameter)
        value: expressions.Value = scope.perhaps(reference)
    else:
        reference = f"={source.expression}"
        value = expressions.evaluate(expressions.parse(source.expression, expressions.VALUE), scope.perhaps)
    if value is not None:
        return plain(value)
    if source.default is not None:
        return source.default
    raise Unresolved(reference, "the task that gives it has no such output")
