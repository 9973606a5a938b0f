"""Runs a configuration on this machine: compiles the definition, executes it, and reports the result."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Group

from pipeline.local.folder import WORKFLOW, RunFolders, read_run
from pipeline.local.resources import MachineResources
from pipeline.local.runs import LocalRun
from pipeline.runs.engine import Printout, choose_run
from pipeline.runs.progress import observer_for
from pipeline.runs.state import failure
from pipeline.runs.tables import score_table
from pipeline.settings.config import RunConfig
from pipeline.settings.platform import STORE_MOUNT
from pipeline.workflow.parameters import allowing_incomplete, arguments, hub_here, resolve_key
from stages.parts.base.errors import MissingRun
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.model.name import ModelName

RUN_ID: Final = re.compile(r"^\d{8}-\d{6}-[0-9a-f]{4}$")
ENGINE_STATE: Final = ".engine"
"""The folder of memoized results and locks in the store, shared by all its runs."""


@dataclass(frozen=True)
class LocalEngine:
    """The engine of a store on this machine; see ``pipeline.runs.engine.PipelineEngine``."""

    store: Path

    @property
    def no_runs(self) -> str:
        return f"no runs in {self.store}; start one with: slipway run MODEL"

    def runs(self) -> list[LocalRun]:
        runs = []
        for path in self.store.glob("*/runs/*"):
            if RUN_ID.match(path.name):
                with contextlib.suppress(MissingRun):  # killed before it wrote anything
                    runs.append(LocalRun(path, read_run(path)))
        return sorted(runs, key=lambda run: run.id, reverse=True)

    def find(self, name: str) -> LocalRun:
        return choose_run(name, {run.id: run for run in self.runs()}, str(self.store))

    def start(
        self, config: RunConfig, model: str, revision: str, *, serve: bool, refresh: bool = False, force: bool = False
    ) -> Printout:
        del force  # runs of one model wait for each other
        from pipeline.planning.refusal import decide_before

        name = ModelName.parse(model)
        store = name.store(self.store)
        parameters = arguments(config, str(name.directory or name.source), revision, serve=serve, refresh=refresh)
        if serve:
            _check_port(store, config.serving)
        decide_before(config, name, revision, store)
        return _execute(render(config), parameters, store)

    def retry(self, name: str, *, allow_incomplete: bool = False) -> Printout:
        executed = json.loads((self.find(name).path / WORKFLOW).read_text(encoding="utf-8"))
        parameters = executed["arguments"]
        if {"model", "revision"} <= parameters.keys():  # a local directory may have changed since
            parameters["resolve-key"] = resolve_key(parameters["model"], parameters["revision"], hub=hub_here())
        if allow_incomplete:
            parameters["optimize"] = allowing_incomplete(parameters["optimize"])
        store = ModelName.parse(parameters["model"]).store(self.store)
        if parameters.get("serve") == "true":
            _check_port(store, AskedServing.model_validate_json(parameters["serving"]))
        return _execute(executed["manifest"], parameters, store)


def render(config: RunConfig) -> dict[str, Any]:
    """Return the WorkflowTemplate as it would be executed on a machine with this machine's cores and GPUs."""
    from pipeline.workflow.definition import workflow_template

    machine = MachineResources.of_this_machine()
    platform = config.platform.on(cores=int(machine.cores), gpus=len(machine.gpus))
    return workflow_template(config.model_copy(update={"platform": platform}))


def _execute(manifest: dict[str, Any], parameters: dict[str, str], store: ModelStore) -> Printout:
    """Run a workflow; describe a run that succeeded: the scores, the reason, and where everything is."""
    from pipeline.local.execution import execute
    from stages.parts.base.program import outcomes
    from stages.parts.endpoint.endpoint import endpoint

    # Ids sort by start; four random digits distinguish runs that start in the same second.
    run_id = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = store.run(run_id)
    state = execute(
        manifest,
        arguments=parameters,
        name=run_id,
        folders=RunFolders({STORE_MOUNT: store.root}, folder, store.root / ENGINE_STATE),
        capacity=MachineResources.of_this_machine(),
        observer=observer_for(sys.stderr, folder),
    )
    run = LocalRun(folder, state)
    if state.phase != "Succeeded" or (decision := run.decision) is None:
        raise failure(state)
    serving = endpoint(store) if parameters.get("serve") == "true" else None
    making = [outcome for outcome in outcomes(run.path) if outcome.stage not in ("resolve", "check")]
    reused = all(outcome.result == "reused" for outcome in making)
    release = store.releases / decision.release
    document = {
        "run": run.id,
        "model": run.state.model,
        "phase": run.state.phase,
        "reused": reused,
        "decision": decision.model_dump(mode="json"),
        "report": str(run.page),
        "release": str(release),
        "endpoint": serving and serving.url,
    }
    places = [f"report    {run.page}", f"release   {release}"]
    if serving:
        places += [f"endpoint  {serving.url}/v1 serves {serving.model}"]
        places += [f"          stop it: slipway serve {run.state.model} --stop"]
    lead = ["Nothing had changed: every result was reused.", ""] if reused else []
    return Printout(document, Group(*lead, score_table(decision), "", decision.reason, *decision.notes, "", *places))


def _check_port(store: ModelStore, serving: AskedServing) -> None:
    """Check the port now rather than after an hour of work. The model's own endpoint may hold it."""
    from stages.parts.endpoint.endpoint import endpoint
    from stages.parts.vllm.server import reserved_port

    if endpoint(store) is None:
        with reserved_port(serving.host, serving.port):
            pass
