"""A release as an OCI image: an image layout, as a directory or as an archive of one. Its only layer has the release's
files in ``/models``, where KServe's modelcars and Kubernetes' image volumes look for them.

Nothing in it depends on time, owner or order, so that a release always is the same image, and has one digest.
https://github.com/opencontainers/image-spec/blob/v1.1.1/image-layout.md
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from stages.parts.base.errors import AccessDenied, ConfigError, Conflict, DamagedModel, TransientError, disk_errors
from stages.parts.base.files import canonical_json, from_json, make_folder, safe_relative, sha256_of
from stages.parts.base.store import ModelStore
from stages.parts.machine.process import run_aloud
from stages.parts.model.adapter import adapters_in
from stages.parts.model.hub import upload
from stages.parts.model.name import ModelName
from stages.parts.records.acquired import files_digest, read_intact
from stages.parts.records.production import Production
from stages.parts.records.variant import read_variant
from stages.parts.releases.release import METRICS, RELEASE, numbered

MODELS: Final = "models"
TYPE: Final = "application/vnd.oci.image"
MODEL_KEY, RELEASE_KEY = "org.opencontainers.image.title", "org.opencontainers.image.version"
"""Annotations of the manifest."""
LARGEST_DOCUMENT_BYTES: Final = 4 << 20
"""As registries limit manifests."""
AGAIN: Final = "export it again"
REGISTRY: Final = "oci://"
HUB: Final = "hf://"


def export(release: Path, model: str, target: Path | str) -> str:
    """Write the release in this folder of a store to *target*, complete or not at all: ``oci://…``, ``hf://…``, an
    archive if it is called ``.tar``, or a directory. Returns the image's digest, or the commit on the Hub. Raises:
    ConfigError: *target* exists; DamagedModel, NotEnoughSpace, and what ``_copy`` or ``hub.upload`` does."""
    read_variant(release)
    if str(target).startswith(HUB):
        return upload(release, *str(target).removeprefix(HUB).split("@", 1))
    if str(target).startswith(REGISTRY):
        with tempfile.TemporaryDirectory(prefix=".image-", dir=release.parents[2]) as folder:
            digest = export(release, model, f"{folder}/image")
            _copy(f"oci:{folder}/image", str(target))
        return digest
    target = Path(target).absolute()
    if target.exists() or not target.parent.is_dir():
        raise ConfigError(f"{target} exists already, or its folder does not", hint="name a new file or directory")
    work = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with disk_errors(target.parent):
            (work / "blobs" / "sha256").mkdir(parents=True)
            layer = _blob(work, "layer.v1.tar", lambda file: _pack(release, file))
            rootfs = {"type": "layers", "diff_ids": [layer["digest"]]}
            config = _json(work, "config.v1+json", {"architecture": "amd64", "os": "linux", "rootfs": rootfs})
            named = {"annotations": {MODEL_KEY: model, RELEASE_KEY: release.name}, "config": config, "layers": [layer]}
            image = _json(
                work, "manifest.v1+json", {"mediaType": f"{TYPE}.manifest.v1+json", "schemaVersion": 2, **named}
            )
            (work / "index.json").write_text(canonical_json({"schemaVersion": 2, "manifests": [image]}))
            (work / "oci-layout").write_text(canonical_json({"imageLayoutVersion": "1.0.0"}))
            if target.suffix == ".tar":
                with tarfile.open(work / "archive", "w") as archive:
                    for name in ("oci-layout", "index.json", "blobs"):
                        archive.add(work / name, name)
            os.replace(work / "archive" if target.suffix == ".tar" else work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return str(image["digest"])


def bring_in(root: Path, source: Path | str, trust: Callable[[Path], object]) -> tuple[ModelStore, str]:
    """Put the release of an image that ``export`` wrote into the store at *root*, once every byte of it was compared
    with its digests, and *trust* has accepted its folder. Returns its model and its name.

    Raises:
        ConfigError: *source* is no such image. What ``_copy`` does, of ``oci://…``.
        DamagedModel: something is not what a digest or the release's decision says.
        Conflict: the store has another release of this number.
    """
    if str(source).startswith(REGISTRY):
        make_folder(root)
        with tempfile.TemporaryDirectory(prefix=".image-", dir=root) as folder:
            _copy(str(source), f"oci:{folder}")
            return bring_in(root, Path(folder), trust)
    with _reading(Path(source)) as opened:
        image = from_json(opened("index.json").read(LARGEST_DOCUMENT_BYTES))["manifests"][0]
        manifest = from_json(_verified(opened, image).read(LARGEST_DOCUMENT_BYTES))
        model, name = (manifest["annotations"][key] for key in (MODEL_KEY, RELEASE_KEY))
        if not RELEASE.match(name) or len(safe_relative(name).parts) != 1:
            raise DamagedModel(f"{name!r} is not a release's name", hint=AGAIN)
        store = ModelStore(root.absolute(), ModelName.parse(model).id)
        if same := numbered(store).get(int(name.partition("-")[0])):
            raise Conflict(f"the store has {same} already", hint="a release is imported into a store once, as it is")
        with store.building(store.releases / name, resume=name) as work:
            try:
                _unpack([_verified(opened, layer) for layer in manifest["layers"]], work)
                _check(work, name)
                trust(work)
            except BaseException:
                shutil.rmtree(work.parent)
                raise
    return store, name


def _unpack(layers: Iterable[IO[bytes]], work: Path) -> None:
    """Put what is in ``/models`` in place of the directory *work*. Raises: DamagedModel: there is something else."""
    shutil.rmtree(work)
    unpacked = work.parent / MODELS
    for layer in layers:
        with tarfile.open(fileobj=layer) as tar:
            tar.extractall(unpacked, filter="data")  # which refuses what leads out of it
    if [path.name for path in unpacked.iterdir()] != [MODELS]:
        raise DamagedModel("the image holds more than a release", hint=AGAIN)
    os.replace(unpacked / MODELS, work)
    unpacked.rmdir()


def _check(folder: Path, name: str) -> None:
    """Compare the files of a release with its records, and these with its decision. Raises: DamagedModel."""
    variant, decision = read_variant(folder), Production.read(folder / METRICS)
    wrong = [path for path in folder.rglob("*") if path.is_symlink()]
    adapters = {path: read_intact(path).files for path in adapters_in(folder).values()}
    for part, listed in {folder: variant.files, **adapters}.items():
        files = ((part / safe_relative(file.path), file.sha256) for file in listed)
        wrong += [path for path, sha256 in files if sha256_of(path) != sha256]
    if wrong:
        raise DamagedModel(f"{wrong[0].relative_to(folder)} of {name} is not what was released", hint=AGAIN)
    digest = files_digest(variant.files)
    if not (decision and decision.release == name and name.endswith(digest[:12]) and digest == variant.digest):
        raise DamagedModel(f"the decision in {name} is for another release", hint=AGAIN)


def _pack(release: Path, file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in (release, *sorted(release.rglob("*"))):
            entry = tarfile.TarInfo(str(Path(MODELS) / path.relative_to(release)))
            if path.is_dir():
                entry.mode, entry.type = 0o755, tarfile.DIRTYPE
                tar.addfile(entry)
                continue
            entry.mode, entry.size = 0o644, path.stat().st_size
            with path.open("rb") as content:
                tar.addfile(entry, content)


def _blob(work: Path, kind: str, write: Callable[[IO[bytes]], object]) -> dict[str, Any]:
    path = work / "blob"
    with path.open("wb") as file:
        write(file)
    digest, size = sha256_of(path), path.stat().st_size
    os.replace(path, work / "blobs" / "sha256" / digest)
    return {"mediaType": f"{TYPE}.{kind}", "digest": f"sha256:{digest}", "size": size}


def _json(work: Path, kind: str, value: dict[str, Any]) -> dict[str, Any]:
    return _blob(work, kind, lambda file: file.write(canonical_json(value).encode()))


def _verified(opened: Callable[[str], IO[bytes]], blob: dict[str, Any]) -> IO[bytes]:
    """Open a blob whose bytes were compared with its digest. Raises: DamagedModel."""
    name = str(safe_relative(f"blobs/{blob['digest'].replace(':', '/')}"))
    if f"sha256:{hashlib.file_digest(opened(name), 'sha256').hexdigest()}" != blob["digest"]:  # type: ignore[arg-type]
        raise DamagedModel(f"{name} of the image was altered: it has another digest", hint=AGAIN)
    return opened(name)


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """Yield what opens a file of the layout by its name. Raises: ConfigError: what is read is no image of a release."""
    try:
        with contextlib.nullcontext() if source.is_dir() else tarfile.open(source) as archive:
            yield lambda name: archive.extractfile(name) if archive else (source / name).open("rb")  # type: ignore[misc,return-value]
    except (tarfile.TarError, LookupError, TypeError, ValueError, AttributeError, EOFError, FileNotFoundError) as error:
        raise ConfigError(f"{source} is no image of a release: {error}", hint="slipway release export") from error


def _copy(source: str, target: str) -> None:
    """Let skopeo copy an image as it is. Raises: ConfigError: there is no skopeo; AccessDenied, TransientError."""
    if not shutil.which("skopeo"):
        raise ConfigError("skopeo is not installed", hint="install it, or export a .tar and copy that to a registry")
    places = [place.replace(REGISTRY, "docker://") for place in (source, target)]
    is_near = any(re.match(r"docker://(localhost|127(\.\d+){3})[:/]", place) for place in places)
    plain = ["--src-tls-verify=false", "--dest-tls-verify=false"] * is_near
    command = ["skopeo", "copy", "--preserve-digests", "--retry-times=3", *plain, *places]
    status, lines = run_aloud(command, hidden=re.compile("time=.* level=fatal "))
    if status:
        line = lines[-1].rpartition(" msg=")[2].strip('"').replace("\\", "") if lines else "it was ended"
        error = AccessDenied if re.search("unauthorized|denied: ", line) else TransientError
        raise error(f"skopeo: {line}", hint="check the address; to log in: skopeo login REGISTRY")
