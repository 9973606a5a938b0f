"""A cluster's workflow on this machine: the local engine takes its volume for a folder, its scratch space for folders
of their own, and what only places pods for nothing. (The whole way, to a release: tests/test_end_to_end.py.)"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.local.engine import render
from pipeline.local.execution import execute
from pipeline.local.folder import RunFolders
from pipeline.local.resources import MachineResources
from pipeline.runs.progress import Lines
from pipeline.runs.state import RunState
from pipeline.settings.config import load
from pipeline.settings.platform import STORE_MOUNT
from pipeline.workflow.parameters import arguments
from stages.parts.base.store import ModelStore
from stages.parts.model.name import ModelName
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.variant import VARIANT, Variant

MODEL = str(Path(__file__).parents[1] / "demo" / "model")
UP_TO_EVALUATION = ("optimize.variants=[fp16]", "workload.quality_tasks=[no_such_task]")
"""The evaluation refuses a task that is not there before it starts a server."""


def run(platform: str, root: Path) -> tuple[ModelStore, RunState]:
    config = load(chosen={"platform": platform}, assignments=UP_TO_EVALUATION)
    store = ModelStore(root, ModelName.parse(MODEL).id)
    state = execute(
        render(config),
        arguments=arguments(config, MODEL, "main", serve=False),
        name="run-1",
        folders=RunFolders({STORE_MOUNT: root}, store.run("run-1"), root / ".engine"),
        capacity=MachineResources.of_this_machine(),
        observer=Lines(sys.stderr),
    )
    return store, state


def test_a_clusters_workflow_leaves_here_what_this_machines_own_does(tmp_path):
    for name in ("local", "kind"):
        (tmp_path / name).mkdir()
    (ours, ours_ended), (theirs, theirs_ended) = (run(name, tmp_path / name) for name in ("local", "kind"))
    for ended in (ours_ended, theirs_ended):
        assert ended.culprit == "evaluate"
        assert "unknown quality task 'no_such_task'" in ended.message
        phases = {node.name: node.phase for node in ended.nodes}
        assert {phases[name] for name in ("resolve", "acquire", "optimize-fp16", "onExit")} == {"Succeeded"}
    assert Acquired.read(theirs.base / ACQUIRED).digest == Acquired.read(ours.base / ACQUIRED).digest
    made = [Variant.read(store.optimized("fp16") / VARIANT) for store in (ours, theirs)]
    assert made[0].digest == made[1].digest
    assert (theirs.run("run-1") / "report.html").is_file()
