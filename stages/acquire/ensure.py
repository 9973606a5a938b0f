"""Ensure that base/ contains a model at one commit, the files that serving needs, and adapters/ its LoRA adapters:
complete, verified, safe to load."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scoring.units import readable
from stages.acquire.download import HubSource, LocalSource, require_space
from stages.parts.base import program
from stages.parts.base.errors import DamagedModel, UnusableModel
from stages.parts.base.files import exclusive, sha256_of
from stages.parts.base.store import ModelStore
from stages.parts.model.adapter import CONFIG, WEIGHTS, check_files, parse_source, read_adapter
from stages.parts.model.checkpoint import (
    CARD,
    Checkpoint,
    card_license,
    check,
    check_configuration,
    chosen,
    likely_weights,
    small_files,
    weight_files,
)
from stages.parts.model.description import LOCAL_COMMIT, commit_name
from stages.parts.model.name import ModelName
from stages.parts.model.safetensors import damaged, find_not_finite, read_header
from stages.parts.records.acquired import ACQUIRED, Acquired, File, files_digest


def ensure(store: ModelStore, model: ModelName, revision: str, commit: str, report: program.Report) -> Acquired:
    """Ensure that base/ contains *model* at *commit*. Makes no request to the Hub if it already does.

    Raises:
        NotEnoughSpace, DamagedModel, UnusableModel: base/ is unchanged.
        ModelNotFound, RevisionNotFound, AccessDenied, HubUnavailable: see ``hub.describe``.
    """
    if record := intact(store.base, commit):
        store.clear(store.base, commit)
        report.reused(f"base/ already has {model.source} at {commit}", key=record.digest)
        return record
    local = model.directory
    source = LocalSource(local) if local else HubSource(model.id, commit, store.base)
    small = small_files(source.sizes)
    with exclusive(store.lock("acquire"), f"acquiring {store.model}"):
        if record := intact(store.base, commit):
            report.reused(f"another process has just acquired {model.source} at {commit}", key=record.digest)
            return record
        with store.building(store.base, resume=commit) as work:
            files, checkpoint = fill(work, source, small, commit)
            record = write_record(work, source, files, checkpoint, model=store.model, revision=revision, commit=commit)
    size = sum(file.size_bytes for file in record.files)
    report.done(f"base/ has {model.source} at {commit}: {len(record.files)} files, {readable(size)}", key=record.digest)
    return record


def ensure_adapter(store: ModelStore, name: str, source: str) -> Acquired:
    """Ensure that adapters/*name* contains the adapter that *source* means now. Of a full commit that is there already,
    the Hub is not asked. Raises as ``ensure`` and ``read_adapter``."""
    model, revision = parse_source(source)
    target = store.adapter(name)
    if (record := intact(target, revision)) and record.model == model.id:
        return record
    origin = LocalSource(model.directory) if model.directory else HubSource(model.id, revision, target)
    check_files(origin.sizes, source)
    paths = [path for path in (CONFIG, WEIGHTS, CARD) if path in origin.sizes]
    if isinstance(origin, HubSource):
        commit = origin.commit
    else:
        commit = commit_name(files_digest(tuple(File.of(origin.directory, path) for path in paths)))
    if (record := intact(target, commit)) and record.model == model.id:
        return record
    with store.building(target, resume=commit) as work:
        require_space(work, origin.missing_bytes(paths, work))
        fetched = origin.fetch(paths, work)
        files = tuple(fetched[path] for path in paths)
        with discarded_if_useless(work):
            adapter, tensors = read_adapter(work, source), read_header(work / WEIGHTS)
            if located := find_not_finite(tensors.values()):
                raise damaged(f"{WEIGHTS} of {source}: tensor {located[0].name} holds NaN or an infinite value")
        remove_all_but(files, work)
        count = sum(tensor.count for tensor in tensors.values())
        found = Checkpoint(str(adapter.config["peft_type"]), card_license(work / CARD), count)
        return write_record(work, origin, files, found, model=model.id, revision=revision, commit=commit)


def write_record(
    work: Path, source: HubSource | LocalSource, files: tuple[File, ...], found: Checkpoint, **origin: Any
) -> Acquired:
    """Write ``acquired.json`` of the *files* in *work*; *origin* are its fields model, revision and commit."""
    digest, now = files_digest(files), datetime.now(UTC)
    record = Acquired(source=source.origin, files=files, digest=digest, acquired_at=now, **vars(found), **origin)
    record.write(work / ACQUIRED)
    return record


def fill(
    work: Path, source: HubSource | LocalSource, small: Sequence[str], commit: str
) -> tuple[tuple[File, ...], Checkpoint]:
    """Bring the model's files into *work* and check them. Quick checks that may refuse the model come first."""
    require_space(work, source.missing_bytes([*small, *likely_weights(source.sizes)], work))
    records = source.fetch(small, work)
    with discarded_if_useless(work):
        check_configuration(work, source.sizes)
        weights = weight_files(source.sizes, work)
    require_space(work, source.missing_bytes(weights, work))
    records |= source.fetch(weights, work)
    files = tuple(records[path] for path in chosen(small, weights))
    with discarded_if_useless(work):
        if LOCAL_COMMIT.fullmatch(commit) and commit != commit_name(files_digest(files)):
            raise DamagedModel(f"{source.origin} changed since it was resolved to {commit}", hint="run again")
        checkpoint = check(work, weights)
    remove_all_but(files, work)
    return files, checkpoint


def intact(base: Path, commit: str) -> Acquired | None:
    """Return the record of *base* if it contains exactly that commit, undamaged.

    A file counts as unchanged if it has the recorded size and was last changed before the record was written. After a
    later change, even one of its links or its owner, the file is read again and compared with its digest.
    """
    record = Acquired.read_if_intact(base / ACQUIRED)
    if record is None or record.commit != commit or set(files_in(base)) != {ACQUIRED, *(f.path for f in record.files)}:
        return None
    checked_at, doubtful = time.time_ns(), []
    written_at = (base / ACQUIRED).stat().st_mtime_ns
    for file in record.files:
        status = (base / file.path).stat()
        if status.st_size != file.size_bytes:
            return None
        if max(status.st_mtime_ns, status.st_ctime_ns) >= written_at:
            doubtful.append(file)
    if any(sha256_of(base / file.path) != file.sha256 for file in doubtful):
        return None
    if doubtful:  # the next check finds them older than the record
        os.utime(base / ACQUIRED, ns=(checked_at, checked_at))
    return record


def files_in(directory: Path) -> Iterator[str]:
    return (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())


def remove_all_but(files: Iterable[File], directory: Path) -> None:
    keep = {file.path for file in files}
    for path in list(files_in(directory)):
        if path not in keep:
            (directory / path).unlink()
    for folder in sorted((path for path in directory.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def discarded_if_useless(work: Path) -> Iterator[None]:
    """Remove *work* if the block finds the model damaged or unusable: another attempt would bring the same bytes."""
    try:
        yield
    except (DamagedModel, UnusableModel):
        shutil.rmtree(work)
        raise
