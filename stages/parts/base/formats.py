"""The formats in which a model's variants are stored: one record for each, and the list of all.

Settings, plan, check, workflow, doctor and optimize derive from the record what they need to know of a format. To add
one, write a file with a ``Format``, and add a line to ``FORMATS``.
"""

from __future__ import annotations

import json
import pkgutil
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from scoring.names import REFERENCE

if TYPE_CHECKING:
    from scoring.capacity.storage import Storage
    from stages.parts.base.optimize_settings import Optimize


@dataclass(frozen=True)
class Peak:
    """Peak memory in bytes. ``gpu``: None without a GPU."""

    resident: int
    gpu: int | None = None


class Quantizer(Protocol):
    """Makes the variants of one format. *base* is a ``stages.optimize.base_model.Base``."""

    tools: ClassVar[tuple[str, ...]]
    """The packages whose versions influence the result, and which are therefore a part of the variant's key."""
    calibrated: ClassVar[bool]
    """Whether it uses the calibration text. Its parameters then have a ``sequence_length``."""

    def parameters(self, settings: Optimize, base: Any) -> dict[str, Any]:
        """Name quickly all that influences the result besides the base, the calibration text and the tools."""

    def check(self, settings: Optimize, base: Any) -> None:
        """Find out what can't work before anything is loaded. Raises: QuantizationFailed, ConfigError."""

    def quantize(self, settings: Optimize, base: Any, target: Path) -> Peak:
        """Write all files of the variant but ``Base.record.carried`` to the empty directory *target*.

        Raises:
            QuantizationFailed: for any failure of the method; the message is one line.
            ConfigError: the calibration text is too short.
            NotInstalled: this pod got a GPU, and the method sees none.
        """

    def verify(self, base: Any, directory: Path, parameters: Mapping[str, Any]) -> int:
        """Check the weights in *directory*, made with these *parameters*. Returns the bits per quantized weight.
        Raises: ValueError, DamagedModel: a tensor is missing, or has the wrong type, shape or values."""


@dataclass(frozen=True)
class Format:
    """How a variant is stored, made and served."""

    storage: Storage
    quantizer: Quantizer
    configuration: Callable[[int], Mapping[str, Any]] | None = None
    """Returns ``quantization_config`` of a checkpoint with this ``optimize.group_size``, by which vLLM is asked for its
    kernels. None for 16 bit."""
    only_16_bit: bool = False
    """Whether vLLM computes its layers in 16 bit only, and not in float32."""
    environment: str = ""
    """The environment of its own in which it is made (``stages.parts.machine.environment``); empty for this one."""


class Formats(UserDict[str, Any]):
    """The records by name. They are imported when they are read, so that a list of the names costs nothing."""

    def __getitem__(self, name: str) -> Format:
        record: Format = pkgutil.resolve_name(self.data[name])
        return record


FORMATS: Final[Mapping[str, Format]] = Formats(
    {
        REFERENCE: "stages.optimize.fp16:FP16",
        "awq": "stages.optimize.four_bit:AWQ",
        "gptq": "stages.optimize.four_bit:GPTQ",
        "int8": "stages.optimize.rounded:INT8",
        "fp8": "stages.optimize.rounded:FP8",
        "fp8-block": "stages.optimize.rounded:FP8_BLOCK",
        "mxfp4": "stages.optimize.rounded:MXFP4",
        "nvfp4a16": "stages.optimize.rounded:NVFP4A16",
        "w4a16": "stages.optimize.calibrated:W4A16",
        "w8a8": "stages.optimize.calibrated:W8A8",
        "nvfp4": "stages.optimize.calibrated:NVFP4",
    }
)
"""Where the record of each format stands, as ``module:name``."""

FAILURES: Final[Mapping[str, Mapping[str, str]]] = json.loads(Path(__file__).with_name("failures.json").read_bytes())
"""What failed when a small model of each family was made and served (``make models``), by what was tried and
``model_type``."""


def quantized_formats() -> tuple[str, ...]:
    """All formats but the reference, with which they are compared."""
    return tuple(name for name in FORMATS if name != REFERENCE)


def why_not_made(name: str, published: str, config: Mapping[str, Any]) -> str:
    """Say why the variant *name* can't be made of a model with this config.json that is *published* in this format;
    empty if it can, as far as is known."""
    if published not in (REFERENCE, name):
        return f"it is made from 16-bit weights, and the model is published in {published}"
    return why_failed(name, config) if name != REFERENCE else ""


def why_failed(what: str, config: Mapping[str, Any]) -> str:
    """Say how *what* failed with a small model of the family that config.json names: a format, the reference in vLLM
    on a processor, or a ``picture`` shown to it; empty if it is not known to."""
    failed = FAILURES.get(what, {})
    types = (str(part.get("model_type")) for part in (config, config.get("text_config") or {}))
    return next((f"with a small {each} model it failed: {failed[each]}" for each in types if each in failed), "")


def storage_of(name: str, group_size: int) -> Storage:
    """Describe how the format *name* stores weights with this setting of ``optimize.group_size``."""
    storage = FORMATS[name].storage
    scales = (replace(scale, inputs=group_size) if scale.adjustable else scale for scale in storage.scales)
    return replace(storage, scales=tuple(scales))
