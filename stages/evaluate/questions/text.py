"""The probability that a model gives to text that it was not calibrated with, in bits per byte."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from stages.evaluate.questions.question import PLAIN, Choice, Question, Served
from stages.parts.model.corpora import read_documents
from stages.parts.vllm.completions import given

KIND: Final = "held-out"


def of_text(name: str, served: Served) -> Iterator[Question]:
    """Make the questions about a text in ``configs/held-out/``, one for each document."""
    # A token has one character at least, nearly always.
    longest = max(1, served.max_model_len // 2)
    for document in read_documents(name, KIND):
        text = document[:longest]
        body = {"prompt": text, "max_tokens": 1, "prompt_logprobs": 0}
        yield Question(PLAIN, body, partial(_likelihood, len(text.encode())))


def _likelihood(size: int, choice: Choice) -> tuple[float, int]:
    """Nats and bytes. Without further tokens asked for, each place has the text's own alone."""
    return sum(float(token["logprob"]) for place in given(choice) for token in place.values()), size
