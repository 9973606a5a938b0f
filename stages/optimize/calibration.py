"""The calibration set: the text that AWQ and GPTQ run through the model to compute their scales.

The documents are shuffled with the seed, joined with the tokenizer's end-of-text token, and cut into sequences of
equal length, as in the GPTQ paper (section 4: random segments of a text corpus).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from stages.parts.base.errors import ConfigError
from stages.parts.base.optimize_settings import Calibration
from stages.parts.base.store import digest_of
from stages.parts.model.corpora import text_digest

KIND: Final = "calibration"


def calibration_digest(calibration: Calibration, sequence_length: int) -> str:
    """Compute the digest of what determines a tokenizer's calibration set: the file's bytes and how it is cut."""
    cut = {"samples": calibration.samples, "sequence_length": sequence_length, "seed": calibration.seed}
    return digest_of({"text": text_digest(calibration.text, KIND), **cut})


def sequences(documents: Sequence[str], tokenizer: Any, calibration: Calibration, length: int) -> list[list[int]]:
    """Cut ``calibration.samples`` sequences of *length* token ids each, or refuse a text that is too short."""
    order = list(documents)
    random.Random(calibration.seed).shuffle(order)
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    needed_tokens = calibration.samples * length
    ids: list[int] = []
    for document in order:
        ids += tokenizer.encode(document, add_special_tokens=False) + between
        if len(ids) >= needed_tokens:
            return [ids[start : start + length] for start in range(0, needed_tokens, length)]
    raise ConfigError(
        f"the calibration text {calibration.text} gives {len(ids) // length} sequences of {length} tokens, "
        f"but {calibration.samples} are needed",
        hint="set fewer or shorter sequences (calibration: samples, sequence_length), or use a longer text",
    )
