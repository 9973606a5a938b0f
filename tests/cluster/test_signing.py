"""Signed releases on the cluster of KUBECONFIG (``make test-cluster``): what was altered, is signed with another key
or not at all is not loaded. It needs KServe."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from stages.parts.base.errors import NotTrusted
from stages.parts.base.store import directory_name
from stages.parts.cluster.kinds import CONFIG_MAPS, PODS, SECRETS
from stages.rollout.kserve.objects import ENDPOINT, RELEASE, SIGNING, TRUSTED_KEY, USER, VERIFIER, endpoint_name
from tests.cluster.conftest import Place, Tell
from tests.cluster.test_conformance import kserve, succeeded
from tests.demo import DEMO
from tests.stages.parts.releases.test_signing import key_pair

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.e2e,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs a cluster: set KUBECONFIG"),
    pytest.mark.usefixtures("kserve"),
]
__all__ = ["kserve"]
SIGNED: Final = "slipway/demo-signed"
SECRET: Final = "slipway-signing-key"
FLIP: Final = """
import os, sys
os.chmod(sys.argv[1], 0o644)
with open(sys.argv[1], "r+b") as file:
    file.seek(-1, 2)
    last = file.read(1)[0]
    file.seek(-1, 2)
    file.write(bytes([last ^ 1]))
"""


@pytest.fixture(scope="module")
def release(place: Place) -> Iterator[str]:
    """A signed release that is served, where signatures are required."""
    private, public = key_pair(place.folder, "signing")
    place.commits[SIGNED] = place.hub.add_repo(SIGNED, DEMO / "model")
    data = {"key": base64.b64encode(private.read_bytes()).decode()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, "namespace": place.namespace}}
    place.cluster.apply(SECRETS, secret | {"data": data})
    before = (place.folder / "config.yaml").read_text()
    config = yaml.safe_load(before)
    config["serving"] |= {"signing": "require", "verification_key": str(public)}
    (place.folder / "config.yaml").write_text(yaml.safe_dump(config))
    place.answer("install")
    run = place.ended(place.submit(SIGNED, "--set", "optimize.variants=[fp16]"))
    succeeded(run)
    yield str(run.report().document["release"])
    (place.folder / "config.yaml").write_text(before)
    place.cluster.delete(SECRETS, SECRET)
    place.answer("install")


def pods(place: Place, release: str) -> list[dict[str, Any]]:
    labels = f"{RELEASE}={release},{ENDPOINT}={endpoint_name(SIGNED, place.namespace)}"
    return place.cluster.list(PODS, labels=labels)[0]


def restarted(place: Place, release: str) -> tuple[int, str]:
    """Start the release's pod anew; return how its verifier ended, and with which message."""
    before = {pod["metadata"]["uid"] for pod in pods(place, release)}
    for pod in pods(place, release):
        place.cluster.delete(PODS, pod["metadata"]["name"])

    def ended() -> dict[str, Any] | None:
        for pod in pods(place, release):
            for status in pod["status"].get("initContainerStatuses", []):
                state = status["state"].get("terminated") or status.get("lastState", {}).get("terminated")
                if pod["metadata"]["uid"] not in before and status["name"] == VERIFIER and state:
                    (server,) = pod["status"]["containerStatuses"]
                    assert state["exitCode"] == 0 or (server["started"], server["restartCount"]) == (False, 0)
                    return dict(state)
        return None

    state = place.until(ended, 300)
    return state["exitCode"], state.get("message", "")


def change(place: Place, *command: str) -> None:
    """Run a command where the volume is."""
    container = {
        "name": "change",
        "image": place.image("slim"),
        "command": list(command),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
    claim = {"name": "models", "persistentVolumeClaim": {"claimName": "slipway-models"}}
    spec = {"containers": [container], "volumes": [claim], "restartPolicy": "Never"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "change", "namespace": place.namespace}}
    place.cluster.apply(PODS, pod | {"spec": spec})

    def phase() -> str | None:
        return {"Succeeded": "ended", "Failed": "failed"}.get(place.cluster.get(PODS, "change")["status"]["phase"])

    assert place.until(phase, 120) == "ended"
    place.cluster.delete(PODS, "change")
    place.until(lambda: "change" not in [pod["metadata"]["name"] for pod in place.cluster.list(PODS)[0]], 60)


def test_a_release_that_is_not_what_was_signed_is_not_loaded(place: Place, tell: Tell, release: str) -> None:
    folder = f"/models/{directory_name(SIGNED)}/releases/{release}"
    weights = f"{folder}/{sorted(path.name for path in (DEMO / 'model').glob('*.safetensors'))[0]}"
    refused = partial(restarted, place, release)
    assert refused()[0] == 0

    change(place, "python", "-c", FLIP, weights)
    altered = refused()
    change(place, "python", "-c", FLIP, weights)

    change(place, "mv", f"{folder}/model.sig", f"{folder}/model.away")
    unsigned = refused()
    change(place, "mv", f"{folder}/model.away", f"{folder}/model.sig")

    _, foreign_key = key_pair(place.folder, "foreign")
    data = {TRUSTED_KEY.name: Path(foreign_key).read_text()}
    place.cluster.merge(CONFIG_MAPS, SIGNING, {"data": data})
    foreign = refused()
    place.answer("install", "--force")

    assert [code for code, _ in (altered, unsigned, foreign)] == [NotTrusted.exit_code] * 3, (
        altered,
        unsigned,
        foreign,
    )
    assert refused()[0] == 0
    for tried, (code, message) in {"altered": altered, "unsigned": unsigned, "of another key": foreign}.items():
        tell(f"a release that is {tried}", f"not loaded, exit code {code}: {message.strip().splitlines()[0]}")
