"""The table of hardware, ``configs/hardware``: which variants ``optimize.variants: auto`` tries on each kind of GPU and
processor, which others vLLM serves there, and which are left out. Each line has its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from scoring.capacity.accelerator import Accelerator
from stages.parts.base.errors import UnknownName
from stages.parts.base.formats import quantized_formats
from stages.parts.base.optimize_settings import AUTO
from stages.parts.base.settings import CONFIGS, Settings, parse, read_yaml
from stages.parts.machine.hardware import Processor

FOLDER: Final = CONFIGS / "hardware"


class Line(Settings):
    """What the table says of one variant."""

    why: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(pattern="^https://")]


class HardwareKind(Settings):
    """One kind of hardware."""

    compute_capabilities: tuple[float, ...] = ()
    """Of its GPUs, as PyTorch gives them."""
    processors: tuple[str, ...] = ()
    """Names of a ``Processor``."""
    first: Mapping[str, Line]
    """What *auto* tries."""
    also: Mapping[str, Line] = {}
    """What vLLM serves as well, and what is tried only if it is named."""
    left_out: Mapping[str, Line] = {}

    @model_validator(mode="after")
    def _known_and_once(self) -> Self:
        named = [*self.first, *self.also, *self.left_out]
        for name in named:
            if name not in quantized_formats():
                unknown = UnknownName("variant", name, quantized_formats())
                raise ValueError(f"{unknown}; {unknown.hint}")
        if twice := {name for name in named if named.count(name) > 1}:
            raise ValueError(f"it has two lines for {', '.join(sorted(twice))}")
        return self

    def untried(self, names: Iterable[str]) -> dict[str, str]:
        """Say of those of the variants *names* that are not tried first why."""
        reasons = {name: line.why for name, line in self.left_out.items()}
        for name, line in self.also.items():
            reasons[name] = f"{line.why}; others come first, and optimize.variants=[{AUTO}, {name}] adds it"
        return {
            name: reasons.get(name, "configs/hardware has no line for it") for name in names if name not in self.first
        }


@cache
def hardware_table(folder: Path = FOLDER) -> Mapping[str, HardwareKind]:
    """Read the kinds of hardware by name. Raises: ConfigError: a file has wrong fields; all of them are shown."""
    return {path.stem: parse(HardwareKind, read_yaml(path), str(path)) for path in sorted(folder.glob("*.yaml"))}


def kind_of(accelerator: Accelerator | None, processor: Processor | None) -> HardwareKind | None:
    """Find the kind of a GPU or, without one, of a processor; None if the table lacks it."""
    kinds = hardware_table().values()
    if accelerator:
        return next((kind for kind in kinds if accelerator.compute_capability in kind.compute_capabilities), None)
    return next((kind for kind in kinds if processor and processor.name in kind.processors), None)
