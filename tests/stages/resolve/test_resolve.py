from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import HubServer
from tests.hub.models import Stages, sharded_model, tiny_model, write_model


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def stages(hub: HubServer, tmp_path: Path) -> Stages:
    return Stages(hub.url, tmp_path)


def test_a_branch_a_tag_and_a_short_commit_resolve_to_the_commit(hub: HubServer, stages: Stages) -> None:
    old = hub.add_repo("org/tiny", tiny_model())
    new = hub.add_repo("org/tiny", sharded_model())
    hub.tag("org/tiny", "v1", old)
    assert stages.resolve() == new
    assert (stages.folder / "outputs" / "commit").read_text() == new
    assert stages.resolve(revision="v1") == old
    assert stages.resolve(revision=old[:10]) == old


def test_a_full_commit_needs_no_request(hub: HubServer, stages: Stages) -> None:
    commit = "0123456789" * 4
    assert stages.resolve(revision=commit, HF_HUB_OFFLINE="1") == commit
    assert hub.requests == []


def test_a_misspelled_model_is_not_found(stages: Stages) -> None:
    result = stages.run("resolve", "--model", "org/nnoe")
    assert result.returncode == 10
    assert "has no model org/nnoe" in result.stderr
    assert "hint: check the spelling; if it is private, set HF_TOKEN" in result.stderr


def test_the_error_names_a_missing_revision(hub: HubServer, stages: Stages) -> None:
    hub.add_repo("org/tiny", tiny_model())
    result = stages.run("resolve", "--model", "org/tiny", "--revision", "v9")
    assert result.returncode == 11
    assert "org/tiny has no revision 'v9'" in result.stderr


def test_a_private_model_needs_a_token_that_may_read_it(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", tiny_model(), private=True)
    hub.allow("hf_friend", "org/tiny")
    hub.allow("hf_stranger")
    assert stages.run("resolve", "--model", "org/tiny").returncode == 10
    stranger = stages.run("resolve", "--model", "org/tiny", HF_TOKEN="hf_stranger")
    assert stranger.returncode == 10
    assert "that your HF_TOKEN can read it" in stranger.stderr
    assert stages.resolve(HF_TOKEN="hf_friend") == commit


def test_an_invalid_token_is_denied_and_never_shown(hub: HubServer, stages: Stages) -> None:
    hub.add_repo("org/tiny", tiny_model(), private=True)
    result = stages.run("resolve", "--model", "org/tiny", HF_TOKEN="hf_expired", SLIPWAY_RUN="r1", SLIPWAY_DEBUG="1")
    assert result.returncode == 12
    assert "hint: HF_TOKEN is invalid, expired or lacks the permission" in result.stderr
    record = (stages.store / "org--tiny" / "runs" / "r1" / "outcomes" / "resolve.json").read_text()
    assert "hf_expired" not in result.stderr + result.stdout + record


def test_without_a_network_the_error_is_transient(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    result = Stages(f"http://127.0.0.1:{port}", tmp_path).run("resolve", "--model", "org/tiny")
    assert result.returncode == 75
    assert f"127.0.0.1:{port} can't be reached" in result.stderr
    assert "hint: check the network" in result.stderr


def test_offline_mode_is_a_permanent_error(stages: Stages) -> None:
    result = stages.run("resolve", "--model", "org/tiny", HF_HUB_OFFLINE="1")
    assert result.returncode == 2
    assert "HF_HUB_OFFLINE forbids" in result.stderr


def test_a_request_is_retried_after_an_error_of_the_hub(hub: HubServer, stages: Stages) -> None:
    commit = hub.add_repo("org/tiny", tiny_model())
    hub.fail("/api/models/*", 503)
    hub.fail("/api/models/*", 429, retry_after=1)
    assert stages.resolve() == commit
    assert [each.status for each in hub.requests_for("/api/models/*")] == [503, 429, 200]


def test_an_error_of_the_hub_that_persists_is_transient(hub: HubServer, stages: Stages) -> None:
    hub.fail("/api/models/*", 502, times=None)
    result = stages.run("resolve", "--model", "org/tiny")
    assert result.returncode == 75
    assert "has a problem (502)" in result.stderr


def test_if_the_hub_asks_for_a_long_pause_the_stage_ends(hub: HubServer, stages: Stages) -> None:
    hub.fail("/api/models/*", 429, times=None, retry_after=300)
    result = stages.run("resolve", "--model", "org/tiny")
    assert result.returncode == 75
    assert len(hub.requests_for("/api/models/*")) == 1


def test_the_error_says_that_the_server_is_not_a_hub(tmp_path: Path) -> None:
    with HubServer() as hub:
        hub.add_repo("org/tiny", {"page": b"<html>please log in</html>"})
        elsewhere = f"{hub.url}/org/tiny/resolve/main/page?"  # this page answers every request
        result = Stages(elsewhere, tmp_path).run("resolve", "--model", "org/tiny")
    assert result.returncode == 75
    assert "did not answer as a Hub does" in result.stderr


@pytest.mark.parametrize("name", ["../../etc", "a/b/c", "~nobody-here/x"])
@pytest.mark.parametrize("stage", ["resolve", "acquire"])
def test_an_invalid_name_is_refused_before_anything_is_written(stages: Stages, stage: str, name: str) -> None:
    commit = [] if stage == "resolve" else ["--commit", "0" * 40]
    result = stages.run(stage, f"--model={name}", *commit)
    assert result.returncode == 2, result.stderr
    assert "hint: " in result.stderr
    assert not stages.store.exists()


def test_the_commit_of_a_directory_follows_the_files_that_serving_needs(stages: Stages) -> None:
    folder = write_model(stages.folder / "my-model", tiny_model())
    first = stages.resolve(str(folder))
    assert first.startswith("local-")
    (folder / "notes.txt").write_text("not served")
    (folder / "model.py").write_text("not served")
    assert stages.resolve("./my-model") == first
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert stages.resolve("./my-model") != first
