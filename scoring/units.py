"""Bytes."""

from __future__ import annotations

from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30
