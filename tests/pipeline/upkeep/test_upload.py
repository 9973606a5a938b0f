"""A release on the Hub: a branch has its files and no others, all of them or none, and a run can begin there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import published
from stages.parts.records.production import Production
from stages.parts.records.variant import VARIANT
from stages.parts.releases.release import METRICS
from stages.parts.releases.signing import sign, verify
from tests.hub import HubServer
from tests.hub.models import Stages, tiny_model, write_model
from tests.pipeline.upkeep.test_image import files, slipway
from tests.samples import MODEL
from tests.serving import publish, variant_of
from tests.stages.parts.releases.test_signing import key_pair


@pytest.fixture
def hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HubServer:
    """A Hub on which the user may make repositories, without Xet."""
    hub.allow("hf_write")
    for name, value in {"ENDPOINT": hub.url, "HOME": str(tmp_path / "hf"), "TOKEN": "hf_write"}.items():
        monkeypatch.setenv(f"HF_{name}", value)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    return hub


@pytest.fixture
def release(store: ModelStore, tmp_path: Path) -> Path:
    """One that a server could load, with a decision, in production."""
    decision = published(store) / METRICS
    variant = variant_of(store, "int8", write_model(tmp_path / "source", tiny_model()))
    publish(store, 2, variant)
    variant.write(published(store) / VARIANT)
    shutil.copy(decision, published(store))
    return published(store)


def upload(store: ModelStore, target: str) -> subprocess.CompletedProcess[str]:
    return slipway("release", "export", MODEL, target, store=store.root)


def on(hub: HubServer, branch: str = "main", repository: str = "team/new") -> dict[str, bytes]:
    """The files on a branch, but for the one that the Hub has made."""
    found = hub.repositories[repository]
    blobs = found.commits[found.branches[branch]].values()
    return {blob.path: b"".join(blob.read(0, blob.size)) for blob in blobs if blob.path != ".gitattributes"}


def test_a_branch_has_the_files_of_the_release_in_one_commit_and_a_run_can_begin_there(
    store: ModelStore, release: Path, hub: HubServer, tmp_path: Path
) -> None:
    private, public = key_pair(tmp_path, "ours")
    sign(release, private)
    made = upload(store, "hf://team/new@prod")
    assert made.returncode == 0, made.stderr
    assert on(hub, "prod") == files(release)
    assert on(hub) == {}
    assert hub.repositories["team/new"].private
    assert len(hub.requests_for("/api/models/team/new/commit/*", "POST")) == 1
    stages = Stages(hub.url, tmp_path, {"HF_TOKEN": "hf_write"})
    commit = stages.resolve("team/new", "prod")
    assert commit in made.stdout
    acquired = stages.acquire(commit, "team/new")
    assert acquired.returncode == 0, acquired.stderr
    base = stages.base("team/new")
    assert (base / "model.safetensors").read_bytes() == (release / "model.safetensors").read_bytes()
    verify(write_model(tmp_path / "downloaded", on(hub, "prod")), public)
    assert Production.read(tmp_path / "downloaded" / METRICS) == Production.read(release / METRICS)


def test_what_a_branch_had_and_the_release_has_not_is_removed(store: ModelStore, release: Path, hub: HubServer) -> None:
    hub.add_repo(
        "team/new", {"old-00001-of-00002.safetensors": b"old", "config.json": b"old", ".gitattributes": b"kept"}
    )
    hub.allow("hf_write", "team/new")
    before = hub.repositories["team/new"].branches["main"]
    made = upload(store, "hf://team/new")
    assert made.returncode == 0, made.stderr
    assert on(hub) == files(release)
    assert not hub.repositories["team/new"].private
    after = hub.repositories["team/new"]
    assert ".gitattributes" in after.commits[after.branches["main"]]
    assert before in after.commits


@pytest.mark.parametrize("token", [None, "hf_wrong", "hf_reader"])
def test_who_may_not_write_is_told_so(
    store: ModelStore, release: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    hub.add_repo("team/new", {"config.json": b"theirs"})
    hub.allow("hf_reader")
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    refused = upload(store, "hf://team/new")
    assert refused.returncode == 12, refused.stderr
    assert "refused access to team/new" in refused.stderr
    assert "HF_TOKEN" in refused.stderr
    assert on(hub) == {"config.json": b"theirs"}


def test_a_damaged_release_is_not_uploaded(store: ModelStore, release: Path, hub: HubServer) -> None:
    (release / "model.safetensors").unlink()
    refused = upload(store, "hf://team/new")
    assert refused.returncode == 14, refused.stderr
    assert hub.repositories == {}


def test_an_upload_that_fails_changes_no_branch(store: ModelStore, release: Path, hub: HubServer) -> None:
    hub.fail("/uploads/*", 403, times=None)
    refused = upload(store, "hf://team/new")
    assert refused.returncode == 75, refused.stderr
    assert "uploading 'model.safetensors'" in refused.stderr
    assert on(hub) == {}


def test_a_hub_that_does_not_answer_or_has_no_xet_may_do_so_later(
    store: ModelStore, release: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_DISABLE_XET")
    refused = upload(store, "hf://team/new")
    assert refused.returncode == 75, refused.stderr
    assert "xet" in refused.stderr
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    refused = upload(store, "hf://team/new")
    assert refused.returncode == 75, refused.stderr
    assert "127.0.0.1:1 can't be reached" in refused.stderr


@pytest.mark.parametrize("name", ["", "team/../new", "a/b/c", "team/new--x"])
def test_what_is_no_repository_is_refused(store: ModelStore, release: Path, hub: HubServer, name: str) -> None:
    refused = upload(store, f"hf://{name}")
    assert refused.returncode == 2, refused.stderr
    assert f"{name!r} is not a model's name" in refused.stderr
    assert hub.repositories == {}
