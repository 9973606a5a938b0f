"""Whether a variant fits on GPUs of this machine, by its directory: known before minutes of loading."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scoring.capacity.accelerator import Accelerator
from scoring.capacity.architecture import Architecture, NotSizeable
from scoring.capacity.families import read_architecture
from scoring.capacity.layout import certain_reasons, surely_fits
from scoring.capacity.memory import Fit, Parallelism, fit
from scoring.capacity.memory import Serving as Memory
from scoring.capacity.weights import HALF, Parameters, count_parameters, stored_bytes
from scoring.names import VARIANTS, VariantName
from scoring.units import GIB, MIB
from stages.parts.base.errors import ConfigError, DamagedModel
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import Serving
from stages.parts.machine.accelerators import catalogue
from stages.parts.machine.hardware import query_gpus
from stages.parts.model.checkpoint import CONFIG
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.vllm.automatic import Asked, Place, memory_of, place_here

PLACED: Final = re.compile(r"--(cpu-offload|pipeline-parallel|tensor-parallel|quantization|load-format)|-[tp]p\b|-q\b")
"""Extra arguments that place weights in another way than is calculated here."""
DEFAULT_GROUP_SIZE: Final = 128


@dataclass(frozen=True)
class _Sized:
    """A variant whose memory on this machine's GPUs can be calculated."""

    model: Architecture
    parameters: Parameters
    variant: VariantName
    accelerator: Accelerator
    memory: Memory
    gpus: int
    """Those of this machine."""

    def on(self, size: int) -> Fit | None:
        """None: the KV cache of the model can't be calculated."""
        with contextlib.suppress(NotSizeable):
            return fit(self.model, self.parameters, self.variant, self.accelerator, Parallelism(size), self.memory)
        return None

    def fewest(self, below: int | None = None) -> int | None:
        """The fewest GPUs on which it fits, of those that are here, or *below* so many."""
        powers = (1 << n for n in range(self.gpus.bit_length()))
        sizes = (size for size in powers if below is None or size < below)
        return next((size for size in sizes if (found := self.on(size)) and surely_fits(found, self.memory)), None)


def fewest_gpus(directory: Path, settings: Serving) -> int | None:
    """The fewest GPUs on which the variant fits with the same settings otherwise, if those are fewer than in
    *settings*. None also where nothing can be calculated, as without GPUs."""
    sized = _sized(directory, settings)
    return sized.fewest(settings.tensor_parallel_size) if sized else None


def check_room(directory: Path, settings: Serving) -> None:
    """Refuses what surely does not fit; of a model that can't be sized only the weights are looked at. vLLM itself
    reports what else does not fit.

    Raises:
        ConfigError: it needs more than ``tensor_parallel_size`` GPUs have; the hint says how many are enough.
    """
    sized = _sized(directory, settings)
    found = sized.on(settings.tensor_parallel_size) if sized else None
    if sized is None or found is None:
        _check_weights(directory, settings)
    elif reasons := certain_reasons(found, sized.memory):
        raise ConfigError(
            f"it does not fit on {settings.tensor_parallel_size} GPU(s): {'; '.join(reasons)}",
            hint=_hint(sized.fewest(), sized.gpus),
        )


def _sized(directory: Path, settings: Serving) -> _Sized | None:
    """The variant in *directory*; None without GPUs, and where its memory can't be calculated."""
    place = place_here(catalogue())
    asked = Asked(settings, None, Optimize())
    if place.accelerator is None or asked.unplanned(place):
        return None
    with contextlib.suppress(NotSizeable, DamagedModel, OSError, ValueError):
        return _of_directory(directory, settings, place, place.accelerator)
    return None


def _of_directory(directory: Path, settings: Serving, place: Place, accelerator: Accelerator) -> _Sized | None:
    made = Variant.read(directory / VARIANT)
    name = next((each for each in VARIANTS if made and each == made.method), None)
    if made is None or name is None:
        return None
    model = read_architecture(json.loads((directory / CONFIG).read_bytes()))
    described = count_parameters(model)
    group_size = int(made.parameters.get("group_size", DEFAULT_GROUP_SIZE))
    # What config.json does not describe, such as the part for images, is in the files all the same.
    other = max(0, made.weights_bytes - stored_bytes(model, described, name, group_size)) // HALF
    return _Sized(
        model=model,
        parameters=described.model_copy(update={"other": other}),
        variant=name,
        accelerator=accelerator,
        memory=memory_of(settings, group_size, settings.max_model_len or model.longest_context),
        gpus=place.gpus,
    )


def _check_weights(directory: Path, settings: Serving) -> None:
    memory = [int(line) * MIB for line in query_gpus("memory.total") if line.isdigit()]
    if not memory or PLACED.search(" ".join(settings.extra_arguments).replace("_", "-")):
        return
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    share = min(memory) * settings.gpu_memory_utilization
    if weights <= share * settings.tensor_parallel_size:
        return
    heads = _attention_heads(directory)
    powers = (1 << n for n in range(len(memory).bit_length()))
    enough = next((n for n in powers if n <= len(memory) and weights <= share * n and not heads % n), None)
    raise ConfigError(
        f"the weights need {weights / GIB:.1f} GiB, and serving.gpu_memory_utilization leaves a server "
        f"{share / GIB:.1f} GiB on each of {settings.tensor_parallel_size} GPU(s)",
        hint=_hint(enough, len(memory)),
    )


def _hint(enough: int | None, gpus: int) -> str:
    if enough:
        return f"set serving.tensor_parallel_size={enough}"
    return f"the {gpus} GPU(s) here are too few for it; see also optimize.variants"


def _attention_heads(directory: Path) -> int:
    """The number of attention heads, which must divide evenly among the GPUs; 0 if the configuration lacks it."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        return int(config.get("text_config", config).get("num_attention_heads", 0))
    return 0
