"""What a method of making a variant offers. The stage knows nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stages.optimize.base_model import Base
from stages.parts.base.settings import Optimize


@dataclass(frozen=True)
class Peak:
    """The most memory that the work held, in bytes. ``gpu``: None without a GPU."""

    resident: int
    gpu: int | None = None


class Quantizer(Protocol):
    @property
    def tools(self) -> tuple[str, ...]:
        """The distributions whose versions shape the result, and so belong to the variant's key."""

    @property
    def calibrated(self) -> bool:
        """Whether it looks at the calibration text; its parameters then have a ``sequence_length``."""

    def parameters(self, settings: Optimize, base: Base) -> dict[str, Any]:
        """Everything besides the base, the calibration text and the tools that shapes the result. Cheap."""

    def check(self, settings: Optimize, base: Base) -> None:
        """Refuse what can't work before anything is loaded.

        Raises:
            QuantizationFailed, ConfigError
        """

    def quantize(self, settings: Optimize, base: Base, target: Path) -> Peak:
        """Write the weights and ``config.json``, and nothing that the base has, into the empty *target*.

        Raises:
            QuantizationFailed: in one line, whatever happened inside.
            ConfigError: the calibration text is too short.
        """


def peak_resident_bytes() -> int:
    """The largest resident set of this process so far: VmHWM in proc_pid_status(5).

    Not getrusage(2): its figure outlives exec, so it may be that of the process which started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
