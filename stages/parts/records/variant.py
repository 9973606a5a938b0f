"""``optimized/<variant>/variant.json``: what was made, from what, and how."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from stages.parts.base.record import Record
from stages.parts.records.acquired import File

VARIANT: Final = "variant.json"


class Variant(Record):
    """``optimized/<variant>/variant.json``: what was made from what, how, and at which cost."""

    variant: str
    method: str
    parameters: dict[str, Any]
    base_digest: str
    calibration_digest: str | None
    """sha256 over the calibration texts; None for a method that needs none."""
    tool_versions: dict[str, str]
    key: str
    """``digest_of`` the five fields above: same key, same variant, no work."""
    files: tuple[File, ...]
    digest: str
    """``files_digest(files)``."""
    weights_bytes: int
    bits: int
    dtype: str
    """Of the tensors that are not quantized: float16 or bfloat16."""
    seconds: float
    peak_memory_bytes: int
    """Peak resident set of the quantizing process."""
    peak_gpu_memory_bytes: int | None
    created_at: datetime
