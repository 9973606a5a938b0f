"""The calibration set: text that AWQ and GPTQ run through the model while they choose scales.

Documents are shuffled by the seed, joined (the tokenizer's end-of-text token between two), and cut into
sequences of equal length, as in the GPTQ paper (section 4: random segments of a text corpus).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from stages.errors import ConfigError, UnknownName
from stages.settings import CONFIGS, Calibration
from stages.store import digest_of, sha256_of

FORM_FEED: Final = "\f"
BLANK_LINE: Final = "\n\n"


def calibration_path(text: str) -> Path:
    """The file that ``Calibration.text`` names.

    Raises:
        UnknownName: it is not in ``configs/calibration/``.
        ConfigError: there is no such file.
    """
    if "/" not in text and not text.endswith((".txt", ".jsonl")):
        known = {path.stem: path for path in (CONFIGS / "calibration").glob("*.txt")}
        if text not in known:
            raise UnknownName("calibration text", text, known)
        return known[text]
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"there is no calibration text {text}",
            hint="name a file of configs/calibration/, or a path to a .txt or .jsonl file",
        )
    return path


def calibration_digest(calibration: Calibration, sequence_length: int) -> str:
    """What the calibration set is determined by, for one tokenizer: the file's bytes and the way it is cut."""
    path = calibration_path(calibration.text)
    try:
        text = sha256_of(path)
    except OSError as error:
        raise unreadable(path, error) from error
    cut = {"samples": calibration.samples, "sequence_length": sequence_length, "seed": calibration.seed}
    return digest_of({"text": text, **cut})


def read_documents(path: Path) -> list[str]:
    """The texts of a file: a JSONL file's ``text`` fields, or what form feeds or else blank lines separate.

    Raises:
        ConfigError: it is unreadable, malformed or empty.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    if path.suffix == ".jsonl":
        documents = [_text_field(path, number, line) for number, line in enumerate(content.split("\n"), start=1)]
    else:
        documents = content.split(FORM_FEED if FORM_FEED in content else BLANK_LINE)
    documents = [document.strip() for document in documents if document.strip()]
    if not documents:
        raise ConfigError(f"the calibration text {path} is empty", hint="name a file with text in it")
    return documents


def unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"the calibration text {path} can't be read: {error}", hint="it must be UTF-8 text")


def _text_field(path: Path, number: int, line: str) -> str:
    if not line.strip():
        return ""
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ConfigError(
            f"line {number} of the calibration text {path} is not a JSON object with a 'text' field",
            hint='each line must look like {"text": "…"}',
        )
    return str(row["text"])


def sequences(documents: Sequence[str], tokenizer: Any, calibration: Calibration, length: int) -> list[list[int]]:
    """``calibration.samples`` sequences of *length* token ids each.

    Raises:
        ConfigError: the text is too short; the message says for how many sequences it is enough.
    """
    order = list(documents)
    random.Random(calibration.seed).shuffle(order)
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    wanted = calibration.samples * length
    ids: list[int] = []
    for document in order:
        ids += tokenizer.encode(document, add_special_tokens=False) + between
        if len(ids) >= wanted:
            return [ids[start : start + length] for start in range(0, wanted, length)]
    raise ConfigError(
        f"the calibration text {calibration.text} gives {len(ids) // length} sequences of {length} tokens, "
        f"{calibration.samples} were asked for",
        hint="take fewer or shorter ones (calibration: samples, sequence_length), or a longer text",
    )
