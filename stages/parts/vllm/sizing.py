"""Models whose memory can be calculated, and the settings on which it depends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from scoring.capacity.architecture import Architecture
from scoring.capacity.families import read_architecture
from scoring.capacity.memory import MemorySettings
from scoring.capacity.weights import Parameters, count_parameters, stored_bytes
from scoring.units import MIB
from stages.parts.base.formats import storage_of
from stages.parts.base.serving_settings import AskedServing

PLACING: Final = re.compile(r"--(cpu-offload|(pipeline|tensor)-parallel|quantization|load-format)[\w-]*|-[tp]p\b|-q\b")
"""Extra arguments that place weights in another way than is calculated."""
CACHING: Final = re.compile(r"--(data-parallel|max-model-len|hf-overrides|kv-cache|block-size|speculative)[\w-]*|-dp\b")
"""Extra arguments that use the rest of the memory in another way."""


@dataclass(frozen=True)
class SizedModel:
    """A model of a known family."""

    architecture: Architecture
    parameters: Parameters

    @classmethod
    def of(cls, config: Mapping[str, Any], stored: int | None = None) -> Self:
        """Read a config.json. *stored* is the count of parameters in the checkpoint, if it is known.

        Raises:
            NotSizeable: the family is not known, or the checkpoint lacks parameters that config.json describes.
        """
        architecture = read_architecture(config)
        return cls(architecture, count_parameters(architecture, stored))

    def stored_bytes(self, variant: str, group_size: int) -> int:
        return stored_bytes(self.architecture, self.parameters, storage_of(variant, group_size))


def memory_settings(serving: AskedServing, context: int = 0) -> MemorySettings:
    """Choose the settings that a server's memory on GPUs depends on."""
    return MemorySettings(
        context=context,
        utilization=serving.gpu_memory_utilization,
        enforce_eager=serving.enforce_eager,
        kv_cache_bytes=serving.kv_cache_mib * MIB if serving.kv_cache_mib else None,
    )


def why_not_planned(serving: AskedServing, *, on_gpu: bool) -> str:
    """Say why nothing is calculated with these settings; empty if it is."""
    arguments = " ".join(serving.extra_arguments).replace("_", "-")
    if argument := PLACING.search(arguments) or CACHING.search(arguments):
        return f"serving.extra_arguments has {argument[0]}"
    return "serving.dtype is float32" if on_gpu and serving.dtype == "float32" else ""


def places_weights_otherwise(serving: AskedServing) -> bool:
    return bool(PLACING.search(" ".join(serving.extra_arguments).replace("_", "-")))
