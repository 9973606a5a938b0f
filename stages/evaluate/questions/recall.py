"""Recall over a long context: a fact somewhere in a text that fills what the server serves.

The needles and questions are like those of RULER's retrieval tasks (Hsieh et al., 2024). All questions about one text
share its tokens, so a server with a prefix cache reads it once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from stages.evaluate.questions.question import KIND, Question, Served, asked
from stages.parts.model.corpora import read_documents
from stages.parts.vllm.client import tokenize

SEED: Final = 20260102
LENGTHS: Final = (1.0, 0.5, 0.25)
"""Shares of the served context, in turn."""
TEXTS: Final = 192
NEEDLES: Final = 48
"""At most, in one text."""
TOKENS_PER_NEEDLE: Final = 64
"""At least, so that most of a short text is not needles."""
AROUND: Final = 160
"""Tokens for the question, the chat template and the answer."""
MAX_TOKENS: Final = 32
SHRINK: Final = 0.97
CODE: Final = re.compile(r"\d{7}")
COLOURS: Final = (
    *("red", "blue", "green", "grey", "white", "black"),
    *("amber", "violet", "silver", "copper", "ivory", "pink"),
)
THINGS: Final = ("harbour", "archive", "tunnel", "garden", "tower", "cellar", "hangar", "vault", "chapel", "workshop")


@dataclass(frozen=True)
class Needle:
    place: str
    code: str

    @property
    def sentence(self) -> str:
        return f"The access code of the {self.place} is {self.code}."


def recall(served: Served) -> Iterator[Question]:
    """For each text, a question for each of its needles. A text is sentences in a random order, with the needles spread
    evenly, as many as have room by the server's own tokenizer."""

    def tokens(text: str) -> int:
        return len(tokenize(served.access, text))

    sentences = [
        sentence.strip()
        for document in read_documents("prose", KIND)
        for sentence in re.findall(r"[^.!?]+[.!?]+[\"”]?", document)
    ]
    per_sentence = tokens(" ".join(sentences)) / len(sentences)
    for number in range(TEXTS):
        room = int(LENGTHS[number % len(LENGTHS)] * (served.max_model_len - AROUND))
        chance = random.Random(SEED + number)
        count = max(1, min(NEEDLES, room // TOKENS_PER_NEEDLE))
        places = chance.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS], count)
        needles = [Needle(place, str(chance.randrange(10**6, 10**7))) for place in places]
        left = max(0.0, room - tokens(" ".join(needle.sentence for needle in needles)))
        hay = [chance.choice(sentences) for _ in range(int(left / per_sentence))]
        text = " ".join(_spread(hay, needles))
        while hay and tokens(text) > room:
            hay = hay[: int(len(hay) * SHRINK)]
            text = " ".join(_spread(hay, needles))
        for needle in needles:
            yield replace(_question(served, text, needle), cluster=f"text {number}")


def _question(served: Served, text: str, needle: Needle) -> Question:
    if served.chats:
        prompt = f"{text}\n\nWhat is the access code of the {needle.place}? Answer with the code only."
    else:
        prompt = f"{text}\n\nAs was said above, the access code of the {needle.place} is"
    return asked(served, prompt, MAX_TOKENS, lambda answer: CODE.findall(answer)[:1] == [needle.code])


def _spread(hay: list[str], needles: list[Needle]) -> Iterator[str]:
    """Each needle after its share of the hay, the first at the very beginning and the last at the very end."""
    position = 0
    for number, needle in enumerate(needles):
        until = len(hay) * number // max(1, len(needles) - 1)
        yield from hay[position:until]
        yield needle.sentence
        position = until
    yield from hay[position:]
