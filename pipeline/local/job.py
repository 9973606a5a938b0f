"""A task on its way: from references to values, to a call, to its attempts; or to the tasks within it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.local import expressions, memo, mutex
from pipeline.local.attempt import Attempt, Call
from pipeline.local.manifest import Parameter, Task, Template, Volume
from pipeline.local.resources import Request, Share, request
from pipeline.local.state import Node
from pipeline.local.templates import Unresolved, is_one_reference, substitute

if TYPE_CHECKING:
    from pipeline.local.frame import Frame

PREFIXES = ("tasks", "steps")
Deadline = tuple[float, str]
"""As time.monotonic(), and what to say when it is over."""


@dataclass(frozen=True)
class Running:
    attempt: Attempt
    share: Share
    since: float
    """As time.monotonic()."""


@dataclass
class Job:
    task: Task
    template: Template
    node: Node
    frame: Frame
    """The dag or steps that it is a task of."""
    values: Mapping[str, str] = field(default_factory=dict)
    """``item``, if it is one of a fanned-out task's."""
    prepared: Prepared | None = None
    """From the moment on that its dependencies are met and its ``when`` holds. Of a container."""
    inner: Frame | None = None
    """The same of a dag or steps."""
    members: list[Job] | None = None
    """The same of a fanned-out task: one for each item."""
    suspended_until: float | None = None
    """The same of a suspend template, as time.monotonic()."""
    supplied: Mapping[str, str] | None = None
    """What came with the request to go on."""
    hook: Job | None = None
    """Its exit hook, once it has ended."""
    running: Running | None = None
    locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    first_started: float = 0.0
    """As time.monotonic()."""
    not_before: float = 0.0
    """The end of a retry's backoff, as time.monotonic()."""

    @property
    def entered(self) -> bool:
        """Whether its dependencies were met and its ``when`` held."""
        return bool(self.prepared or self.inner or self.members) or self.suspended_until is not None

    @property
    def suspended(self) -> bool:
        return self.suspended_until is not None and not self.node.finished

    @property
    def active(self) -> bool:
        """Whether it counts for ``parallelism``; what is suspended does not, as in Argo (countActiveChildren)."""
        return bool(self.running) or (self.inner is not None and not self.node.finished)

    @property
    def done(self) -> bool:
        """Whether tasks that depend on it may look: with its hook, as in Argo (evaluateDependsLogic)."""
        return self.node.finished and (self.hook is None or self.hook.done)

    @property
    def scope(self) -> Scope:
        return self.frame.scope.also(self.values)

    def deadlines(self) -> Iterator[Deadline]:
        """When its attempt is ended.

        For each attempt but the first, ``backoff.maxDuration`` is one, too (processNodeRetries: executionDeadline).
        """
        if not self.running or self.running.attempt.reason:
            return
        if limit_s := self.template.active_deadline_seconds:
            yield self.running.since + limit_s, f"took longer than {limit_s:g} s (activeDeadlineSeconds)"
        strategy = self.template.retry_strategy
        if self.node.attempts > 1 and strategy and strategy.backoff.max_duration is not None:
            limit_s = strategy.backoff.max_duration
            yield self.first_started + limit_s, f"took longer than {limit_s:g} s with its retries (backoff.maxDuration)"

    def rest(self) -> None:
        """Nothing of it runs or is held any more."""
        self.locks.close()
        self.running = None


@dataclass(frozen=True)
class Scope:
    """What references stand for: values by reference, and what the tasks of the same DAG left."""

    values: Mapping[str, str]
    jobs: Mapping[str, Job] = field(default_factory=dict)

    def __call__(self, reference: str) -> str:
        """Raises: Unresolved."""
        if reference in self.values:
            return self.values[reference]
        match reference.split("."):
            case [prefix, task, *rest] if prefix in PREFIXES and task in self.jobs:
                return self._of(self.jobs[task], rest, reference)
            case ["item", *_]:
                raise Unresolved(reference, "the item has no such key")
        raise Unresolved(reference, "it is known only in the exit handler")

    def perhaps(self, reference: str) -> str | None:
        """None for an output of a task that has none: skipped, omitted, or failed before it wrote it."""
        try:
            return self(reference)
        except Unresolved:
            return None

    def also(self, values: Mapping[str, str]) -> Scope:
        return replace(self, values={**self.values, **values})

    def _of(self, job: Job, what: list[str], reference: str) -> str:
        match what:
            case ["status"]:
                return job.node.phase
            case ["exitCode"] if job.node.exit_code is not None:
                return str(job.node.exit_code)
            case ["outputs", "parameters"] if job.members is not None:
                return json.dumps([each.node.outputs for each in succeeded(job.members)], ensure_ascii=False)
            case ["outputs", "parameters", name]:
                return self._output(job, name, reference)
        raise Unresolved(reference, f"{job.task.name} is {job.node.phase}")

    def _output(self, job: Job, name: str, reference: str) -> str:
        if name in job.node.outputs:
            return job.node.outputs[name]
        for output in job.template.outputs.parameters:
            if output.name == name and output.value_from.default is not None and job.members is None:
                return output.value_from.default
        raise Unresolved(reference, f"{job.task.name} is {job.node.phase}")


@dataclass(frozen=True)
class Prepared:
    """What a container's task does, with every reference resolved."""

    call: Call
    request: Request
    locks: tuple[mutex.Lock, ...]
    memo: Path | None

    @classmethod
    def of(
        cls,
        job: Job,
        volumes: Mapping[str, Volume],
        mounts: Mapping[str, Path],
        memo_dir: Path,
        gpus: int,
    ) -> Prepared:
        """Raises: Unresolved, ConfigError: a reference without a value; a memo key that can't be one."""
        template, resources = job.template, job.template.program.resources
        inner = Scope({**job.frame.base, **inputs_of(job)})
        memoize = template.memoize
        return cls(
            call=Call.of(template, volumes, mounts, inner),
            request=request(resources.requests, resources.limits),
            locks=mutex.locks_of(template.synchronization, gpus, inner),
            memo=memo.path_of(memo_dir, memoize.cache.config_map.name, substitute(memoize.key, inner))
            if memoize
            else None,
        )


def succeeded(jobs: list[Job]) -> list[Job]:
    """Those with outputs to speak of; only these are aggregated (processAggregateNodeOutputs)."""
    return [job for job in jobs if job.node.phase == "Succeeded" and job.node.outputs]


def skipped_by(when: str, scope: Scope) -> str:
    """The condition that says no, with its values; empty if it says yes or there is none.

    Raises:
        ConfigError: with its values it is no condition.
    """
    text = substitute(when, scope)
    if not text or expressions.decide(expressions.parse(text, expressions.WHEN), str):
        return ""
    return text


def inputs_of(job: Job) -> dict[str, str]:
    """Its template's inputs, by reference.

    Raises:
        Unresolved: an argument that refers to an output which is not there.
    """
    return {
        f"inputs.parameters.{parameter.name}": _input(job, parameter) for parameter in job.template.inputs.parameters
    }


def _input(job: Job, parameter: Parameter) -> str:
    """The task's argument, else the template's own value.

    Its default also stands in for an output that is missing, if the argument is nothing else
    (docs/variables.md, "Outputs of Skipped and Omitted Nodes").
    """
    of_workflow = Scope(job.frame.base)
    for argument in job.task.arguments.parameters:
        if argument.name == parameter.name:
            try:
                return substitute(argument.value, job.scope)
            except Unresolved:
                if parameter.default is None or not is_one_reference(argument.value):
                    raise
                return substitute(parameter.default, of_workflow)
    assert parameter.given is not None  # noqa: S101 - parse asks for a value of each input
    return substitute(parameter.given, of_workflow)
