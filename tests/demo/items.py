"""The held-out side as evaluation data: documents for perplexity, and continuations to choose from."""

from __future__ import annotations

import random
from itertools import zip_longest
from typing import Any, Final

from tests.demo.corpus import PASSAGE_CHARS

SEED: Final = 7
HELD_OUT_TEXTS: Final = 80
CONTINUATIONS: Final = 200
CONTEXT_WORDS: Final = (16, 40)
CONTINUATION_WORDS: Final = (8, 12)


def held_out_texts(passages: dict[str, list[str]]) -> list[dict[str, str]]:
    """Passages of a length that fits the context, in turn from each document; ``document`` names it."""
    shortest, longest = PASSAGE_CHARS
    columns = [
        [{"document": name, "text": text} for text in texts if shortest <= len(text) <= longest and is_prose(text)]
        for name, texts in sorted(passages.items())
    ]
    in_turn = [row for rank in zip_longest(*columns) for row in rank if row]
    return in_turn[:HELD_OUT_TEXTS]


def is_prose(text: str) -> bool:
    """Mostly words: not an interactive session, a table or a listing."""
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return ">>>" not in text and letters > 0.88 * len(text)


def continuation_items(passages: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Questions with four ``choices``; ``answer`` is the index of the one that the document has.

    The other three are true continuations of other documents, of the same number of words.
    """
    chance = random.Random(SEED)
    spans = [(name, *cut) for name, text in prose_paragraphs(passages) for cut in cuts(text, chance)]
    chance.shuffle(spans)
    items = []
    for name, context, continuation in spans[:CONTINUATIONS]:
        others = [words for other, _, words in spans if other != name]
        choices = [" ".join(words[: len(continuation)]) for words in chance.sample(others, 3)]
        answer = chance.randrange(4)
        choices.insert(answer, " ".join(continuation))
        items.append({"context": context, "choices": choices, "answer": answer})
    return items


def prose_paragraphs(passages: dict[str, list[str]]) -> list[tuple[str, str]]:
    """(document, paragraph) of every paragraph that is running text."""
    return [
        (name, paragraph)
        for name, texts in sorted(passages.items())
        for text in texts
        for paragraph in text.split("\n\n")
        if is_prose(paragraph)
    ]


def cuts(paragraph: str, chance: random.Random) -> list[tuple[str, list[str]]]:
    """(context, continuation's words) from the paragraph's start, or nothing where it is too short."""
    words = paragraph.split()
    context = chance.randint(*CONTEXT_WORDS)
    if len(words) < context + CONTINUATION_WORDS[1]:
        return []
    return [(" ".join(words[:context]), words[context : context + CONTINUATION_WORDS[1]])]
