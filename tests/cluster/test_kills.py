"""Kills on the cluster of KUBECONFIG (``make test-cluster``): pods of a run, Argo's controller, KServe's, pods that
serve, and the node's container runtime. After them the run ends well, and the store holds what its records say.

SLIPWAY_TEST_RUNTIME names a program that kills the container runtime of the node and starts it again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from pipeline.argo.runs import ClusterRun
from pipeline.argo.template import call_in_pod
from pipeline.settings.config import load
from stages.parts.cluster.kinds import PODS
from stages.rollout.kserve.objects import ENDPOINT, endpoint_name
from tests.cluster.conftest import TABLE, Place, Tell
from tests.cluster.test_conformance import Clients, kserve, succeeded
from tests.demo import DEMO, MODEL

RUNTIME = "SLIPWAY_TEST_RUNTIME"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.e2e,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs a cluster: set KUBECONFIG"),
    pytest.mark.usefixtures("kserve"),
]
__all__ = ["kserve"]
NODE_NAME: Final = "workflows.argoproj.io/node-name"
ANEW: Final = ("--set", "optimize.variants=[fp16]", "--set", "optimize.force_publish=true")
"""A release that is rolled out, whatever is in production."""
DRAW: Final = random.Random(20261128)
EVERY_S: Final = (8.0, 25.0)
"""Between two kills of a controller or of the container runtime, which may take longer to come back than that."""
CONTROLLERS: Final = {"Argo's controller": ("argo", "app=workflow-controller")} | {
    "KServe's controller": ("kserve", "control-plane=kserve-controller-manager")
}


@pytest.fixture(scope="module", autouse=True)
def killed(place: Place, request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """How often what was killed."""
    place.answer("install")
    counted: Counter[str] = Counter()
    yield counted
    rows = request.config.stash.setdefault(TABLE, [])
    rows.append(
        ("kills", ", ".join(f"{what} {count}" for what, count in counted.items()) + f"; in all {counted.total()}")
    )


class Pods:
    """Kills the pod of each task of a run once, at a random time after it began to run."""

    def __init__(self, place: Place, run: str, killed: Counter[str]) -> None:
        self.place, self.run, self.killed = place, run, killed
        self.due_s: dict[str, float] = {}
        self.names: dict[str, str] = {}

    def __call__(self) -> None:
        labels = f"workflows.argoproj.io/workflow={self.run}"
        for pod in self.place.cluster.list(PODS, labels=labels)[0]:
            task = pod["metadata"]["annotations"][NODE_NAME].split("(")[0].removeprefix(f"{self.run}.")
            if pod["status"].get("phase") != "Running" or task in self.names:
                continue
            at_s = self.due_s.setdefault(task, time.monotonic() + DRAW.uniform(0, 30 if "evaluate" in task else 4))
            if time.monotonic() >= at_s:
                self.names[task] = kill(self.place, pod)
                self.killed["a task's pod"] += 1


class Repeated:
    """Kills something each time that a random time has passed."""

    def __init__(self, what: str, act: Callable[[], Any], killed: Counter[str], most: int = 6) -> None:
        self.what, self.act, self.killed, self.left = what, act, killed, most
        self.due_s = time.monotonic() + DRAW.uniform(2, EVERY_S[0])

    def __call__(self) -> None:
        if self.left and time.monotonic() > self.due_s and self.act():
            self.killed[self.what] += 1
            self.left -= 1
            self.due_s = time.monotonic() + DRAW.uniform(*EVERY_S)


def kill(place: Place, pod: dict[str, Any]) -> str:
    name = str(pod["metadata"]["name"])
    place.cluster.delete(PODS, name, pod["metadata"]["namespace"], grace_s=0)
    return name


def one_of(place: Place, namespace: str, labels: str) -> Callable[[], bool]:
    """Kill a running pod of these, if there is one."""

    def act() -> bool:
        found = [pod for pod in place.cluster.list(PODS, namespace, labels=labels)[0] if is_running(pod)]
        if found:
            kill(place, DRAW.choice(found))
        return bool(found)

    return act


def is_running(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def ended(place: Place, run: str, *kills: Callable[[], None]) -> ClusterRun:
    """Kill until a run has ended."""

    def is_over() -> bool:
        for each in kills:
            each()
        return place.run(run).state.phase not in ("Pending", "Running")

    place.until(is_over)
    return place.run(run)


def right(place: Place, run: ClusterRun) -> None:
    """The run ended well, its decision follows from what is stored, and the store is whole."""
    succeeded(run)
    assert place.answer("verify-decision", run.id)["verified"]
    config = load(place.folder / "config.yaml", chosen={"platform": str(place.folder / "platform.yaml")})
    printed, status = call_in_pod(place.cluster, config, ("store", "check", "--json"))
    assert status == 0, printed
    assert not any(each["damaged"] for each in json.loads(printed)), printed


def another(place: Place, tmp_path: Path, text: str) -> str:
    """Another commit of the model, so that everything is made anew."""
    model = shutil.copytree(DEMO / "model", tmp_path / "model")
    (model / "README.md").write_text(f"# {text}\n")
    return place.hub.add_repo(MODEL, model, revision=text)


def told(clients: Clients) -> str:
    counts = Counter(clients.statuses)
    return f"{counts.pop(200)} answered" + "".join(f", {count} with {code}" for code, count in counts.items())


def test_a_run_whose_pods_are_all_killed_once_ends_well(place: Place, tell: Tell, killed: Counter[str]) -> None:
    name = place.submit(MODEL)
    run = ended(place, name, pods := Pods(place, name, killed))
    right(place, run)
    assert Clients(place).ask().is_success
    tell(
        "a run of which each task's pod is killed",
        f"{len(pods.names)} killed; {run.winner} after {run.state.seconds:.0f} s",
    )


def test_a_run_and_a_rollout_end_well_while_controllers_are_killed(
    place: Place, tell: Tell, killed: Counter[str], tmp_path: Path
) -> None:
    commit = another(place, tmp_path, "controllers")
    acts = [Repeated(what, one_of(place, *where), killed) for what, where in CONTROLLERS.items()]
    with Clients(place) as clients:
        run = ended(place, place.submit(MODEL, "--revision", commit, *ANEW), *acts)
        right(place, run)
    assert set(clients.statuses) == {200}, clients.statuses
    tell("controllers killed during a run and its rollout", f"{run.state.seconds:.0f} s; clients: {told(clients)}")


def test_a_rollout_ends_though_each_server_and_step_is_killed(
    place: Place, tell: Tell, killed: Counter[str], tmp_path: Path
) -> None:
    commit = another(place, tmp_path, "servers")
    stable = place.answer("rollout", "status", MODEL)["split"]["stable"]
    servers = Repeated(
        "a server's pod",
        one_of(place, place.namespace, f"{ENDPOINT}={endpoint_name(MODEL, place.namespace)}"),
        killed,
        most=3,
    )
    with Clients(place) as clients:
        name = place.submit(MODEL, "--revision", commit, *ANEW, "--set", "rollout.ready_timeout_s=600")
        run = ended(place, name, Pods(place, name, killed), servers)
        state = place.answer("rollout", "status", MODEL)
        assert state["rollout"]["state"] in ("promoted", "rolled back"), state
        assert (run.state.phase == "Succeeded") == (state["rollout"]["state"] == "promoted"), run.state.message
        serves = stable if state["rollout"]["state"] == "rolled back" else run.report().document["release"]
        assert state["split"]["stable"] == serves
        place.until(lambda: clients.statuses[-3:] == [200] * 3, 300)
    tell("servers and steps of a rollout killed under load", f"{state['rollout']['state']}; clients: {told(clients)}")


@pytest.mark.skipif(RUNTIME not in os.environ, reason=f"set {RUNTIME} to a program that kills the container runtime")
def test_a_run_and_its_clients_do_not_notice_that_the_container_runtime_is_killed(
    place: Place, tell: Tell, killed: Counter[str], tmp_path: Path
) -> None:
    commit = another(place, tmp_path, "runtime")

    def act() -> bool:
        subprocess.run([os.environ[RUNTIME]], check=True, capture_output=True)
        return True

    with Clients(place) as clients:
        name = place.submit(MODEL, "--revision", commit, *ANEW)
        run = ended(place, name, Repeated("the container runtime", act, killed))
        right(place, run)
    assert set(clients.statuses) == {200}, clients.statuses
    tell("the container runtime killed", f"{run.state.seconds:.0f} s; clients: {told(clients)}")
