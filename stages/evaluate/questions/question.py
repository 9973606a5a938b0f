"""A question to a served model: the request, and what counts as the right answer. What questions are made from besides
our own words: data sets of the Hub, each at one commit, and texts that no model was calibrated with, of which the
probability is asked, in bits per byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Literal

from stages.parts.model.corpora import read_documents
from stages.parts.model.description import chat_template
from stages.parts.model.hub import DatasetFile
from stages.parts.vllm.client import GREEDY, Access, given, post, usable

CHAT: Final = "/v1/chat/completions"
PLAIN: Final = "/v1/completions"
TIMEOUT_S: Final = 900.0
"""A question may wait for many others on a slow machine."""
NO_THINKING: Final = {"chat_template_kwargs": {"enable_thinking": False}}
"""Templates that can do so keep the model from thinking aloud, which takes more tokens than the answers here have."""
END_OF_THINKING: Final = "</think>"
Choice = Mapping[str, Any]
"""The first choice of a reply."""
Needs = Literal["nothing", "chat", "tools"]
"""What the model's tokenizer must have: a chat template, or one that shows the model its tools."""
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


@dataclass(frozen=True)
class Served:
    """A server under measurement, and the directory of the model that it serves."""

    access: Access
    directory: Path
    max_model_len: int
    parses_calls: bool = False
    """Whether it was started to find the calls of tools in what the model writes; otherwise they stay in the text."""

    @cached_property
    def chats(self) -> bool:
        return bool(chat_template(self.directory))


@dataclass(frozen=True)
class Question:
    path: str
    body: Mapping[str, Any]
    """The request, without the model and without what makes the answer greedy."""
    grade: Callable[[Choice], Any]
    """An answer's value under the task's metric. Whatever a model writes is graded; a choice without the fields of the
    API is an error."""
    cluster: str | None = None
    """The name of what it shares with other questions of its task, such as a text; None if it shares nothing."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.path, self.body], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class QuestionTask:
    needs: Needs
    questions: Callable[[Served], Iterable[Question]]
    """The same questions in the same order for every variant of a model."""
    metric: str = "acc"


def asked(served: Served, prompt: str, max_tokens: int, right: Callable[[str], bool]) -> Question:
    """*prompt* as a user's message, or for a model without a chat template as the beginning of a text."""
    if served.chats:
        return message(prompt, max_tokens, lambda choice: right(said(choice)))
    body = {"prompt": prompt, "max_tokens": max_tokens}
    return Question(PLAIN, body, lambda choice: float(right(str(choice.get("text") or ""))))


def message(prompt: str, max_tokens: int, right: Callable[[Choice], bool], **options: Any) -> Question:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, **NO_THINKING, **options}
    return Question(CHAT, body, lambda choice: float(right(choice)))


def said(choice: Choice) -> str:
    """Extract the text of a chat's answer without the thoughts before it, or if it ended within them, the thoughts;
    empty if there is none."""
    answer = choice.get("message") or {}
    return str(answer.get("content") or answer.get("reasoning") or "").rpartition(END_OF_THINKING)[2]


def answers(served: Served, questions: Sequence[Question], concurrency: int) -> list[tuple[Any, int | None]]:
    """Ask all questions, *concurrency* at a time; the graded answers and their tokens, if the server counts them, in
    the order of the questions."""

    def one(question: Question) -> tuple[Any, int | None]:
        reply = post(served.access, question.path, {**question.body, **GREEDY}, TIMEOUT_S)
        with usable(served.access.at(question.path)):
            return question.grade(reply["choices"][0]), reply.get("usage", {}).get("completion_tokens")

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, questions))


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
