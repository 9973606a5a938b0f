"""The held-out side as evaluation data: documents for perplexity, and continuations to choose from."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from tests.demo.corpus import PASSAGE_CHARS, Corpus, words

SEED: Final = 7
HELD_OUT_TEXTS: Final = 80
CONTINUATIONS: Final = 800
CONTINUATION_WORDS: Final = 8
SHORTEST_CONTEXT_WORDS: Final = 30
LONGEST_CONTEXT_WORDS: Final = 40
CUT_EVERY_WORDS: Final = 50
# Wrong choices are drawn from so many that are about as likely, by their words alone, as the right one.
NEAREST: Final = 8


@dataclass(frozen=True)
class Span:
    """Words of a held-out document, with those that come before them in their passage."""

    document: str
    context: str
    text: str
    log_frequency: float
    """Natural log of the product of the words' frequencies in the training text."""


def held_out_texts(passages: dict[str, list[str]], count: int = HELD_OUT_TEXTS) -> list[dict[str, str]]:
    """Passages of a length that fits the context, in turn from each document; ``document`` names it."""
    shortest, longest = PASSAGE_CHARS
    columns = [
        [{"document": name, "text": text} for text in texts if shortest <= len(text) <= longest and is_prose(text)]
        for name, texts in sorted(passages.items())
    ]
    in_turn = [row for rank in zip_longest(*columns) for row in rank if row]
    return in_turn[:count]


def is_prose(text: str) -> bool:
    """Mostly words: not an interactive session, a table or a listing."""
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return ">>>" not in text and letters > 0.88 * len(text)


def continuation_items(corpus: Corpus) -> list[dict[str, Any]]:
    """Questions with four ``choices``; ``answer`` is the index of the one that the document has.

    The other three continue other held-out documents, and their words are about as frequent: else
    the more common words would win, whatever the context.
    """
    chance = random.Random(SEED)
    spans = list(cut_spans(corpus))
    chance.shuffle(spans)
    items = []
    for span in spans[:CONTINUATIONS]:
        choices = [other.text for other in chance.sample(nearest(span, spans), 3)]
        answer = chance.randrange(4)
        choices.insert(answer, span.text)
        if len(set(choices)) == len(choices):
            items.append({"document": span.document, "context": span.context, "choices": choices, "answer": answer})
    return items


def nearest(span: Span, spans: list[Span]) -> list[Span]:
    """The ``NEAREST`` spans of other documents, by the frequency of their words."""
    others = [other for other in spans if other.document != span.document]
    return sorted(others, key=lambda other: abs(other.log_frequency - span.log_frequency))[:NEAREST]


def cut_spans(corpus: Corpus) -> Iterator[Span]:
    """Every ``CUT_EVERY_WORDS`` words of each held-out passage in prose."""
    counts = Counter(word for texts in corpus.train.values() for text in texts for word in words(text))
    total = counts.total() + len(counts)
    for document, texts in sorted(corpus.held_out.items()):
        for text in filter(is_prose, texts):
            found = list(re.finditer(r"\S+", text))
            for first in range(SHORTEST_CONTEXT_WORDS, len(found) - CONTINUATION_WORDS, CUT_EVERY_WORDS):
                span = " ".join(match.group() for match in found[first : first + CONTINUATION_WORDS])
                frequency = sum(math.log((counts[word] + 1) / total) for word in words(span))
                start = found[max(0, first - LONGEST_CONTEXT_WORDS)].start()
                yield Span(document, text[start : found[first].start()].rstrip(), span, frequency)
