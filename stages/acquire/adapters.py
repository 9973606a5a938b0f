"""Ensure that adapters/ contains a LoRA adapter: its configuration and weights, complete and verified."""

from __future__ import annotations

from datetime import UTC, datetime

from stages.acquire.download import HubSource, LocalSource, require_space
from stages.acquire.ensure import discarded_if_useless, intact, remove_all_but
from stages.parts.base.store import ModelStore
from stages.parts.model.adapter import CONFIG, WEIGHTS, check_files, parse_source, read_adapter
from stages.parts.model.checkpoint import CARD, card_license
from stages.parts.model.directory import commit_name
from stages.parts.model.safetensors import damaged, find_not_finite, read_header
from stages.parts.records.acquired import ACQUIRED, Acquired, File, files_digest


def ensure_adapter(store: ModelStore, name: str, source: str) -> Acquired:
    """Ensure that adapters/*name* contains the adapter that *source* means now. Of a full commit that is there already,
    the Hub is not asked. Raises as ``stages.acquire.ensure.ensure`` and ``read_adapter``."""
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
        record = Acquired(
            model=model.id,
            source=origin.origin,
            revision=revision,
            commit=commit,
            license=card_license(work / CARD),
            architecture=str(adapter.config["peft_type"]),
            parameters=sum(tensor.count for tensor in tensors.values()),
            files=files,
            digest=files_digest(files),
            acquired_at=datetime.now(UTC),
        )
        record.write(work / ACQUIRED)
    return record
