"""A cluster with Argo Workflows and our template, in process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.cluster.manifests import of_folder
from pipeline.settings.config import RunConfig, load
from pipeline.workflow.definition import workflow_template
from pipeline.workflow.parameters import arguments
from stages.parts.base.formats import quantized_formats
from stages.parts.cluster.api import Cluster
from tests.kubernetes import KubernetesServer, Outcome, WorkflowController
from tests.pipeline.argo.argo_bench import PLATFORM, Seen, connected, environment_of, namespace, with_kserve

Slipway = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    with KubernetesServer() as server:
        yield server


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "test.yaml"
    data = load(chosen={"platform": PLATFORM}).platform.model_dump(mode="json", exclude={"name"})
    path.write_text(yaml.safe_dump(data | {"namespace": "default", "retries": {"limit": 2, "backoff_s": 1}}))
    return load(chosen={"platform": str(path)})


@pytest.fixture
def platform() -> RunConfig:
    """The settings of the platform as it is."""
    return load(chosen={"platform": PLATFORM})


@pytest.fixture
def there(server: KubernetesServer, cluster: Cluster, platform: RunConfig) -> Cluster:
    """The platform's cluster, with Argo's own namespace as its installation leaves it."""
    assert platform.platform.cluster
    server.put(namespace(platform.platform.cluster.controller_namespace))
    return Cluster(cluster.login, platform.platform.namespace)


@pytest.fixture
def installed(server: KubernetesServer, config: RunConfig) -> KubernetesServer:
    server.put(workflow_template(config))
    with_kserve(server)
    for body in of_folder("kserve", config.platform.namespace):
        server.put(body)
    return server


@pytest.fixture
def argo(installed: KubernetesServer) -> WorkflowController:
    """Everything succeeds, unless the test changes the script; of the variants only those of the demo are made."""
    made = dict.fromkeys(quantized_formats(), "false") | {"awq": "true", "gptq": "true", "fetch": "false"}
    checked = Outcome(outputs={**made, "variants": "fp16,awq,gptq"})
    selected, deployed = Outcome(outputs={"promotion": "promoted"}), Outcome(outputs={"compared": "true"})
    return WorkflowController(installed, {"check": [checked], "select": [selected], "deploy": [deployed]})


@pytest.fixture
def cluster(server: KubernetesServer, tmp_path: Path) -> Cluster:
    return connected(server, tmp_path, patience_s=30.0)


@pytest.fixture
def given(config: RunConfig) -> dict[str, str]:
    """The arguments of a run of org/name."""
    return arguments(config, "org/name", "main", serve=True)


@pytest.fixture
def slipway(server: KubernetesServer, config: RunConfig, tmp_path: Path) -> Slipway:
    """The command line as a process of its own, with a kubeconfig for the server and the test's platform."""
    return lambda *arguments, **environment: subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        env=environment_of(server, tmp_path) | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


@pytest.fixture
def seen() -> Seen:
    return Seen()
