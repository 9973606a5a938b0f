"""The overhead of the orchestration: the demo's pipeline by ``slipway run``, compared with its programs run by hand.

    make bench

Prints seconds and ratios of one session on one machine; only the ratios are valid for other machines. "By hand" means
the same commands in a fresh store, one after another.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from pipeline.local.engine import LocalEngine
from pipeline.runs.engine import LATEST
from pipeline.settings.config import RunConfig, load
from pipeline.workflow.parameters import arguments
from tests.demo import DEMO, MODEL
from tests.hub.server import HubServer

CONFIG: Final = DEMO / "slipway.yaml"
STARTS: Final = 7


def main() -> None:
    with HubServer() as hub, tempfile.TemporaryDirectory(prefix="slipway-bench-") as folder:
        hub.add_repo(MODEL, DEMO / "model")
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        by_hand = run_by_hand(load(CONFIG), environment | {"SLIPWAY_STORE": f"{folder}/by-hand"})
        store = Path(folder, "by-slipway")
        first_s = run_by_slipway(environment, store)
        stages, engine = stages_of(store)
        repeated_s = run_by_slipway(environment, store)
        repeated_stages, repeated_engine = stages_of(store)
    print(f"{'stage':16}{'by hand s':>12}{'slipway s':>12}{'ratio':>8}")
    for name, seconds in by_hand.items():
        print(f"{name:16}{seconds:12.2f}{stages[name]:12.2f}{stages[name] / seconds:8.2f}")
    total = sum(by_hand.values())
    print(f"{'whole':16}{total:12.2f}{first_s:12.2f}{first_s / total:8.2f}")
    print(f"\nfirst run: the engine's own time, while no stage ran: {engine:.2f} s")
    print(f"repeated run, nothing changed: {repeated_s:.2f} s, of which stages {sum(repeated_stages.values()):.2f} s")
    print(f"repeated run: the engine's own time, while no stage ran: {repeated_engine:.2f} s")
    helps = [timed([sys.executable, "-m", "pipeline", "--help"], os.environ) for _ in range(STARTS)]
    bare = [timed([sys.executable, "-c", "import typer"], os.environ) for _ in range(STARTS)]
    ratio = statistics.median(helps) / statistics.median(bare)
    print(f"slipway --help: {statistics.median(helps):.2f} s, {ratio:.1f} times an empty program with typer")


def run_by_hand(config: RunConfig, environment: Mapping[str, str]) -> dict[str, float]:
    """Run the stage programs one after another; return the seconds of each by the task's name."""
    given = arguments(config, MODEL, "main", serve=False)
    model = ["--model", MODEL]
    steps = {"resolve": ["resolve", *model, "--revision", "main"]}
    commit = subprocess.run(stage(steps["resolve"]), env=environment, capture_output=True, text=True, check=True)
    steps["acquire"] = ["acquire", *model, "--revision", "main", "--commit", commit.stdout.strip()]
    steps["check"] = ["check", *model, "--settings", given["optimize"]]
    for variant in config.optimize.variants:
        steps[f"optimize-{variant}"] = ["optimize", *model, "--method", variant, "--settings", given["optimize"]]
    measured = ["--workload", given["workload"], "--serving", given["serving"]]
    steps["evaluate"] = ["evaluate", *model, "--variants", ",".join(config.optimize.variants), *measured]
    steps["select"] = ["select", *model, "--profile", given["profile"], "--optimize", given["optimize"]]
    return {name: timed(stage(step), environment) for name, step in steps.items()}


def run_by_slipway(environment: Mapping[str, str], store: Path) -> float:
    command = ["run", MODEL, "--config", str(CONFIG), "--store", str(store), "--no-serve"]
    return timed([sys.executable, "-m", "pipeline", *command], environment)


def stages_of(store: Path) -> tuple[dict[str, float], float]:
    """Return the seconds of each task of the latest run, and the seconds during which no task was running."""
    run = json.loads((LocalEngine(store).find(LATEST).path / "run.json").read_text())
    spans = {each["name"]: span(each) for each in run["nodes"] if each["started_at"] and each["finished_at"]}
    begin, end = span(run)
    busy, reached = 0.0, begin
    for start, stop in sorted(spans.values()):
        busy += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return {name: stop - start for name, (start, stop) in spans.items()}, end - begin - busy


def span(timed: Mapping[str, Any]) -> tuple[float, float]:
    return tuple(datetime.fromisoformat(timed[f"{end}_at"]).timestamp() for end in ("started", "finished"))  # type: ignore[return-value]


def stage(step: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", f"stages.{step[0]}", *step[1:]]


def timed(command: Sequence[str], environment: Mapping[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, env=dict(environment), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
