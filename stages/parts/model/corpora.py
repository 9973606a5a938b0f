"""The text files that a setting names: a file in ``configs/<kind>/``, or the user's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from stages.parts.base.errors import ConfigError, check_known
from stages.parts.base.files import from_json, sha256_of
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.settings import CONFIGS
from stages.parts.base.workload import Workload
from stages.parts.model.adapter import parse_source


def text_path(text: str, kind: str) -> Path:
    """Find the file that *text* names: a path, or a file in ``configs/<kind>/``, ``calibration`` or ``held-out``.

    Raises:
        UnknownName: that folder has no file of this name.
        ConfigError: *text* is a path, and there is no such file.
    """
    if not is_path(text):
        texts = {path.stem: path for path in (CONFIGS / kind).glob("*.txt")}
        check_known(f"{kind} text", text, texts)
        return texts[text]
    path = Path(text).expanduser()
    if not path.is_file():
        hint = f"give the name of a file in configs/{kind}/, or a path to a .txt or .jsonl file"
        raise ConfigError(f"there is no {kind} text {text}", hint=hint)
    return path


def is_path(text: str) -> bool:
    """Whether *text* is a path to the user's own file."""
    return "/" in text or text.endswith((".txt", ".jsonl"))


def own_files(workload: Workload, optimize: Optimize, serving: AskedServing) -> dict[str, Path]:
    """Return the files and folders of the user's own that the settings name, by the name of the setting."""
    paths = {"workload.trace": workload.trace, "workload.tasks_path": workload.tasks_path}
    texts = {
        "workload.divergence_text": workload.divergence_text,
        "optimize.calibration.text": optimize.calibration.text,
    }
    paths |= {field: text for field, text in texts.items() if is_path(text)}
    adapters = {name: parse_source(source)[0].directory for name, source in serving.adapters.items()}
    named = paths | {f"serving.adapters.{name}": str(path) for name, path in adapters.items() if path}
    return {field: Path(path).expanduser() for field, path in named.items() if path}


def text_digest(text: str, kind: str) -> str:
    """Compute the sha256 of the file that *text* names. Raises the errors of ``read_documents``."""
    path = text_path(text, kind)
    with _readable(path, kind):
        return sha256_of(path)


def read_documents(text: str, kind: str) -> list[str]:
    """Read the documents in a file: the ``text`` fields of a .jsonl file, or texts between form feeds or blank lines.
    Raises: UnknownName, ConfigError: see ``text_path``; or the file is unreadable, malformed or empty."""
    path = text_path(text, kind)
    with _readable(path, kind):
        content = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = enumerate(content.split("\n"), start=1)
        documents = [_text_field(f"line {number} of the {kind} text {path}", line) for number, line in lines]
    else:
        documents = content.split("\f" if "\f" in content else "\n\n")
    documents = [document.strip() for document in documents if document.strip()]
    if not documents:
        raise ConfigError(f"the {kind} text {path} is empty", hint="name a file that contains text")
    return documents


@contextlib.contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the {kind} text {path} can't be read: {error}", hint="it must be UTF-8 text") from error


def _text_field(where: str, line: str) -> str:
    if not line.strip():
        return ""
    with contextlib.suppress(ValueError):
        row = from_json(line)
        if isinstance(row, dict) and isinstance(row.get("text"), str):
            return str(row["text"])
    hint = 'each line must look like {"text": "…"}'
    raise ConfigError(f"{where} is not a JSON object with a 'text' field", hint=hint)
