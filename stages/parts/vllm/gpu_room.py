"""Whether a variant fits on GPUs of this machine, by its directory: known before minutes of loading."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from scoring.capacity.accelerator import Accelerator
from scoring.capacity.architecture import Architecture, NotSizeable
from scoring.capacity.families import read_architecture
from scoring.capacity.memory import Fit, MemorySettings, certain_reasons, fit, powers_of_two, surely_fits
from scoring.capacity.storage import HALF, Storage
from scoring.capacity.weights import stored_bytes
from scoring.units import GIB, MIB
from stages.parts.base.errors import ConfigError, DamagedModel
from stages.parts.base.serving_settings import Serving
from stages.parts.machine.hardware import query_gpus
from stages.parts.model.checkpoint import CONFIG, config_in, stated
from stages.parts.model.published import storage_of_variant
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.vllm.automatic import place_here
from stages.parts.vllm.sizing import kv_value_bytes, memory_settings, places_weights_otherwise, why_not_planned


@dataclass(frozen=True)
class PlacedVariant:
    """A variant whose memory on this machine's GPUs can be calculated."""

    model: Architecture
    storage: Storage
    accelerator: Accelerator
    settings: MemorySettings
    gpus: int
    """Those of this machine."""

    def on(self, size: int) -> Fit | None:
        """Calculate whether it fits on *size* GPUs; None if the model's KV cache can't be calculated."""
        with contextlib.suppress(NotSizeable):
            return fit(self.model, self.storage, self.accelerator, size, self.settings)
        return None

    def fewest(self) -> int | None:
        """Find the fewest of this machine's GPUs on which it fits."""
        fitting = ((size, self.on(size)) for size in powers_of_two(self.gpus))
        return next((size for size, fitted in fitting if fitted and surely_fits(fitted, self.settings)), None)


def check_room(directory: Path, settings: Serving) -> None:
    """Refuse what surely does not fit; of a model that can't be sized, only the weights are checked. vLLM itself
    reports what else does not fit. Raise ConfigError if it needs more than ``tensor_parallel_size`` GPUs have; the hint
    says how many are enough."""
    variant = _placed(directory, settings)
    fitted = variant.on(settings.tensor_parallel_size) if variant else None
    if variant is None or fitted is None:
        _check_weights(directory, settings)
    elif reasons := certain_reasons(fitted, variant.settings):
        hint = _hint(variant.fewest(), variant.gpus)
        raise ConfigError(f"it does not fit on {settings.tensor_parallel_size} GPU(s): {'; '.join(reasons)}", hint=hint)


def _placed(directory: Path, settings: Serving) -> PlacedVariant | None:
    """Read the variant in *directory*; None without GPUs, and where its memory can't be calculated."""
    place = place_here()
    if place.accelerator is None or why_not_planned(settings, on_gpu=True):
        return None
    with contextlib.suppress(NotSizeable, DamagedModel, OSError, ValueError):
        variant = Variant.read(directory / VARIANT)
        storage = storage_of_variant(variant, directory) if variant else None
        if variant is None or storage is None:
            return None
        model = read_architecture(json.loads((directory / CONFIG).read_bytes()))
        # What config.json does not describe, such as the part for images, is in the files all the same.
        other = max(0, variant.weights_bytes - stored_bytes(model, storage)) // HALF
        model = replace(model, other=other, kv_value_bytes=kv_value_bytes(settings.kv_cache_dtype))
        needed = memory_settings(settings, settings.max_model_len or model.longest_context)
        return PlacedVariant(model, storage, place.accelerator, needed, place.gpus)
    return None


def _check_weights(directory: Path, settings: Serving) -> None:
    memory = [int(line) * MIB for line in query_gpus("memory.total") if line.isdigit()]
    if not memory or places_weights_otherwise(settings):
        return
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    share = min(memory) * settings.gpu_memory_utilization
    if weights <= share * settings.tensor_parallel_size:
        return
    # They must divide evenly among the GPUs; 0 if the configuration lacks their number.
    heads = int(stated(config_in(directory), "num_attention_heads") or 0)
    enough = next((n for n in powers_of_two(len(memory)) if weights <= share * n and not heads % n), None)
    raise ConfigError(
        f"the weights need {weights / GIB:.1f} GiB, and serving.gpu_memory_utilization leaves a server "
        f"{share / GIB:.1f} GiB on each of {settings.tensor_parallel_size} GPU(s)",
        hint=_hint(enough, len(memory)),
    )


def _hint(enough: int | None, gpus: int) -> str:
    if enough:
        return f"set serving.tensor_parallel_size={enough}"
    return f"the {gpus} GPU(s) here are too few for it; see also optimize.variants"
