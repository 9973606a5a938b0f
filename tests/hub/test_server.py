"""Tests of the server with an unmodified huggingface_hub."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.hub import HubServer
from tests.hub.models import sharded_model, tiny_model, write_model
from tests.serving import wait_until


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def test_a_whole_model_is_downloaded_unchanged(hub: HubServer, tmp_path: Path) -> None:
    files = sharded_model() | {"additional_chat_templates/tools.jinja": b"{{ tools }}"}
    hub.add_repo("org/tiny", files)
    snapshot_download("org/tiny", local_dir=tmp_path, endpoint=hub.url)
    assert {path: (tmp_path / path).read_bytes() for path in files} == files


def test_large_files_come_from_another_host_without_the_token(tmp_path: Path) -> None:
    with HubServer(cdn=True) as hub:
        hub.allow("hf_secret", "org/tiny")
        hub.add_repo("org/tiny", tiny_model(), private=True)
        snapshot_download("org/tiny", local_dir=tmp_path, endpoint=hub.url, token="hf_secret")
        assert (tmp_path / "model.safetensors").read_bytes() == tiny_model()["model.safetensors"]
        assert {each.authorized for each in hub.requests if each.path.startswith("/cdn/")} == {False}
        assert all(each.authorized for each in hub.requests if each.path.startswith("/org/"))


def test_branches_tags_and_commits_are_revisions(hub: HubServer) -> None:
    first = hub.add_repo("org/tiny", tiny_model())
    second = hub.add_repo("org/tiny", tiny_model(**{"config.json": b"{}"}), revision="feature/x")
    hub.tag("org/tiny", "v1", first)
    api = HfApi(endpoint=hub.url)
    seen = {revision: api.model_info("org/tiny", revision=revision).sha for revision in ("main", "feature/x", "v1")}
    assert seen == {"main": first, "feature/x": second, "v1": first}
    assert api.model_info("org/tiny", revision=second[:8]).sha == second
    refs = api.list_repo_refs("org/tiny")
    assert [(each.name, each.target_commit) for each in refs.branches] == [("main", first), ("feature/x", second)]
    assert [(each.name, each.target_commit) for each in refs.tags] == [("v1", first)]


def test_a_commit_depends_only_on_the_content(hub: HubServer) -> None:
    assert hub.add_repo("org/a", tiny_model()) == hub.add_repo("org/b", tiny_model(), revision="other")
    assert hub.add_repo("org/a", tiny_model()) != hub.add_repo("org/a", tiny_model(**{"config.json": b"{ }"}))


def test_a_tree_names_every_file_with_size_and_digests(hub: HubServer) -> None:
    hub.add_repo("org/tiny", {"a.txt": b"hello\n", "deep/er/model.safetensors": b"weights"})
    entries = {each.path: each for each in HfApi(endpoint=hub.url).list_repo_tree("org/tiny", recursive=True)}
    assert set(entries) == {"a.txt", "deep", "deep/er", "deep/er/model.safetensors"}
    assert entries["a.txt"].blob_id == "ce013625030ba8dba906f756967f9e9ca394464a"  # from git hash-object
    weights = entries["deep/er/model.safetensors"]
    assert (weights.lfs.size, weights.lfs.sha256) == (7, hashlib.sha256(b"weights").hexdigest())
    top = HfApi(endpoint=hub.url).list_repo_tree("org/tiny")
    assert {each.path for each in top} == {"a.txt", "deep"}


def test_the_model_information_has_license_gating_and_blobs(hub: HubServer) -> None:
    hub.add_repo("org/tiny", tiny_model(), license="mit", gated=True)
    info = HfApi(endpoint=hub.url).model_info("org/tiny", files_metadata=True)
    assert info.card_data is not None
    assert (info.card_data.license, info.gated, info.private) == ("mit", "manual", False)
    assert "license:mit" in (info.tags or [])
    sizes = {each.rfilename: each.size for each in info.siblings or []}
    assert sizes["model.safetensors"] == len(tiny_model()["model.safetensors"])


def test_a_reader_without_access_is_refused_as_on_the_hub(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo("org/private", tiny_model(), private=True)
    hub.add_repo("org/gated", tiny_model(), gated=True)
    hub.allow("hf_stranger")
    hub.allow("hf_friend", "org/private", "org/gated")
    api = HfApi(endpoint=hub.url)
    for token in (False, "hf_stranger"):
        with pytest.raises(RepositoryNotFoundError):
            api.model_info("org/private", token=token)
        with pytest.raises(GatedRepoError):
            hf_hub_download("org/gated", "config.json", local_dir=tmp_path, endpoint=hub.url, token=token)
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        api.model_info("org/private", token="hf_unknown")
    assert api.model_info("org/private", token="hf_friend").private
    assert hf_hub_download("org/gated", "config.json", local_dir=tmp_path, endpoint=hub.url, token="hf_friend")


def test_the_errors_say_what_does_not_exist(hub: HubServer, tmp_path: Path) -> None:
    hub.add_repo("org/tiny", tiny_model())
    api = HfApi(endpoint=hub.url)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/none", token=False)
    with pytest.raises(RevisionNotFoundError):
        api.model_info("org/tiny", revision="none")
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download("org/tiny", "none.json", local_dir=tmp_path, endpoint=hub.url)


def get(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:  # noqa: S310
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


def test_a_range_request_gets_that_part_of_the_file(hub: HubServer) -> None:
    hub.add_repo("org/tiny", {"model.safetensors": b"0123456789"})
    url = f"{hub.url}/org/tiny/resolve/main/model.safetensors"
    assert get(url, Range="bytes=4-")[:2] == (206, b"456789")
    status, body, headers = get(url, Range="bytes=2-3")
    assert (status, body, headers["Content-Range"]) == (206, b"23", "bytes 2-3/10")
    assert get(url, Range="bytes=10-")[0] == 416
    assert [each.range for each in hub.requests] == ["bytes=4-", "bytes=2-3", "bytes=10-"]


def test_faults_occur_as_often_as_requested(hub: HubServer) -> None:
    hub.add_repo("org/tiny", {"model.safetensors": b"0123456789"})
    url = f"{hub.url}/org/tiny/resolve/main/model.safetensors"
    hub.fail("model.safetensors", 429, retry_after=7)
    hub.fail("model.safetensors", 503)
    hub.corrupt("*.safetensors")
    hub.cut("/org/tiny/*", 4)
    status, _, headers = get(url)
    assert (status, headers["Retry-After"]) == (429, "7")
    assert get(url)[0] == 503
    assert get(url)[1] == b"\xcf123456789"
    with pytest.raises(Exception, match="IncompleteRead"):
        get(url)
    assert get(url)[:2] == (200, b"0123456789")
    # The client may have the response before the server has recorded it.
    wait_until(lambda: [each.sent for each in hub.requests] == [0, 0, 10, 4, 10], "the record of the last response")


def test_folders_are_served_from_the_command_line(tmp_path: Path) -> None:
    write_model(tmp_path / "root" / "org" / "one", tiny_model())
    write_model(tmp_path / "root" / "org" / "two" / "dev", sharded_model())
    write_model(tmp_path / "three", tiny_model())
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "tests.hub", "--root", str(tmp_path / "root")]
    command += ["--repo", f"org/three={tmp_path / 'three'}", "--port-file", str(port_file)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}) as server:
        try:
            while not port_file.exists():
                assert server.poll() is None
                time.sleep(0.02)
            api = HfApi(endpoint=f"http://127.0.0.1:{port_file.read_text().strip()}")
            assert api.model_info("org/one").sha == api.model_info("org/three").sha
            assert len(api.model_info("org/two", revision="dev").siblings or []) == len(sharded_model())
        finally:
            server.terminate()
