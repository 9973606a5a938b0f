"""The acquired model in base/, from which every method starts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import DamagedModel, NothingToServe
from stages.parts.base.store import ModelStore
from stages.parts.model.checkpoint import CONFIG, check_configuration, weight_files
from stages.parts.model.safetensors import FLOATS, Tensor, main_dtype, read_headers
from stages.parts.records.acquired import ACQUIRED, Acquired, difference, files_digest

SIXTEEN_BIT: Final = ("float16", "bfloat16")
BLOCK_WEIGHT: Final = re.compile(r"^(.*?)\.\d+\..*\.weight$")
"""A weight in a numbered block. Embeddings and the head are in no block, and stay in 16 bit."""
MAX_16_BIT_SHARE: Final = 0.1
"""Share of the decoder's weights that may stay in 16 bit, as a mixture's router or a state space's step do."""


@dataclass(frozen=True)
class Base:
    """``base/`` after a check of its record: every file exists and has the recorded size."""

    directory: Path
    record: Acquired
    config: dict[str, Any]

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """The names of the files that hold the weights."""
        return tuple(weight_files([file.path for file in self.record.files], self.directory))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, from the headers of the files."""
        return read_headers(self.directory / name for name in self.weights)

    @cached_property
    def linear_weights(self) -> dict[str, Tensor]:
        """The weights of the decoder's linear layers by name, which 4-bit methods quantize. Shape: (outputs, inputs).

        A multimodal model has blocks of several kinds; the decoder's are those with the most weights.
        """
        blocks: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            match = BLOCK_WEIGHT.match(name)
            if match and len(tensor.shape) == 2 and tensor.dtype in FLOATS:
                blocks.setdefault(match[1], {})[name] = tensor
        return max(blocks.values(), key=lambda block: sum(tensor.count for tensor in block.values()), default={})

    @cached_property
    def dtype(self) -> str:
        """The floating-point type of most bytes: 'bfloat16', 'float32', …"""
        return main_dtype(self.tensors.values())

    @property
    def half_dtype(self) -> str:
        """The type of what a variant keeps in 16 bit: the model's own 16-bit type, or bfloat16 for a wider model."""
        return self.dtype if self.dtype in SIXTEEN_BIT else "bfloat16"

    def setting(self, name: str) -> Any:
        """Read a value in ``config.json``; for a multimodal model, from its ``text_config`` if it is there."""
        text = self.config.get("text_config")
        return text.get(name, self.config.get(name)) if isinstance(text, dict) else self.config.get(name)


def read_base(store: ModelStore) -> Base:
    """Read the model in ``base/``.

    Raises:
        NothingToServe: the model was not acquired yet.
        DamagedModel: the record or ``config.json`` is malformed, or a file does not match the record.
        UnusableModel: see ``check_configuration``.
    """
    acquire_again = f"run acquire again: python -m stages.acquire --model {store.model}"
    record = Acquired.read(store.base / ACQUIRED)
    if record is None:
        raise NothingToServe(f"{store.model} is not in the store: there is no base/{ACQUIRED}", hint=acquire_again)
    if files_digest(record.files) != record.digest:
        raise DamagedModel(
            f"{store.base / ACQUIRED} contradicts itself: its digest does not match its files", hint=acquire_again
        )
    if wrong := difference(store.base, record.files):
        raise DamagedModel(f"base/ does not match its record: {wrong}", hint=acquire_again)
    check_configuration(store.base)
    return Base(store.base, record, json.loads((store.base / CONFIG).read_bytes()))
