"""A release that travels as an OCI image, served by KServe on the cluster of KUBECONFIG (``make test-cluster``).

SLIPWAY_TEST_LOAD names a program, called with an archive and a name, that brings the image to the nodes under that name
with a shell in it, as docs/one-machine.md says.
"""

from __future__ import annotations

import copy
import os
import subprocess
from typing import Any

import httpx
import pytest

from stages.parts.base.store import directory_name
from stages.parts.cluster.kinds import PODS
from stages.rollout.kserve.objects import ENDPOINT, ISVCS, RELEASE, REVISION
from tests import samples
from tests.campaign import kills, steps
from tests.cluster.conftest import Place, Tell
from tests.cluster.test_conformance import kserve, succeeded
from tests.demo import MODEL

LOAD = "SLIPWAY_TEST_LOAD"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.e2e,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs a cluster: set KUBECONFIG"),
    pytest.mark.skipif(LOAD not in os.environ, reason=f"set {LOAD} to a program that brings images to the nodes"),
    pytest.mark.usefixtures("kserve"),
]
__all__ = ["kserve"]
IMAGE = "localhost/slipway-release-modelcar:1"
AS_MODELCAR = {
    "runAsGroup": 0,
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""The server reads the modelcar's files through its process, for which the kernel demands the same user and group."""
OF_POD = "serving.kserve.io/inferenceservice"


@pytest.fixture(scope="module")
def release(place: Place, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A release of a store on this machine, on the nodes as an image; the cluster serves one of the same model."""
    folder = tmp_path_factory.mktemp("travels").resolve()
    with steps.hub() as hub:
        published = next(
            each for each in kills.undisturbed(folder, hub, ("fp16",)) if each.step.name == "acquire another"
        )
    archive = folder / "release.tar"
    given = (samples.MODEL, str(archive), "--release", "1", "--store", str(published.before))
    ended = place.call("release", "export", *given, environment=dict(os.environ))
    assert ended.returncode == 0, ended.stderr
    subprocess.run([os.environ[LOAD], str(archive), IMAGE], check=True)
    place.answer("install")
    succeeded(place.ended(place.submit(MODEL, "--set", "optimize.variants=[fp16]")))
    (name,) = [path.name for path in (published.before / directory_name(samples.MODEL) / "releases").iterdir()]
    return name


def served_from(place: Place, name: str, uri: str) -> dict[str, Any]:
    """Serve from the image as KServe does, with the settings of what Slipway serves."""
    body = copy.deepcopy(place.cluster.list(ISVCS)[0][0])
    predictor = body["spec"]["predictor"]
    predictor["model"] |= {"storageUri": uri, "securityContext": AS_MODELCAR}
    predictor["labels"] = {
        key: text for key, text in predictor["labels"].items() if key not in (ENDPOINT, RELEASE, REVISION)
    }
    metadata = {"name": name, "namespace": place.namespace, "annotations": body["metadata"]["annotations"]}
    fresh = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata}
    return place.cluster.apply(ISVCS, fresh | {"spec": {"predictor": predictor}})


def ready(place: Place, name: str) -> dict[str, Any] | None:
    for pod in place.cluster.list(PODS, labels=f"{OF_POD}={name}")[0]:
        if all(status["ready"] for status in pod["status"].get("containerStatuses", [{"ready": False}])):
            return dict(pod)
    return None


def test_kserve_serves_a_release_from_its_image(place: Place, tell: Tell, release: str) -> None:
    served_from(place, "modelcar", f"oci://{IMAGE}")
    pod = place.until(lambda: ready(place, "modelcar"), 600)
    told = {"model": MODEL, "prompt": "What is a list?", "max_tokens": 8}
    answer = httpx.post(f"http://{pod['status']['podIP']}:8080/v1/completions", json=told, timeout=120)
    assert answer.is_success, answer.text
    assert answer.json()["choices"]
    place.cluster.delete(ISVCS, "modelcar")
    tell("a release from an image, as a modelcar", f"{release} answers")
