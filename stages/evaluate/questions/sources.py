"""What questions are made from besides our own words: data sets of the Hub, each at one commit, and texts that no model
was calibrated with, of which the probability is asked, in bits per byte."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from stages.evaluate.questions.question import PLAIN, Choice, Question, Served
from stages.parts.model.corpora import read_documents
from stages.parts.model.hub import DatasetFile
from stages.parts.vllm.completions import given

KIND: Final = "held-out"
IFEVAL: Final = DatasetFile("google/IFEval", "966cd89545d6b6acfd7638bc708b98261ca58e84", "ifeval_input_data.jsonl")
DATA: Final = {
    "gsm8k": DatasetFile(
        "openai/gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee", "main/test-00000-of-00001.parquet"
    ),
    "ifeval": IFEVAL,
    "instructions": IFEVAL,
}
"""What a task needs, by its name."""


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
