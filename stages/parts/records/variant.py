"""``optimized/<variant>/variant.json``: a variant, from what it was made, and how."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from scoring.capacity.storage import DEFAULT_GROUP_SIZE
from stages.parts.base.errors import DamagedModel
from stages.parts.base.files import digest_of
from stages.parts.base.log import say
from stages.parts.base.store import ModelStore, Record
from stages.parts.records.acquired import File, difference, files_digest

VARIANT: Final = "variant.json"


class Variant(Record):
    """``optimized/<variant>/variant.json``."""

    variant: str
    method: str
    parameters: dict[str, Any]
    base_digest: str
    calibration_digest: str | None
    """``calibration_digest`` of the calibration set; None for a method that needs no calibration."""
    tool_versions: dict[str, str]
    key: str
    """``digest_of`` of the five fields above. A variant with the same key is used again."""
    files: tuple[File, ...]
    digest: str
    """``files_digest(files)``."""
    weights_bytes: int
    bits: int
    dtype: str
    """The type of the tensors that are not quantized: float16 or bfloat16."""
    stored: dict[str, int] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """Bytes of the weights by the type they are stored in; empty in older records."""
    seconds: float
    peak_memory_bytes: int
    """Peak resident set of the process that quantized."""
    peak_gpu_memory_bytes: int | None
    created_at: datetime

    @property
    def published(self) -> bool:
        """Whether a publisher made it."""
        return "quant_method" in self.parameters

    @property
    def group_size(self) -> int:
        """Inputs that share one scale; the default for a method without such groups, which does not use it."""
        return int(self.parameters.get("group_size", DEFAULT_GROUP_SIZE))


def write_variant(work: Path, name: str, identity: Mapping[str, Any], started_s: float, **made: Any) -> Variant:
    """Write ``variant.json`` to *work*, where all other files of the variant are. *identity* are the five fields of its
    key, and *started_s* is when it was begun, by ``time.monotonic``; *made* are all other fields but those of time."""
    variant = Variant(
        variant=name,
        **identity,
        key=digest_of(identity),
        digest=files_digest(made["files"]),
        seconds=round(time.monotonic() - started_s, 3),
        created_at=datetime.now(UTC),
        **made,
    )
    variant.write(work / VARIANT)
    return variant


def read_variant(directory: Path) -> Variant:
    """Read the record of *directory*, whose files have the sizes that it says; DamagedModel if they do not."""
    variant = Variant.read(directory / VARIANT)
    wrong = difference(directory, variant.files) if variant else f"{VARIANT} is missing"
    if variant is None or wrong:
        raise DamagedModel(f"{directory} is damaged: {wrong}", hint="run again: it is made anew")
    return variant


def existing(store: ModelStore, name: str, key: str) -> Variant | None:
    """Find the published variant with this key, if all its files exist and have the recorded sizes."""
    variant = Variant.read_if_intact(store.optimized(name) / VARIANT, "making it again")
    if variant is None or variant.key != key:
        return None
    if wrong := difference(store.optimized(name), variant.files):
        say(f"the {name} variant is damaged ({wrong}); making it again")
        return None
    return variant
