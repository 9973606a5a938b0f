"""A user's own requests: read from a file, checked line by line, and passed to the load generator round by round."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import ConfigError
from stages.parts.base.files import from_json

SHOWN_MISTAKES: Final = 20
FORMS: Final = '{"prompt": "…", "output_tokens": n} or {"prompt_tokens": n, "output_tokens": m}'
TRIES: Final = 10
"""Attempts at a text of exactly the wanted number of tokens: decoding and encoding again may change the number."""


@dataclass(frozen=True)
class TraceRequest:
    """One line. Without a ``prompt``, the text is random and has ``prompt_tokens`` tokens."""

    line: int
    """Its number in the file, from 1."""
    prompt: str | None
    prompt_tokens: int
    """0 until they are counted."""
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    requests: tuple[TraceRequest, ...]
    tokenizer: Any
    seed: int

    def write(self, path: Path, start: int, count: int) -> list[int]:
        """Write *count* requests from number *start* (from 0) on, starting again at the top after the last one, in the
        form of the load generator; return the lengths of their answers, in order."""
        requests = [self.requests[(start + number) % len(self.requests)] for number in range(count)]
        with path.open("w") as file:
            for number, request in enumerate(requests, start):
                text = request.prompt
                if text is None:
                    text = random_text(self.tokenizer, request.prompt_tokens, seed=(self.seed, number))
                print(json.dumps({"prompt": text, "output_tokens": request.output_tokens}), file=file)
        return [request.output_tokens for request in requests]

    def check_fits(self, max_model_len: int) -> None:
        """Raise ConfigError if lines are too long; the message names them."""
        wrong = [
            f"line {request.line} needs {request.prompt_tokens} + {request.output_tokens} = "
            f"{request.prompt_tokens + request.output_tokens} tokens"
            for request in self.requests
            if request.prompt_tokens + request.output_tokens > max_model_len
        ]
        if wrong:
            raise ConfigError.of_many(_first(wrong), f"the trace: the model is served with {max_model_len} tokens")


def load_trace(path: str, directory: Path, seed: int) -> Trace:
    """Read the trace as ``read_trace`` does, and count its prompts' tokens by the model's own tokenizer."""
    from transformers import AutoTokenizer

    requests = read_trace(Path(path))
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    for number, request in enumerate(requests):
        if request.prompt is not None:
            requests[number] = replace(request, prompt_tokens=len(tokenizer(request.prompt).input_ids))
    return Trace(tuple(requests), tokenizer, seed)


def read_trace(path: Path) -> list[TraceRequest]:
    """Read the requests; ConfigError says which lines are wrong, or that there are none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        hint = "it is relative to the workload's file"
        raise ConfigError(f"cannot read the trace {path}: {why}", hint=hint) from error
    requests, wrong = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                requests.append(_request(number, line))
            except ValueError as error:
                wrong.append(f"line {number}: {error}")
    if wrong:
        raise ConfigError.of_many(_first(wrong), f"the trace {path}")
    if not requests:
        raise ConfigError(f"the trace {path} has no requests", hint=f"a line for each: {FORMS}")
    return requests


def random_text(tokenizer: Any, tokens: int, seed: tuple[int, int]) -> str:
    """Random text of *tokens* tokens by *tokenizer*, special tokens included, or of nearly as many."""
    import numpy as np

    random = np.random.default_rng(seed)
    length = max(1, tokens - tokenizer.num_special_tokens_to_add())
    special = set(tokenizer.all_special_ids)
    ids: list[int] = []
    for _ in range(TRIES):
        while len(ids) < length:
            ids += [
                token
                for token in random.integers(tokenizer.vocab_size, size=length - len(ids)).tolist()
                if token not in special
            ]
        text: str = tokenizer.decode(ids[:length])
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == length:
            break
    return text


def _request(number: int, line: str) -> TraceRequest:
    """Parse a line; ValueError says what is wrong with it."""
    try:
        data = from_json(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or set(data) not in ({"prompt", "output_tokens"}, {"prompt_tokens", "output_tokens"}):
        raise ValueError(f"not of the form {FORMS}")
    for name in ("prompt_tokens", "output_tokens"):
        if name in data and not (type(data[name]) is int and data[name] > 0):
            raise ValueError(f"{name} is not a number above 0 (got {json.dumps(data[name])})")
    if "prompt" in data and not (isinstance(data["prompt"], str) and data["prompt"].encode(errors="ignore")):
        raise ValueError("prompt is not a text, or is empty")
    return TraceRequest(number, data.get("prompt"), data.get("prompt_tokens", 0), data["output_tokens"])


def _first(mistakes: list[str]) -> list[str]:
    hidden = len(mistakes) - SHOWN_MISTAKES
    return [*mistakes[:SHOWN_MISTAKES], *([f"… and {hidden} more"] if hidden > 0 else [])]
