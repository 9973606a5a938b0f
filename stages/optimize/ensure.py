"""Ensure that the store has a variant of a model: find it, or make, verify and publish it."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from typing import Any, Final

from stages.optimize.base_model import Base, read_base
from stages.optimize.calibration import calibration_digest
from stages.optimize.verification import verify
from stages.parts.base.errors import DamagedModel, UnknownName
from stages.parts.base.formats import FORMATS
from stages.parts.base.log import say
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.store import ModelStore, digest_of, exclusive, place_tree
from stages.parts.machine.lock import together
from stages.parts.records.acquired import File, difference, files_digest
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.vllm.arguments import installed_version

READABLE: Final = 0o644

Identity = dict[str, Any]
"""The five fields of a variant from which its key is computed."""


def ensure(store: ModelStore, name: str, settings: Optimize) -> tuple[Variant, bool]:
    """Return the variant that the method *name* makes, and whether it had to be made now.

    Raises:
        UnknownName, ConfigError: a setting is wrong, or the calibration text can't be used.
        NothingToServe, DamagedModel, UnusableModel: see ``read_base``.
        QuantizationFailed: nothing was published.
    """
    if name not in FORMATS:
        raise UnknownName("method", name, FORMATS)
    base = read_base(store)
    identity = identify(name, base, settings)
    key = digest_of(identity)
    if variant := existing(store, name, key):
        return variant, False
    FORMATS[name].quantizer.check(settings, base)
    with exclusive(store.lock(f"optimize-{name}"), f"optimize {name}"):
        # Another process may have made it while this one waited; another configuration, before.
        store.take_up([store.optimized(name)], _key_there(store, name), key)
        if variant := existing(store, name, key):
            return variant, False
        with together(f"optimize {name} of {store.model}"):
            return build(store, name, base, settings, identity), True


def identify(name: str, base: Base, settings: Optimize) -> Identity:
    """Name all that determines the variant's files."""
    quantizer = FORMATS[name].quantizer
    parameters = quantizer.parameters(settings, base)
    calibration = settings.calibration
    return {
        "method": name,
        "parameters": parameters,
        "base_digest": base.record.digest,
        "calibration_digest": calibration_digest(calibration, parameters["sequence_length"])
        if quantizer.calibrated
        else None,
        "tool_versions": {tool: installed_version(tool, "optimize") for tool in quantizer.tools},
    }


def existing(store: ModelStore, name: str, key: str) -> Variant | None:
    """Find the published variant with this key, if all its files exist and have the recorded sizes."""
    directory = store.optimized(name)
    try:
        variant = Variant.read(directory / VARIANT)
    except DamagedModel as error:
        say(f"{error}; making it again")
        return None
    if variant is None or variant.key != key:
        return None
    if wrong := difference(directory, variant.files):
        say(f"the {name} variant is damaged ({wrong}); making it again")
        return None
    return variant


def _key_there(store: ModelStore, name: str) -> str | None:
    with contextlib.suppress(DamagedModel):
        variant = Variant.read(store.optimized(name) / VARIANT)
        return variant.key if variant else None
    return None


def build(store: ModelStore, name: str, base: Base, settings: Optimize, identity: Identity) -> Variant:
    """Quantize, verify, describe, publish."""
    started = time.monotonic()
    with store.building(store.optimized(name)) as work:
        peak = FORMATS[name].quantizer.quantize(settings, base, work)
        weights = verify(name, base, work, identity["parameters"])
        for path in work.iterdir():
            if path.stat().st_mode & READABLE != READABLE:
                path.chmod(READABLE)  # safetensors writes files that only their owner may read
        place_tree(base.directory, work, base.carried)
        paths = sorted(path for path in work.rglob("*") if path.is_file())
        files = tuple(File.of(work, path.relative_to(work).as_posix()) for path in paths)
        variant = Variant(
            variant=name,
            **identity,
            key=digest_of(identity),
            files=files,
            digest=files_digest(files),
            weights_bytes=weights.bytes,
            bits=weights.bits,
            dtype=weights.dtype,
            stored=weights.stored,
            seconds=round(time.monotonic() - started, 3),
            peak_memory_bytes=peak.resident,
            peak_gpu_memory_bytes=peak.gpu,
            created_at=datetime.now(UTC),
        )
        variant.write(work / VARIANT)
    return variant
