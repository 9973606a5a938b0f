"""On KServe a release is verified before its weights are loaded, by an init container of its pods."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.manifests import documents_of
from pipeline.settings.config import kserve_settings, load
from stages.parts.base.errors import ConfigError, NotTrusted
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.cluster.kinds import Object
from stages.parts.releases.signing import SIGNATURE, sign
from stages.rollout.kserve.modes import MODES, mode_named
from stages.rollout.kserve.objects import SIGNING, TRUSTED_KEY, VERIFIER, KServeEndpoint
from stages.rollout.kserve.release_pods import _failure
from tests.serving import MODEL, REPOSITORY, publish, stand_in_variant
from tests.stages.parts.releases.test_signing import certify, key_pair


def rendered(store: ModelStore, release: str, mode: str, signing: Any) -> Object:
    """The specification of the pods of a release, as its service has it."""
    settings = kserve_settings(load(chosen={"platform": "gke"}))
    serving = Serving(signing=signing, verification_key="/home/user/signing.pub")
    body = mode_named(mode).render(KServeEndpoint(store, serving, settings, "slipway"), {release: 100})[0]
    pods: Object = body["spec"]["template" if mode == "llm" else "predictor"]
    return pods


def start(pods: Object, mounts: dict[str, Path], key: Path) -> subprocess.CompletedProcess[str]:
    """Run the very command of the init container, as its user would find what is mounted; nothing of this process's
    environment is there."""
    (container,) = pods["initContainers"]
    paths = {each["mountPath"]: str(mounts[each["name"]]) for each in container["volumeMounts"]}
    arguments = list(container["args"])
    for inside, outside in paths.items():
        arguments = [argument.replace(f"{inside}/{key.name}", str(key)) for argument in arguments]
        arguments = [outside if argument == inside else argument for argument in arguments]
    return subprocess.run(
        [sys.executable, *container["command"][1:], *arguments],
        env={"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_init_container_lets_only_a_signed_release_be_loaded(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store", MODEL)
    release = publish(store, 1, stand_in_variant(store, "fp16"))
    folder = store.releases / release
    private, public = key_pair(tmp_path, TRUSTED_KEY.stem)
    required, warned = (rendered(store, release, "standard", signing) for signing in ("require", "warn"))
    mounts = {VERIFIER: folder, SIGNING: tmp_path}
    unsigned = start(required, mounts, public)
    assert unsigned.returncode == NotTrusted.exit_code, unsigned.stderr
    assert f"{release} is not signed" in unsigned.stderr
    sign(folder, private)
    assert start(required, mounts, public).returncode == 0
    (folder / "model.safetensors").unlink()  # it is shared with the variant
    (folder / "model.safetensors").write_bytes(b"Weights")
    altered = start(required, mounts, public)
    assert altered.returncode == NotTrusted.exit_code
    assert "Hash mismatch for 'model.safetensors'" in altered.stderr
    only_warned = start(warned, mounts, public)
    assert only_warned.returncode == 0
    assert "warning: " in only_warned.stderr
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"Other weights")
    _, root = certify(tmp_path, "root")
    sign(folder, *certify(tmp_path, "release", "root", use="signer"))
    refused = start(required, mounts, public)
    assert "signed with a certificate, not a key, or the reverse" in refused.stderr
    public.write_text(root.read_text())
    assert start(required, mounts, public).returncode == 0
    public.unlink()
    without_key = start(required, mounts, public)
    assert without_key.returncode == ConfigError.exit_code
    assert "is no key to verify with" in without_key.stderr
    assert (folder / SIGNATURE).exists()


@pytest.mark.parametrize("mode", MODES)
def test_the_release_that_is_verified_is_the_one_that_is_served(tmp_path: Path, mode: str) -> None:
    store, release = ModelStore(tmp_path, MODEL), "0001-fp16-aaaaaaaaaaaa"
    assert "initContainers" not in rendered(store, release, mode, "off")
    pods = rendered(store, release, mode, "require")
    (container,) = pods["initContainers"]
    assert container["image"] == load(chosen={"platform": "gke"}).platform.image_of("serve")
    verified, key = container["volumeMounts"]
    assert (verified["mountPath"], verified["readOnly"]) == (f"/mnt/releases/{release}", True)
    assert verified["subPath"] == f"org--name/releases/{release}"
    volumes = {each["name"]: each for each in pods["volumes"]}
    assert volumes[verified["name"]]["persistentVolumeClaim"]["claimName"] == "slipway-models"
    assert volumes[key["name"]]["configMap"]["name"] == SIGNING
    policy = json.loads(container["args"][container["args"].index("--serving") + 1])
    assert policy == {"signing": "require", "verification_key": f"{key['mountPath']}/{TRUSTED_KEY.name}"}


def test_install_brings_the_public_key_or_the_roots_and_refuses_a_private_one(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "ours")
    chosen = {"platform": "gke"}

    def config_maps(key: Path) -> list[Object]:
        config = load(chosen=chosen, assignments=["serving.signing=require", f"serving.verification_key={key}"])
        return [body for body in documents_of(config) if body["metadata"]["name"] == SIGNING]

    key, root = certify(tmp_path, "root")
    for trusted in (public, root):
        (made,) = config_maps(trusted)
        assert made["data"] == {TRUSTED_KEY.name: trusted.read_text()}
    both = tmp_path / "both.pem"
    both.write_text(root.read_text() + key.read_text())
    for unusable in (private, tmp_path / "missing.pub", key, both):
        with pytest.raises(ConfigError, match="is no key to verify with"):
            config_maps(unusable)
    assert not [body for body in documents_of(load(chosen=chosen)) if body["metadata"]["name"] == SIGNING]


def test_what_comes_from_object_storage_can_not_be_verified_and_is_refused() -> None:
    assignments = ["serving.signing=require", "serving.verification_key=/k.pub", "kserve.llm.source=s3://bucket/models"]
    with pytest.raises(ConfigError, match="verifies what is on the volume only"):
        load(chosen={"platform": "gke"}, assignments=assignments)


def test_a_refusal_ends_a_rollout_at_once_with_its_reason() -> None:
    failure = {"message": "0001-fp16-aaaaaaaaaaaa is not signed", "hint": "", "exit_code": NotTrusted.exit_code}
    end = {"exitCode": NotTrusted.exit_code, "message": json.dumps(failure)}
    status: Object = {"name": VERIFIER, "restartCount": 0, "state": {"terminated": end}}
    assert _failure({"status": {"initContainerStatuses": [status]}}) == failure["message"]
    again = status | {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": end}}
    assert _failure({"status": {"initContainerStatuses": [again]}}) == failure["message"]
    lost = status | {"state": {"terminated": {"exitCode": 143, "reason": "Error"}}}
    assert _failure({"status": {"initContainerStatuses": [lost]}}) == ""
