"""Runs a configuration on this machine: compiles the definition, executes it, and reports the result."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.local.resources import Capacity
from pipeline.local.runs import Run, new_id, read_workflow
from pipeline.runs.state import failure
from stages.parts.base.errors import ConfigError
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore, full_disk_as_error
from stages.parts.model.name import ModelName
from stages.parts.records.production import Production

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig
    from stages.parts.endpoint.endpoint import Endpoint

ENGINE_STATE: Final = ".engine"
"""The folder of memoized results and locks in the store, shared by all its runs."""


@dataclass(frozen=True)
class Finished:
    """A run that succeeded: the winner is published and, if that was asked for, served."""

    run: Run
    store: ModelStore
    decision: Production
    endpoint: Endpoint | None

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "run": self.run.id,
            "model": self.run.model,
            "phase": self.run.state.phase,
            "reused": self.reused(),
            "decision": self.decision.model_dump(mode="json"),
            "report": str(self.run.path / "report.html"),
            "release": str(self.store.releases / self.decision.release),
            "endpoint": self.endpoint and self.endpoint.url,
        }

    def reused(self) -> bool:
        """Whether every stage that makes something reused what was there."""
        from stages.parts.base.program import outcomes

        return all(
            outcome.result == "reused"
            for outcome in outcomes(self.run.path)
            if outcome.stage not in ("resolve", "check")
        )

    def summary(self) -> Any:
        """The result for a terminal: the score table, the reason, and where everything is."""
        from rich.console import Group

        from pipeline.runs.tables import score_table

        where = [f"report    {self.run.path / 'report.html'}"]
        where += [f"release   {self.store.releases / self.decision.release}"]
        if self.endpoint:
            where += [f"endpoint  {self.endpoint.url}/v1 serves {self.endpoint.model}"]
            where += [f"          stop it: slipway serve {self.run.model} --stop"]
        again = ["Nothing had changed: every result was reused.", ""] if self.reused() else []
        return Group(*again, score_table(self.decision), "", self.decision.reason, *self.decision.notes, "", *where)


def run(config: RunConfig, model: str, revision: str, *, store: Path, serve: bool, refresh: bool) -> Finished:
    """Run the pipeline here and wait for its end.

    Raises:
        ConfigError: the model's name, the settings or the store can't be used; nothing was started.
        PortInUse: the endpoint could not be served at the end; nothing was started.
        RunFailed: with the exit code of the task that failed first.
        Interrupted: by Ctrl-C; everything that was started has ended.
    """
    from pipeline.planning.refusal import decide_before
    from pipeline.workflow.parameters import arguments

    name = ModelName.parse(model)
    given = arguments(config, str(name.directory or model), revision, serve=serve, refresh=refresh)
    if serve:
        _check_port(ModelStore(store, name.id), config.serving)
    decide_before(config, given["model"], revision, store)
    return _execute(render(config), given, store)


def again(run: Run, store: Path, *, allow_incomplete: bool = False) -> Finished:
    """Run the workflow of *run* again with the same arguments; finished work is reused.

    Args:
        allow_incomplete: go on without a variant, whatever the run did.

    Raises: as ``run``.
    """
    from pipeline.workflow.parameters import allowing_incomplete, hub_here, resolve_key

    kept = read_workflow(run.path)
    given = kept["arguments"]
    if {"model", "revision"} <= given.keys():  # a local directory may have changed since
        given["resolve-key"] = resolve_key(given["model"], given["revision"], hub=hub_here())
    if allow_incomplete:
        given["optimize"] = allowing_incomplete(given["optimize"])
    if given.get("serve") == "true":
        place = ModelStore(store, ModelName.parse(given["model"]).id)
        _check_port(place, AskedServing.model_validate_json(given["serving"]))
    return _execute(kept["manifest"], given, store)


def _execute(manifest: dict[str, Any], given: dict[str, str], store: Path) -> Finished:
    from pipeline.local.engine import execute
    from pipeline.local.folder import RunFolders
    from pipeline.runs.progress import observer_for
    from pipeline.settings.platform import STORE_MOUNT

    place = ModelStore(store, ModelName.parse(given["model"]).id)
    run_id = new_id(datetime.now().astimezone())
    _make_usable(store)
    state = execute(
        manifest,
        arguments=given,
        name=run_id,
        folders=RunFolders({STORE_MOUNT: store}, place.run(run_id), store / ENGINE_STATE),
        capacity=Capacity.of_this_machine(),
        observer=observer_for(sys.stderr, place.run(run_id)),
    )
    finished = Run(place.run(run_id), state)
    report = finished.report()
    if state.phase != "Succeeded" or report is None or report.decision is None:
        raise failure(state)
    return Finished(finished, place, report.decision, _endpoint(place) if given.get("serve") == "true" else None)


def render(config: RunConfig) -> dict[str, Any]:
    """The WorkflowTemplate as it would be executed."""
    from pipeline.workflow.definition import workflow_template

    capacity = Capacity.of_this_machine()
    platform = config.platform.on(cores=int(capacity.cores), gpus=len(capacity.gpus))
    return workflow_template(config.model_copy(update={"platform": platform}))


def _endpoint(store: ModelStore) -> Endpoint | None:
    from stages.parts.endpoint.endpoint import endpoint

    return endpoint(store)


def _check_port(store: ModelStore, serving: AskedServing) -> None:
    """Check the port now rather than after an hour of work. The model's own endpoint may hold it.

    Raises:
        PortInUse: another program listens on the port.
    """
    from stages.parts.endpoint.endpoint import endpoint
    from stages.parts.vllm.server import reserved_port

    if endpoint(store) is None:
        with reserved_port(serving.host, serving.port):
            pass


def _make_usable(store: Path) -> None:
    """Create the store if needed.

    Raises:
        ConfigError: the store can't be created or written.
    """
    try:
        with full_disk_as_error(store):
            store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot use {store} as the store: {error.strerror}", hint="choose another with --store"
        ) from error
    if not os.access(store, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to the store {store}", hint="choose another with --store")
