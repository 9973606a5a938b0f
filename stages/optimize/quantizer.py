"""The interface of a method that makes a variant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stages.optimize.base_model import Base
from stages.parts.base.optimize_settings import Optimize


@dataclass(frozen=True)
class Peak:
    """Peak memory in bytes. ``gpu``: None without a GPU."""

    resident: int
    gpu: int | None = None


class Quantizer(Protocol):
    @property
    def tools(self) -> tuple[str, ...]:
        """The packages whose versions influence the result, and which are therefore a part of the variant's key."""

    @property
    def calibrated(self) -> bool:
        """Whether it uses the calibration text. Its parameters then have a ``sequence_length``."""

    def parameters(self, settings: Optimize, base: Base) -> dict[str, Any]:
        """All that influences the result besides the base, the calibration text and the tools. Takes little time."""

    def check(self, settings: Optimize, base: Base) -> None:
        """Find out what can't work before anything is loaded.

        Raises:
            QuantizationFailed, ConfigError
        """

    def quantize(self, settings: Optimize, base: Base, target: Path) -> Peak:
        """Write all files of the variant but ``Base.carried`` to the empty directory *target*.

        Raises:
            QuantizationFailed: for any failure of the method; the message is one line.
            ConfigError: the calibration text is too short.
            NotInstalled: this pod got a GPU, and the method sees none.
        """


def peak_resident_bytes() -> int:
    """The largest resident set of this process so far: VmHWM in proc_pid_status(5).

    getrusage(2) would be wrong: its value survives exec, so it may belong to the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
