"""A task on its way: from references to values, to a call, to its attempts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.local import expressions, memo
from pipeline.local.attempt import Attempt, Call
from pipeline.local.manifest import Parameter, Task, Template, Volume
from pipeline.local.resources import Request, Share, request
from pipeline.local.state import Node
from pipeline.local.templates import Unresolved, substitute


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
    prepared: Prepared | None = None
    """From the moment on that its dependencies are met and its ``when`` holds."""
    running: Running | None = None
    locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    first_started: float = 0.0
    """As time.monotonic()."""
    not_before: float = 0.0
    """The end of a retry's backoff, as time.monotonic()."""

    @property
    def deadline(self) -> float:
        limit_s = self.template.active_deadline_seconds
        return self.running.since + limit_s if self.running and limit_s is not None else float("inf")

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
            case ["tasks", task, "status"] if task in self.jobs:
                return self.jobs[task].node.phase
            case ["tasks", task, "outputs", "parameters", name] if task in self.jobs:
                return self._output(self.jobs[task], name, reference)
        raise Unresolved(reference, "it is known only in the exit handler")

    def also(self, values: Mapping[str, str]) -> Scope:
        return replace(self, values={**self.values, **values})

    def _output(self, job: Job, name: str, reference: str) -> str:
        if name in job.node.outputs:
            return job.node.outputs[name]
        for output in job.template.outputs.parameters:
            if output.name == name and output.value_from.default is not None:
                return output.value_from.default
        raise Unresolved(reference, f"{job.task.name} is {job.node.phase}")


@dataclass(frozen=True)
class Prepared:
    """What a task does, with every reference resolved."""

    call: Call
    request: Request
    mutexes: tuple[str, ...]
    memo: Path | None

    @classmethod
    def of(
        cls,
        job: Job,
        scope: Scope,
        volumes: Mapping[str, Volume],
        mounts: Mapping[str, Path],
        memo_dir: Path,
    ) -> Prepared:
        """Raises: Unresolved, ConfigError: a reference without a value; a memo key that can't be one."""
        template, resources = job.template, job.template.program.resources
        inner = scope.also(_inputs(job, scope))
        memoize = template.memoize
        return cls(
            call=Call.of(template, volumes, mounts, inner),
            request=request(resources.requests, resources.limits),
            mutexes=tuple(substitute(mutex.name, inner) for mutex in template.synchronization.mutexes),
            memo=memo.path_of(memo_dir, memoize.cache.config_map.name, substitute(memoize.key, inner))
            if memoize
            else None,
        )


def skipped_by(when: str, scope: Scope) -> str:
    """The condition that says no, with its values; empty if it says yes or there is none.

    Raises:
        ConfigError: with its values it is no condition.
    """
    text = substitute(when, scope)
    if not text or expressions.decide(expressions.parse(text, expressions.WHEN), str):
        return ""
    return text


def _inputs(job: Job, scope: Scope) -> dict[str, str]:
    return {
        f"inputs.parameters.{parameter.name}": _input(job, parameter, scope)
        for parameter in job.template.inputs.parameters
    }


def _input(job: Job, parameter: Parameter, scope: Scope) -> str:
    """The task's argument, else the template's own value. A default also stands in for an output that is missing."""
    for argument in job.task.arguments.parameters:
        if argument.name == parameter.name:
            try:
                return substitute(argument.value, scope)
            except Unresolved:
                for default in (argument.default, parameter.default):
                    if default is not None:
                        return default
                raise
    assert parameter.given is not None  # noqa: S101 - parse asks for a value of each input
    return parameter.given
