"""``suspend`` templates: a task that waits for a person, or for a time.

As ``argo resume`` does on a cluster, ``resume`` lets the suspended tasks of a run go on. The request is a small file
in the run's folder, which the engine looks for and takes away.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.local.manifest import Template
from pipeline.local.state import WORKFLOW, Node, read_run, writable
from pipeline.local.workflow import parse
from stages.parts.base.errors import ConfigError, MissingRun, UnknownName
from stages.parts.base.store import write_json

REQUESTS: Final = "resume"
LOOK_S: Final = 0.2
"""How often the engine looks for requests while something is suspended."""
SUSPENDED: Final = "suspended"


class Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: tuple[str, ...]
    outputs: dict[str, str] = {}


def is_suspended(node: Node) -> bool:
    return node.kind == "Suspend" and node.phase == "Running"


def resume(run_dir: Path, task: str | None = None, outputs: Mapping[str, str] | None = None) -> list[str]:
    """Let suspended tasks of a run go on: *task*, or all. Returns their names; does not wait for them.

    Args:
        outputs: values for the outputs that the tasks' templates take from outside (``valueFrom.supplied``).

    Raises:
        MissingRun: there is no run, or it runs no more.
        UnknownName: *task* is not suspended, or an output is none that can be supplied.
        ConfigError: nothing is suspended, or an output without a default got no value.
    """
    state, given = read_run(run_dir), dict(outputs or {})
    if state.phase != "Running":
        raise MissingRun(
            f"run {state.name} does not run: it is {state.phase}", hint="only a running run can be resumed"
        )
    waiting = [node for node in state.nodes if is_suspended(node)]
    if not waiting:
        raise ConfigError(f"nothing in run {state.name} is suspended")
    if task is not None and task not in [node.name for node in waiting]:
        raise UnknownName("suspended task", task, [node.name for node in waiting])
    chosen = [node for node in waiting if task in (None, node.name)]
    _check(chosen, _templates(run_dir), given)
    request = Request(nodes=tuple(node.name for node in chosen), outputs=given)
    with writable(run_dir):
        (run_dir / REQUESTS).mkdir(exist_ok=True)
        write_json(run_dir / REQUESTS / f"{uuid.uuid4().hex}.json", request)
    return list(request.nodes)


def message(run: str, duration_s: float | None) -> str:
    """What a suspended task says."""
    for_how_long = "" if duration_s is None else f" for {duration_s:g} s"
    return f"{SUSPENDED}{for_how_long}; to go on: slipway resume {run}"


def requests(run_dir: Path) -> list[Request]:
    """Those made since the last look; they are taken away."""
    found = []
    for path in sorted((run_dir / REQUESTS).glob("*.json")):
        with contextlib.suppress(OSError, ValidationError):  # gone, or not ours
            found.append(Request.model_validate_json(path.read_bytes()))
        path.unlink(missing_ok=True)
    return found


def outputs_of(template: Template, supplied: Mapping[str, str]) -> dict[str, str]:
    """The task's outputs when it goes on: what was supplied, else the defaults.

    Raises:
        ConfigError: one has neither; Argo fails the node then, too (OverrideOutputParametersWithDefault).
    """
    given = {each.name: supplied.get(each.name, each.value_from.default) for each in template.outputs.parameters}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ConfigError(f"no value was given for {', '.join(missing)}", hint="pass it with --set NAME=VALUE")
    return {name: value for name, value in given.items() if value is not None}


def _templates(run_dir: Path) -> dict[str, Template]:
    kept: dict[str, Any] = json.loads((run_dir / WORKFLOW).read_bytes())
    return parse(kept["manifest"]).templates


def _check(chosen: list[Node], templates: Mapping[str, Template], given: Mapping[str, str]) -> None:
    known = {each.name for node in chosen for each in templates[node.template].outputs.parameters}
    for name in given:
        if name not in known:
            raise UnknownName("output of a suspended task", name, known)
    for node in chosen:
        outputs_of(templates[node.template], given)
