"""Ensure that the store has a variant of each candidate: its weights and config.json, with the model's other files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from scoring.units import MIB
from stages.acquire.download import HubSource
from stages.acquire.ensure import discarded_if_useless, fill, remove_all_but
from stages.parts.base import program
from stages.parts.base.errors import Interrupted, NothingToServe, SlipwayError, TransientError
from stages.parts.base.files import digest_of, exclusive, place_tree
from stages.parts.base.log import say
from stages.parts.base.store import ModelStore
from stages.parts.machine.process import peak_resident_bytes
from stages.parts.model.candidates import CandidateCheckpoint, Candidates, another
from stages.parts.model.checkpoint import CONFIG, parse_object, small_files
from stages.parts.model.published import AUXILIARY, format_of
from stages.parts.model.safetensors import bytes_by_type, main_dtype, read_headers
from stages.parts.records.acquired import ACQUIRED, WEIGHTS, Acquired
from stages.parts.records.variant import VARIANT, Variant, existing, write_variant

METHOD: Final = "published"
LEAST_SHARE: Final = 0.9
"""A candidate has at least this share of the model's weights: the part for speculation is often left out."""


def fetch(store: ModelStore, candidates: Candidates) -> None:
    """Fetch all *candidates*, each with an outcome as that of a variant that is made.

    Raises:
        NothingToServe: the model was not acquired yet.
        SlipwayError: one failed; raised after the others were tried, first what may pass.
    """
    if (base := Acquired.read(store.base / ACQUIRED)) is None:
        raise NothingToServe(f"the store has no base/{ACQUIRED} of {store.model}", hint="run acquire first")
    failures: list[SlipwayError] = []
    for candidate in candidates.root:
        try:
            with program.outcome(store, "optimize", candidate.name) as report:
                variant, is_new = ensure(store, base, candidate)
                size = f"{variant.bits} bit, {variant.weights_bytes / MIB:,.1f} MiB of weights"
                note = f"; {candidate.note}" if candidate.note else ""
                summary = f"{candidate.name} is {candidate.source} at {candidate.commit}: {size}{note}"
                (report.done if is_new else report.reused)(summary, key=variant.key)
        except Interrupted:
            raise
        except SlipwayError as error:
            say(f"{candidate.name} is left out: {error}")
            failures.append(error)
    for failure in sorted(failures, key=lambda error: not isinstance(error, TransientError)):
        raise failure


def ensure(store: ModelStore, base: Acquired, candidate: CandidateCheckpoint) -> tuple[Variant, bool]:
    """Return the candidate's variant, and whether it had to be fetched now. Makes no request if it is there.

    Raises the errors of ``stages.acquire.ensure``; UnusableModel also for the weights of another model.
    """
    identity = {
        "method": METHOD,
        "parameters": candidate.parameters,
        "base_digest": base.digest,
        "calibration_digest": None,
        "tool_versions": {},
    }
    key, target = digest_of(identity), store.optimized(candidate.name)
    with exclusive(store.lock(f"optimize-{candidate.name}"), f"fetching {candidate.source}"):
        other = Variant.read_if_intact(target / VARIANT)
        store.take_up([target], other.key if other else None, key)
        if variant := existing(store, candidate.name, key):
            return variant, False
        with store.building(target, resume=candidate.commit) as work:
            return build(store, base, candidate, work, identity), True


def build(
    store: ModelStore, base: Acquired, candidate: CandidateCheckpoint, work: Path, identity: Mapping[str, Any]
) -> Variant:
    """Download, verify, put the model's own files in place of the candidate's, describe."""
    started, source = time.monotonic(), HubSource(candidate.source, candidate.commit, store.base)
    fetched, _ = fill(work, source, small_files(source.sizes), candidate.commit)
    with discarded_if_useless(work):
        if differ := difference(store.base, work):
            raise another(candidate.source, differ)
    kept = [file for file in fetched if file.path == CONFIG or file.path.endswith(WEIGHTS)]
    remove_all_but(kept, work)
    place_tree(store.base, work, base.carried)
    files = (*kept, *(file for file in base.files if file.path in base.carried))
    tensors = list(read_headers(work.glob("*.safetensors")).values())
    stored = bytes_by_type(tensors)
    return write_variant(
        work,
        candidate.name,
        identity,
        started,
        files=files,
        weights_bytes=sum(stored.values()),
        bits=candidate.parameters["bits"],
        dtype=main_dtype(tensor for tensor in tensors if not AUXILIARY.search(tensor.name)),
        stored=stored,
        peak_memory_bytes=peak_resident_bytes(),
        peak_gpu_memory_bytes=None,
    )


def difference(base: Path, candidate: Path) -> str:
    """Name a layer that has another count of weights in a candidate, packed or not, or say that it has too few in all;
    empty if only the values differ."""
    ours, theirs = layers_of(base), layers_of(candidate)
    for layer in ours.keys() & theirs.keys():
        if ours[layer] != theirs[layer]:
            return f"{layer} has {theirs[layer]:,} weights, and the model's has {ours[layer]:,}"
    if theirs.total() < LEAST_SHARE * ours.total():
        return f"it has {theirs.total():,} weights, and the model {ours.total():,}"
    return ""


def layers_of(directory: Path) -> Counter[str]:
    """Count the weights of a model by layer, which is named by what precedes ``.weight`` or another last part."""
    form, layers = format_of(parse_object((directory / CONFIG).read_bytes(), CONFIG)), Counter[str]()
    for name, tensor in read_headers(directory.glob("*.safetensors")).items():
        layers[name.rpartition(".")[0] or name] += 0 if name.endswith("bias") else form.count(tensor)
    return layers
