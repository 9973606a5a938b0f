"""A release that travels through a registry, by the real skopeo: the same image there, the same release in a store."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.upkeep.image import bring_in, export
from stages.parts.base.errors import AccessDenied, ConfigError, TransientError
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import published
from stages.parts.releases.signing import sign, verify
from tests.pipeline.upkeep.test_image import files, slipway, trusted
from tests.registry import ACCOUNT, Registry, registry
from tests.samples import MODEL
from tests.stages.parts.releases.test_signing import key_pair

IMAGE = "/v2/org/name"

needs_skopeo = pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")


@pytest.fixture
def release(store: ModelStore) -> Path:
    return published(store)


@pytest.fixture
def server() -> Iterator[Registry]:
    with registry() as running:
        yield running


@pytest.fixture(autouse=True)
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that skopeo login writes; of nobody at first."""
    path = tmp_path / "auth.json"
    path.write_text("{}")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(path))
    return path


def address(server: Registry, reference: str = ":3") -> str:
    return f"oci://{server.host}/org/name{reference}"


def left(root: Path) -> list[Path]:
    """What lies in a store beside its models."""
    return [path for path in root.iterdir() if path.name.startswith(".")]


@needs_skopeo
def test_the_image_in_a_registry_is_the_one_in_an_archive_and_another_store_takes_it(
    store: ModelStore, release: Path, server: Registry, tmp_path: Path
) -> None:
    private, public = key_pair(tmp_path, "ours")
    sign(release, private)
    digest = export(release, MODEL, tmp_path / "release.tar")
    made = slipway("release", "export", MODEL, address(server), "--json", store=store.root)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["digest"] == digest
    assert f"sha256:{hashlib.sha256(server.content[f'{IMAGE}/manifests/3']).hexdigest()}" == digest
    other = tmp_path / "other"
    brought = slipway("release", "import", address(server), "--key", public, store=other)
    assert brought.returncode == 0, brought.stderr
    assert files(ModelStore(other, MODEL).releases / release.name) == files(release)
    verify(ModelStore(other, MODEL).releases / release.name, public)
    bring_in(tmp_path / "third", address(server, f"@{digest}"), trusted)
    assert left(store.root) == left(other) == left(tmp_path / "third") == []


@needs_skopeo
def test_without_the_right_login_nothing_is_taken_or_brought_in(
    store: ModelStore, release: Path, login: Path, tmp_path: Path
) -> None:
    with registry(wants_login=True) as locked:

        def log_in(account: str) -> None:
            login.write_text(json.dumps({"auths": {locked.host: {"auth": account}}}))

        for account in (None, base64.b64encode(b"ci:wrong").decode()):
            if account:
                log_in(account)
            with pytest.raises(AccessDenied, match="unauthorized: authentication required") as refused:
                export(release, MODEL, address(locked))
            assert "skopeo login" in refused.value.hint
        assert locked.content == {}
        log_in(ACCOUNT)
        export(release, MODEL, address(locked))
        login.write_text("{}")
        with pytest.raises(AccessDenied):
            bring_in(tmp_path / "other", address(locked), trusted)
        log_in(ACCOUNT)
        bring_in(tmp_path / "other", address(locked), trusted)
    assert left(store.root) == left(tmp_path / "other") == []


@needs_skopeo
def test_what_a_registry_lacks_or_where_there_is_none_is_said_as_skopeo_says_it(
    store: ModelStore, server: Registry, tmp_path: Path
) -> None:
    refused = slipway("release", "import", address(server), store=tmp_path / "other")
    assert refused.returncode == TransientError.exit_code
    assert f"error: skopeo: initializing source docker://{server.host}/org/name:3" in refused.stderr
    assert "unknown" in refused.stderr
    refused = slipway("release", "export", MODEL, "oci://127.0.0.1.example/org/name:3", store=store.root)
    assert refused.returncode == TransientError.exit_code
    assert 'Get "https://127.0.0.1.example/v2/"' in refused.stderr
    assert left(tmp_path / "other") == left(store.root) == []


@needs_skopeo
@pytest.mark.parametrize("kind", ["manifests", "blobs"])
def test_altered_bytes_are_refused(release: Path, server: Registry, tmp_path: Path, kind: str) -> None:
    digest = export(release, MODEL, address(server))
    manifest = json.loads(server.content[f"{IMAGE}/manifests/3"])
    place = f"{IMAGE}/{kind}/{digest if kind == 'manifests' else manifest['layers'][0]['digest']}"
    content = server.content[place]
    server.content[place] = content.replace(b"org", b"0rg", 1) if kind == "manifests" else content[:-1] + b"?"
    with pytest.raises(TransientError, match="igest"):
        bring_in(tmp_path / "other", address(server, f"@{digest}"), trusted)
    assert [*(tmp_path / "other").iterdir()] == []


@needs_skopeo
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_ended_ends_skopeo_and_leaves_nothing(
    store: ModelStore, release: Path, server: Registry, number: signal.Signals
) -> None:
    server.answers.clear()
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "release",
        "export",
        MODEL,
        address(server),
        "--store",
        str(store.root),
    ]
    with subprocess.Popen(command) as running:
        assert server.asked.wait(60)
        started = psutil.Process(running.pid).children(recursive=True)
        assert "skopeo" in {process.name() for process in started}
        running.send_signal(number)
        assert running.wait(30) in (130, 143)
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
    assert left(store.root) == []


def test_without_skopeo_a_registry_is_refused_with_what_to_do(
    store: ModelStore, release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for words in (("export", MODEL, "oci://localhost/org/name:3"), ("import", "oci://localhost/org/name:3")):
        refused = slipway("release", *words, store=store.root)
        assert refused.returncode == ConfigError.exit_code
        assert "skopeo is not installed" in refused.stderr
        assert "export a .tar" in refused.stderr
    assert left(store.root) == []
