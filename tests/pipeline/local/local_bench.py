"""A bench: workflows written with Hera, whose tasks are small Python programs that meet in one shared folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, Final

from hera.workflows import (
    DAG,
    Container,
    EmptyDirVolume,
    Env,
    ExistingVolume,
    Parameter,
    RetryStrategy,
    Task,
    Workflow,
    WorkflowTemplate,
    models,
)

from pipeline.local.execution import execute
from pipeline.local.folder import RunFolders
from pipeline.local.resources import MachineResources
from pipeline.runs.progress import Lines
from pipeline.runs.state import RunState
from stages.parts.base.program import OUTPUTS_VARIABLE

REPOSITORY: Final = Path(__file__).parents[3]
DRIVER: Final = Path(__file__).with_name("driver.py")
STORE: Final = "/mnt/store"
OUTPUTS: Final = "/outputs"
PATIENCE_S: Final = 60.0
dag: Final = partial(DAG, fail_fast=False)
retries: Final = partial(RetryStrategy, retry_policy="Always")
PRELUDE: Final = """
import os, sys, time
store, outputs = os.environ["STORE"], os.environ["OUTPUTS"]
task = os.environ.get("TASK", "")
def write(name, text=""):
    with open(os.path.join(store, name), "w") as file:
        file.write(str(text))
def add(name, text):
    with open(os.path.join(store, name), "a") as file:
        file.write(str(text) + "\\n")
def fail(code, message, hint=""):
    import json
    with open(os.path.join(outputs, "failure.json"), "w") as file:
        json.dump({"message": message, "hint": hint, "exit_code": code}, file)
    sys.exit(code)
def output(name, text):
    with open(os.path.join(outputs, name), "w") as file:
        file.write(str(text))
def wait_for(*names):
    end = time.monotonic() + 60
    while not all(os.path.exists(os.path.join(store, name)) for name in names):
        if time.monotonic() > end:
            sys.exit("error: nobody wrote " + " ".join(names))
        time.sleep(0.005)
"""


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.store.mkdir()
        self.state_dir = folder / "state"
        self.capacity = MachineResources(cores=4, memory_bytes=8 << 30)
        self.progress = StringIO()
        self.runs = 0

    def workflow(self, **settings: Any) -> WorkflowTemplate:
        return WorkflowTemplate(**{"name": "bench", "entrypoint": "main", **settings})

    def program(
        self, name: str, code: str = "", *, outputs: Sequence[str | Parameter] = (), **settings: Any
    ) -> Container:
        """A container template that runs *code*, which may use what PRELUDE defines."""
        inputs = [Parameter(name=each) if isinstance(each, str) else each for each in settings.pop("inputs", [])]
        promised = [
            Parameter(name=each, value_from=models.ValueFrom(path=f"{OUTPUTS}/{each}"))
            if isinstance(each, str)
            else each
            for each in outputs
        ]
        return Container(
            name=name,
            image="none",
            command=["python", "-S", "-c"],
            args=[PRELUDE + code, *settings.pop("arguments", [])],
            env=[
                Env(name="STORE", value=STORE),
                Env(name="OUTPUTS", value=OUTPUTS),
                Env(name=OUTPUTS_VARIABLE, value=OUTPUTS),
                *settings.pop("env", []),
            ],
            volumes=[
                ExistingVolume(name="store", claim_name="store", mount_path=STORE),
                EmptyDirVolume(name="outputs", mount_path=OUTPUTS),
            ],
            inputs=inputs,
            outputs=promised,
            **settings,
        )

    def handler(self, code: str) -> Container:
        """The exit handler ``ending``: a dag whose one task ``report`` runs *code*, which is told how the run ended."""
        program = self.program("report", code, arguments=["{{workflow.status}}"])
        with dag(name="ending"):
            Task(name="report", template=program)
        return program

    @property
    def run_dir(self) -> Path:
        """The folder of the last run."""
        return self.folder / "runs" / f"run-{self.runs}"

    def run(
        self,
        workflow: Workflow | Mapping[str, Any],
        arguments: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> RunState:
        self.runs += 1
        return execute(
            workflow if isinstance(workflow, Mapping) else workflow.to_dict(),
            arguments=arguments or {},
            name=f"run-{self.runs}",
            folders=RunFolders({STORE: self.store}, self.run_dir, self.state_dir),
            capacity=self.capacity,
            observer=Lines(self.progress),
            environment=environment,
        )

    def start(self, workflow: Workflow, *, before: Sequence[str] = (), **settings: Any) -> subprocess.Popen[str]:
        """The same in a process of its own, whose exit code is the engine's."""
        self.runs += 1
        manifest = self.folder / f"manifest-{self.runs}.json"
        manifest.write_text(json.dumps(workflow.to_dict()))
        places = [manifest, self.store, self.run_dir, self.state_dir]
        command = [*before, sys.executable, str(DRIVER), *map(str, places)]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        settings = {"stderr": subprocess.PIPE, **settings}
        return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **settings)

    def until_failed(self, task: str) -> str:
        """Code that waits until the engine has noted, in its first run, that *task* failed."""
        state = self.folder / "runs" / "run-1" / "run.json"
        return f"""
import json
def phases():
    with open({str(state)!r}) as file:
        return {{each["name"]: each["phase"] for each in json.load(file)["nodes"]}}
while phases()[{task!r}] != "Failed":
    time.sleep(0.005)
"""

    def lines(self, name: str) -> list[str]:
        path = self.store / name
        return path.read_text().splitlines() if path.exists() else []

    def await_file(self, name: str) -> None:
        eventually(lambda: (self.store / name).exists(), f"{name} appears")


def eventually(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"waited {PATIENCE_S} s in vain until {what}"
        time.sleep(0.01)


def processes_with(marker: str) -> list[int]:
    """Every process with *marker* in its command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in words:
                found.append(int(entry.name))
    return found
