"""The cluster of KUBECONFIG, with a namespace of its own that is removed at the end, and a Hub that its pods reach.

SLIPWAY_TEST_IMAGE names the images (default: ``localhost/slipway-{family}:VERSION``), which must be on the nodes or
where they can pull from. SLIPWAY_TEST_ADDRESS is this machine's address as pods see it (default: the one from which it
reaches the first node). SLIPWAY_TEST_NAMESPACE names a namespace that is kept at the end, and used again.
SLIPWAY_TEST_NATS is the address of a NATS server with JetStream, where Argo Events is to use one. SLIPWAY_TEST_UPGRADE
names a program that installs newer versions of Argo or KServe.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from pipeline.argo.runs import ClusterRun, find
from stages.parts.base.program import version
from stages.parts.cluster.api import Absent, Cluster, connect
from stages.parts.cluster.kinds import NAMESPACES, NODES, Kind, Object
from tests.demo import DEMO, MODEL
from tests.hub.server import HubServer

TABLE: Final = pytest.StashKey[list[tuple[str, str]]]()
VERSIONS: Final = pytest.StashKey[str]()
OTHER_MODEL: Final = "slipway/demo-other"
RUN_LIMIT_S: Final = 1800.0
Tell = Callable[[str, str], None]

LIMITS: Final = {"ttft_ratio": 2, "ttft_slack_ms": 100, "tpot_ratio": 2, "tpot_slack_ms": 5}
"""Of a rollout's latencies, which vary because both releases share two cores with everything else. All other limits,
times and counts are the defaults."""
CONFIG: Final[dict[str, dict[str, Any]]] = {
    "optimize": {"variants": ["fp16", "int8"]},
    "workload": {
        "budget_minutes": 1,  # spent in the two blocks that are measured in any case
        "prompt_tokens": 64,
        "output_tokens": 32,
        "concurrency": 2,
        "warmup_requests": 2,
        "slo": {"ttft_ms": 10000, "tpot_ms": 1000},
        "steady_s": 4,
        "ramp_s": 0.5,
        "trial_s": 1,
        "trials": 3,
        "quality_tasks": ["perplexity_prose"],
        "divergence_text": "python-docs",
    },
    "profile": {"task_loss": 0.3, "constraints": {"quality_recovery": {"min": 0.5}}},
    "serving": {"kv_cache_mib": 64, "enforce_eager": True, "max_model_len": 512},
    "rollout": LIMITS,
    "kserve": {"gpu": None, "cpu": "200m", "memory": "4Gi"},
}
"""Small enough for a node of two cores."""


@dataclass
class Place:
    """The command line, for one namespace of the cluster."""

    cluster: Cluster
    folder: Path
    hub: HubServer
    new: bool
    """Whether the namespace is made by the first install."""
    images: str
    """Their names, with ``{family}`` for the part that differs."""
    commits: dict[str, str]
    """The commit of each model on the Hub."""

    @property
    def namespace(self) -> str:
        return self.cluster.namespace

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "SLIPWAY_ENGINE": "argo",
            "SLIPWAY_PLATFORM": str(self.folder / "platform.yaml"),
            "SLIPWAY_CONFIG": str(self.folder / "config.yaml"),
        }

    def image(self, family: str) -> str:
        return self.images.replace("{family}", family)

    def call(self, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command, variables = [sys.executable, "-m", "pipeline", *arguments], environment or self.environment
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=RUN_LIMIT_S)

    def answer(self, *arguments: str, environment: dict[str, str] | None = None) -> Any:
        """What a command prints with --json.

        Raises:
            AssertionError: it failed.
        """
        ended = self.call(*arguments, "--json", environment=environment)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    def submit(self, *arguments: str) -> str:
        """Submit a run without following it; return its id."""
        return str(self.answer("run", *arguments, "--no-follow")["run"])

    def run(self, name: str) -> ClusterRun:
        return find(self.cluster, name)

    def until(self, what: Callable[[], Any], limit_s: float = RUN_LIMIT_S) -> Any:
        """Wait until *what* returns something true, and return that."""
        deadline = time.monotonic() + limit_s
        while not (found := what()):
            assert time.monotonic() < deadline, f"not within {limit_s:.0f} s"
            time.sleep(1)
        return found

    def waits(self, name: str, task: str) -> bool:
        """Whether a task waits for a person."""
        return any(each.name == task and each.phase == "Running" for each in self.run(name).state.nodes)

    def ended(self, name: str) -> ClusterRun:
        self.until(lambda: self.run(name).state.phase not in ("Pending", "Running"))
        return self.run(name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of ``make test-cluster`` is the last thing that it prints."""
    if rows := config.stash.get(TABLE, []):
        terminalreporter.section("for docs")
        lines = [("tried", "seen"), ("---", "---"), *rows]
        said = "\n".join(f"| {tried} | {seen} |" for tried, seen in lines)
        terminalreporter.write_line(f"{config.stash.get(VERSIONS, '')}.\n\n{said}")


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """Add a row to the table."""
    rows = request.config.stash.setdefault(TABLE, [])
    return lambda tried, seen: rows.append((tried, seen.partition("\n")[0]))


@pytest.fixture(scope="session")
def address() -> str:
    """This machine's address as pods see it."""
    if given := os.environ.get("SLIPWAY_TEST_ADDRESS"):
        return given
    node: Object = connect().list(NODES)[0][0]
    internal = next(each["address"] for each in node["status"]["addresses"] if each["type"] == "InternalIP")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((internal, 1))
        return str(asked.getsockname()[0])


@pytest.fixture(scope="session")
def place(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    kept, folder = os.environ.get("SLIPWAY_TEST_NAMESPACE"), tmp_path_factory.mktemp("cluster")
    namespace = kept or f"slipway-test-{uuid.uuid4().hex[:6]}"
    image = os.environ.get("SLIPWAY_TEST_IMAGE", f"localhost/slipway-{{family}}:{version()}")
    with HubServer(address=address) as hub:
        commits = {name: hub.add_repo(name, DEMO / "model") for name in (MODEL, OTHER_MODEL)}
        platform = {
            "extends": "kind",
            "namespace": namespace,
            "image": image,
            "retries": {"limit": 2, "backoff_s": 5},
            "cluster": {
                "storage": {"storage_class": None, "access": "ReadWriteOnce", "size": "5Gi"},
                "environment": {"HF_ENDPOINT": hub.url},
                "hub_ports": [hub.port],
            },
            "stages": {"evaluate": {"cpu": "1", "memory": "auto", "shm": "auto"}},
        }
        serves = {"image": image.replace("{family}", "evaluate-cpu"), "namespace": namespace}
        (folder / "platform.yaml").write_text(yaml.safe_dump(platform))
        (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"kserve": CONFIG["kserve"] | serves}))
        made = Place(connect(namespace=namespace), folder, hub, not kept, image, commits)
        try:
            yield made
        finally:
            if not kept:
                gone(made.cluster)


def gone(cluster: Cluster) -> None:
    """Remove the namespace, whatever a failed test has left in it."""
    try:
        cluster.delete(NAMESPACES, cluster.namespace)
    except Absent:
        return


def there(cluster: Cluster, kind: Kind, name: str) -> bool:
    """Whether the object is there."""
    try:
        return bool(cluster.get(kind, name))
    except Absent:
        return False
