"""A release that travels as an OCI image: the same in another store, and refused with one byte altered."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.upkeep.checking import Digests, check
from pipeline.upkeep.image import bring_in, export
from stages.parts.base.errors import ConfigError, Conflict, DamagedModel, NotTrusted, SlipwayError
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import published
from stages.parts.releases.listing import catalogue
from stages.parts.releases.signing import SIGNATURE, sign, verify
from tests.samples import MODEL
from tests.stages.parts.releases.test_signing import key_pair


def trusted(_: Path) -> None:
    """Whoever signed it."""


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def slipway(*arguments: str | Path, store: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", *map(str, arguments), "--store", str(store)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def release(store: ModelStore) -> Path:
    return published(store)


def test_a_release_is_the_same_in_another_store_and_can_be_promoted_there(
    store: ModelStore, release: Path, tmp_path: Path
) -> None:
    private, public = key_pair(tmp_path, "ours")
    sign(release, private)
    made = slipway("release", "export", MODEL, tmp_path / "release.tar", store=store.root)
    assert made.returncode == 0, made.stderr
    other = tmp_path / "other"
    brought = slipway("release", "import", tmp_path / "release.tar", "--key", public, store=other)
    assert brought.returncode == 0, brought.stderr
    there = ModelStore(other, MODEL)
    assert files(there.releases / release.name) == files(release)
    verify(there.releases / release.name, public)
    assert check(there, Digests()).damaged == ()
    promoted = slipway("release", "promote", MODEL, "--reason", "from dev", store=other)
    assert promoted.returncode == 0, promoted.stderr
    (row,) = catalogue(there)
    assert (row.name, row.state, row.score) == (release.name, "production", catalogue(store)[0].score)


def test_it_is_an_image_whose_digests_are_right_with_the_files_in_models(
    store: ModelStore, release: Path, tmp_path: Path
) -> None:
    digest = export(release, MODEL, tmp_path / "image")
    assert json.loads((tmp_path / "image" / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    blobs = {path.name: path.read_bytes() for path in (tmp_path / "image" / "blobs" / "sha256").iterdir()}
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in blobs.items())
    (named,) = json.loads((tmp_path / "image" / "index.json").read_text())["manifests"]
    manifest = json.loads(blobs[named["digest"].partition(":")[2]])
    (layer,) = manifest["layers"]
    assert named["digest"] == digest
    assert json.loads(blobs[manifest["config"]["digest"][7:]])["rootfs"]["diff_ids"] == [layer["digest"]]
    assert {len(blobs) for each in (named, layer) if len(blobs[each["digest"][7:]]) == each["size"]} == {3}
    with tarfile.open(fileobj=io.BytesIO(blobs[layer["digest"][7:]])) as tar:
        assert {each.name for each in tar if each.isfile()} == {f"models/{name}" for name in files(release)}
    assert "models/production_metrics.json" in {f"models/{name}" for name in files(release)}
    assert export(release, MODEL, tmp_path / "again.tar") == digest
    with pytest.raises(ConfigError, match="exists already"):
        export(release, MODEL, tmp_path / "image")


def alter(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "production_metrics.json", "variant.json"])
def test_a_release_that_was_altered_before_it_was_exported_is_refused(
    store: ModelStore, release: Path, tmp_path: Path, name: str
) -> None:
    private, public = key_pair(tmp_path, "ours")
    sign(release, private)
    content = (release / name).read_bytes()
    (release / name).unlink()  # it is a link
    (release / name).write_bytes(content.replace(b" ", b"\n", 1) if b" " in content else content[:-1] + b"?")
    export(release, MODEL, tmp_path / "image")
    with pytest.raises((DamagedModel, NotTrusted)):
        bring_in(tmp_path / "other", tmp_path / "image", lambda work: verify(work, public))
    assert not [*(tmp_path / "other").rglob("*.safetensors")]


def test_one_altered_byte_of_any_blob_is_refused(store: ModelStore, release: Path, tmp_path: Path) -> None:
    export(release, MODEL, tmp_path / "image")
    blobs = sorted((tmp_path / "image" / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    for blob in blobs[1:]:  # the smallest is the configuration, of which nothing is read
        shutil.copytree(tmp_path / "image", copied := tmp_path / f"copy-{blob.name}")
        alter(copied / "blobs" / "sha256" / blob.name)
        with pytest.raises(SlipwayError):
            bring_in(tmp_path / "other", copied, trusted)
    assert not [*(tmp_path / "other").rglob("*.safetensors")]
    bring_in(tmp_path / "other", tmp_path / "image", trusted)
    with pytest.raises(Conflict, match="already"):
        bring_in(tmp_path / "other", tmp_path / "image", trusted)


def test_what_is_unsigned_or_signed_by_another_is_refused_where_a_key_is_asked_for(
    store: ModelStore, release: Path, tmp_path: Path
) -> None:
    _, public = key_pair(tmp_path, "ours")
    export(release, MODEL, tmp_path / "unsigned.tar")
    sign(release, key_pair(tmp_path, "theirs")[0])
    export(release, MODEL, tmp_path / "foreign.tar")
    for name in ("unsigned", "foreign"):
        refused = slipway("release", "import", tmp_path / f"{name}.tar", "--key", public, store=tmp_path / "other")
        assert refused.returncode == 46, refused.stderr
    assert release.name in refused.stderr
    assert not [*(tmp_path / "other").rglob(SIGNATURE)]


def image_with(folder: Path, release: Path, change: Callable[[tarfile.TarInfo], None]) -> Path:
    """An image with right digests and one entry more, as an attacker would make it."""
    export(release, MODEL, folder / "sound")
    index = json.loads((folder / "sound" / "index.json").read_text())
    blobs = folder / "sound" / "blobs" / "sha256"
    manifest = json.loads((blobs / index["manifests"][0]["digest"][7:]).read_text())
    layer = blobs / manifest["layers"][0]["digest"][7:]
    entry = tarfile.TarInfo("models/added")
    change(entry)
    with tarfile.open(layer, "a") as tar:
        tar.addfile(entry)
    manifest["layers"][0]["digest"] = f"sha256:{hashlib.sha256(layer.read_bytes()).hexdigest()}"
    layer.rename(blobs / manifest["layers"][0]["digest"][7:])
    content = json.dumps(manifest).encode()
    index["manifests"][0]["digest"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
    (blobs / index["manifests"][0]["digest"][7:]).write_bytes(content)
    (folder / "sound" / "index.json").write_text(json.dumps(index))
    return folder / "sound"


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "models/../../../escaped"},
        {"name": "/etc/escaped"},
        {"name": "elsewhere/escaped"},
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"},
        {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5},
        {"name": "models/config.json"},
    ],
)
def test_an_image_made_to_attack_is_refused(
    store: ModelStore, release: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    def change(entry: tarfile.TarInfo) -> None:
        for field, value in changes.items():
            setattr(entry, field, value)

    image = image_with(tmp_path, release, change)
    with pytest.raises((DamagedModel, ConfigError)):
        bring_in(tmp_path / "other", image, trusted)
    assert not [*tmp_path.rglob("*escaped")]
    assert not [path for path in (tmp_path / "other").rglob("*") if path.is_symlink() or "releases/" in str(path)]


@pytest.mark.parametrize("content", [None, b"", b"no tar", b"\x1f\x8b\x08\x00"])
def test_what_is_no_image_is_named(tmp_path: Path, content: bytes | None) -> None:
    source = tmp_path / "x.tar"
    if content is None:
        source.mkdir()
    else:
        source.write_bytes(content)
    with pytest.raises(ConfigError, match="is no image of a release"):
        bring_in(tmp_path / "store", source, trusted)
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "index.json").write_text('{"manifests": [{"digest": "sha256:../../../etc/passwd"}]}')
    with pytest.raises(SlipwayError):
        bring_in(tmp_path / "store", tmp_path / "y", trusted)
