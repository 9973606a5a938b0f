"""Ensure that the store has a variant of a model: find it, or make, verify and publish it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from scoring.names import REFERENCE
from stages.optimize.base_model import Base, read_base
from stages.optimize.job import calibration_digest
from stages.optimize.shards import read_weights
from stages.parts.base.errors import DamagedModel, QuantizationFailed, UnknownName
from stages.parts.base.files import digest_of, exclusive, place_tree
from stages.parts.base.formats import FORMATS, Quantizer, why_not_made
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.store import ModelStore
from stages.parts.machine.environment import ENVIRONMENTS
from stages.parts.machine.lock import together
from stages.parts.model.published import AsPublished
from stages.parts.model.safetensors import Tensor, bytes_by_type, find_not_finite, main_dtype
from stages.parts.records.acquired import File
from stages.parts.records.variant import VARIANT, Variant, existing, write_variant
from stages.parts.vllm.arguments import installed_version

READABLE: Final = 0o644

Identity = dict[str, Any]
"""The five fields of a variant from which its key is computed."""


def ensure(store: ModelStore, name: str, settings: Optimize) -> tuple[Variant, bool]:
    """Return the variant that the method *name* makes, and whether it had to be made now; of a model published in 8 or
    4 bits there is only the one with the name of its format.

    Raises:
        UnknownName, ConfigError: a setting is wrong, or the calibration text can't be used.
        NothingToServe, DamagedModel, UnusableModel: see ``read_base``.
        QuantizationFailed: nothing was published.
    """
    base = read_base(store)
    if name not in (*FORMATS, base.record.format):
        raise UnknownName("method", name, FORMATS)
    if why := why_not_made(name, base.record.format, base.config):
        raise QuantizationFailed(f"{name} can't be made: {why}", hint="choose another variant, or another model")
    identity = identify(name, base, settings)
    key = digest_of(identity)
    if variant := existing(store, name, key):
        store.clear(store.optimized(name))
        return variant, False
    quantizer_of(name, base).check(settings, base)
    with exclusive(store.lock(f"optimize-{name}"), f"optimize {name}"):
        # Another process may have made it while this one waited; another configuration, before.
        other = Variant.read_if_intact(store.optimized(name) / VARIANT)
        store.take_up([store.optimized(name)], other.key if other else None, key)
        if variant := existing(store, name, key):
            return variant, False
        with together(f"optimize {name} of {store.model}"):
            return build(store, name, base, settings, identity), True


def quantizer_of(name: str, base: Base) -> Quantizer:
    return AsPublished() if base.record.format != REFERENCE else FORMATS[name].quantizer


def identify(name: str, base: Base, settings: Optimize) -> Identity:
    """Name all that determines the variant's files."""
    quantizer = quantizer_of(name, base)
    parameters = quantizer.parameters(settings, base)
    calibration = None
    if quantizer.calibrated:
        calibration = calibration_digest(settings.calibration, parameters["sequence_length"])
    place = ENVIRONMENTS.get(FORMATS[name].environment) if base.record.format == REFERENCE else None
    version = place.version if place else partial(installed_version, extra="optimize")
    return {
        "method": name,
        "parameters": parameters,
        "base_digest": base.record.digest,
        "calibration_digest": calibration,
        "tool_versions": {tool: version(tool) for tool in quantizer.tools},
    }


def build(store: ModelStore, name: str, base: Base, settings: Optimize, identity: Identity) -> Variant:
    """Quantize, verify, describe, publish."""
    started = time.monotonic()
    with store.building(store.optimized(name)) as work:
        peak = quantizer_of(name, base).quantize(settings, base, work)
        weights = verify(name, base, work, identity["parameters"])
        for path in work.iterdir():
            if path.stat().st_mode & READABLE != READABLE:
                path.chmod(READABLE)  # safetensors writes files that only their owner may read
        place_tree(base.directory, work, base.record.carried)
        paths = sorted(path for path in work.rglob("*") if path.is_file())
        files = tuple(File.of(work, path.relative_to(work).as_posix()) for path in paths)
        peaks = {"peak_memory_bytes": peak.resident, "peak_gpu_memory_bytes": peak.gpu}
        return write_variant(work, name, identity, started, files=files, **weights, **peaks)


def verify(name: str, base: Base, directory: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Check the weights in *directory*, made with the quantizer's *parameters*, against the base's. Returns the fields
    of ``Variant`` with their size and types. Raises: QuantizationFailed: a tensor is missing, has the wrong type or
    shape, or holds NaN, infinity or other values."""
    try:
        bits = quantizer_of(name, base).verify(base, directory, parameters)
        tensors = read_weights(directory)
        check_finite(tensors.values())
    except (ValueError, DamagedModel) as error:
        hint = "nothing was published; the other variants continue without it"
        message = f"{name} made wrong weights from {base.record.architecture}: {error}"
        raise QuantizationFailed(message, hint=hint) from error
    stored = bytes_by_type(tensors.values())
    dtype = main_dtype(tensor for tensor_name, tensor in tensors.items() if tensor_name in base.tensors)
    return {"weights_bytes": sum(stored.values()), "bits": bits, "dtype": dtype, "stored": stored}


def check_finite(tensors: Iterable[Tensor]) -> None:
    """Refuse, with ValueError, a floating-point tensor with NaN or infinity."""
    if not_finite := find_not_finite(tensors):
        raise ValueError(f"{not_finite[0].name} holds NaN or infinity")
