"""Kubernetes quantities of cores, bytes and devices."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from stages.parts.base.errors import ConfigError

QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([eE][+-]?[0-9]+)|([numkMGTPE]|[KMGTPE]i))?")
SUFFIXES: Final[dict[str, Decimal]] = (
    {"": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(1000)}
    | {suffix: Decimal(1000) ** power for power, suffix in enumerate("MGTPE", start=2)}
    | {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)}
)


def quantity(text: str) -> Decimal:
    """Read a Kubernetes quantity ('500m', '2', '1.5Gi', '1e3') in its base unit: cores, bytes, devices; raise
    ConfigError if *text* is none. Source: Kubernetes' resource.Quantity."""
    match = QUANTITY.fullmatch(text)
    if not match:
        raise ConfigError(f"{text!r} is not a Kubernetes quantity such as 500m, 2 or 4Gi")
    number, exponent, suffix = match.groups()
    return Decimal(number + (exponent or "")) * SUFFIXES[suffix or ""]
