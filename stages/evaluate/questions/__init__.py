"""The quality tasks of our own, by name: what lm-eval cannot ask for, or not without other downloads.

To add one, write a function that makes the questions from a ``Served`` and add a line here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from stages.evaluate.questions.instructions import ifeval, instructions
from stages.evaluate.questions.question import DATA, KIND, QuestionTask, of_text
from stages.evaluate.questions.recall import recall
from stages.evaluate.questions.requests import structured_outputs, tool_calls
from stages.parts.base.files import digest_of
from stages.parts.model.corpora import text_digest

RECIPE: Final = 2
"""Increased when the same questions are asked or graded in another way, so that older answers do not count."""
TEXTS: Final = ("prose", "code")
"""What the questions are made from, in ``configs/held-out``."""
OWN: Final[dict[str, QuestionTask]] = {
    "ifeval": QuestionTask("chat", ifeval),
    "instructions": QuestionTask("chat", instructions),
    "structured_output": QuestionTask("chat", structured_outputs),
    "tool_calls": QuestionTask("tools", tool_calls),
    "long_context": QuestionTask("nothing", recall),
    **{f"perplexity_{text}": QuestionTask("nothing", partial(of_text, text), "bits_per_byte") for text in TEXTS},
}
DEFINED: Final = frozenset({"gsm8k"})
"""What ``stages/evaluate/tasks`` defines for lm-eval. All of it needs a chat template."""


def questions_digest(tasks: Iterable[str]) -> str | None:
    """Compute the digest of what our own among *tasks* ask; None if there are none."""
    if (OWN.keys() | DEFINED).isdisjoint(tasks):
        return None
    texts = {text: text_digest(text, KIND) for text in TEXTS}
    return digest_of({"recipe": RECIPE, "data": {name: dataset.commit for name, dataset in DATA.items()}} | texts)
