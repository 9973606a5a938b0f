"""The basics against a real cluster: KUBECONFIG names it; Argo Workflows and our template are installed there."""

from __future__ import annotations

import os
import uuid

import pytest

from pipeline.argo.follow import follow
from pipeline.argo.runs import ClusterRun, find, stop
from pipeline.argo.submission import submit, workflow
from pipeline.argo.template import installed
from stages.parts.base.errors import MissingRun
from stages.parts.cluster.api import Cluster, connect
from stages.parts.cluster.kinds import WORKFLOWS
from tests.pipeline.argo.argo_bench import Seen

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs a cluster: set KUBECONFIG"),
]


@pytest.fixture
def cluster() -> Cluster:
    """In the namespace of SLIPWAY_NAMESPACE, or the kubeconfig's."""
    return connect(namespace=os.environ.get("SLIPWAY_NAMESPACE"))


@pytest.fixture
def arguments(given: dict[str, str]) -> dict[str, str]:
    """The arguments of a run of a model that does not exist: acquiring it fails within seconds."""
    name = f"slipway-test/{uuid.uuid4().hex[:12]}"
    return given | {"model": name, "model-directory": name.replace("/", "--"), "resolve-key": uuid.uuid4().hex}


def test_the_api_server_accepts_what_is_submitted(cluster, arguments):
    assert installed(cluster, arguments)
    body = workflow("slipway-test-dry-run", arguments)
    made = cluster.request("POST", WORKFLOWS.path(cluster.namespace), query={"dryRun": "All"}, body=body)
    assert made["spec"]["workflowTemplateRef"] == {"name": "slipway"}


def test_a_run_is_submitted_once_and_followed_to_its_end(cluster, arguments, seen: Seen):
    submitted, new = submit(cluster, arguments)
    assert new
    name = submitted["metadata"]["name"]
    try:
        assert submit(cluster, arguments)[0]["metadata"]["name"] == name
        run = ClusterRun(follow(cluster, name, seen))
        assert run.state.phase in ("Failed", "Error")
        assert run.state.culprit == "resolve"
        assert stop(cluster, run) is False
    finally:
        cluster.delete(WORKFLOWS, name)
    with pytest.raises(MissingRun):
        find(cluster, name)
