"""IFEval (Zhou et al., 2023): prompts with instructions that a program can check, such as "use at least 300 words".

lm-eval's own task fetches a tokenizer's data from elsewhere when it is imported, and needs a language detector. The
checks here need neither: sentences and words are found by rules, and prompts that demand a language are left out. As
with IFEval's strict accuracy, an answer is right if it follows all instructions of its prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stages.evaluate.questions import written
from stages.evaluate.questions.question import DATA, Question, Served, asked
from stages.evaluate.questions.requests import parsed, without_fence
from stages.parts.model.hub import dataset_file

MIXED: Final = 1490
"""Prompts of ours among IFEval's 510; those after them are all ours."""
MAX_TOKENS: Final = 1280
"""lm-eval's limit."""
WORD: Final = re.compile(r"\w+")
SENTENCE_ENDS: Final = re.compile(r"[.!?]+[\"')\]”’]*(?=\s|$)")
ABBREVIATION: Final = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|[A-Z])\.(?=\s)")
DIVIDER: Final = re.compile(r"\s?\*\*\*\s?")
BULLET: Final = re.compile(r"^\s*(?:\*[^*]|-)", re.MULTILINE)
HIGHLIGHT: Final = re.compile(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*")
TITLE: Final = re.compile(r"<<[^\n]+>>")
PLACEHOLDER: Final = re.compile(r"\[.*?\]")
RESPONSES: Final = "******"
CONSTRAINED: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
QUOTES: Final = "\"'“”‘’"
Check = Callable[..., bool]
"""From the answer and the instruction's arguments to whether it is followed."""


def ifeval(served: Served) -> Iterator[Question]:
    return _questions(served, rows(dataset_file(DATA["ifeval"])))


def instructions(served: Served) -> Iterator[Question]:
    """IFEval's prompts and ours in turn, since IFEval alone has too few to show that little was lost."""
    theirs, ours = rows(dataset_file(DATA["ifeval"])), written.rows()
    mixed = ours[:MIXED]
    every = len(mixed) // max(1, len(theirs)) + 1
    for number, row in enumerate(theirs):
        mixed.insert(number * every, row)
    return _questions(served, [*mixed, *ours[MIXED:]])


def _questions(served: Served, prompts: Sequence[Mapping[str, Any]]) -> Iterator[Question]:
    limit = min(MAX_TOKENS, served.max_model_len // 2)
    for row in prompts:
        yield asked(served, row["prompt"], limit, _follows_all(row["instruction_id_list"], row["kwargs"]))


def rows(path: Path) -> list[dict[str, Any]]:
    """Select the prompts of which every instruction can be checked."""
    lines = path.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines if line.strip()]
    return [prompt for prompt in prompts if all(name in CHECKS for name in prompt["instruction_id_list"])]


def _follows_all(names: Sequence[str], arguments: Sequence[Mapping[str, Any]]) -> Callable[[str], bool]:
    def right(answer: str) -> bool:
        return bool(answer.strip()) and all(
            follows(answer, name, settings) for name, settings in zip(names, arguments, strict=True)
        )

    return right


def follows(answer: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the answer follows one instruction. The Hub's table gives each the arguments of all others as null."""
    return CHECKS[name](answer, **{key: value for key, value in arguments.items() if value is not None})


def compared(count: int, relation: str, limit: int) -> bool:
    """IFEval has these two relations."""
    return count < limit if relation == "less than" else count >= limit


def sentences(text: str) -> int:
    text = ABBREVIATION.sub(lambda match: match[0][:-1], text).strip()
    ends = [match.end() for match in SENTENCE_ENDS.finditer(text)]
    return len(ends) + bool(WORD.search(text, ends[-1] if ends else 0))


def occurrences(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.IGNORECASE))


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Between dividers; only at the beginning and the end there may be nothing."""
    parts = DIVIDER.split(text)
    inner = [part for place, part in enumerate(parts) if part.strip() or 0 < place < len(parts) - 1]
    return len(inner) == num_paragraphs and all(part.strip() for part in inner)


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\n", text) if paragraph.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip(QUOTES)
    return re.split(r"[.,?!\"']", word)[0].casefold() == first_word.casefold()


def _postscript(text: str, postscript_marker: str) -> bool:
    letters = {"P.P.S": "pps", "P.S.": "ps"}.get(postscript_marker)
    pattern = r"\.?\s?".join(letters) + r"\b" if letters else re.escape(postscript_marker)
    return bool(re.search(r"^\s*" + pattern, text, re.IGNORECASE | re.MULTILINE))


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split(RESPONSES)]
    responses = [part for place, part in enumerate(parts) if part or 0 < place < len(parts) - 1]
    return len(responses) == 2 and all(responses) and responses[0] != responses[1]


CHECKS: Final[dict[str, Check]] = {
    "keywords:existence": lambda text, keywords: all(occurrences(keyword, text) for keyword in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: compared(
        occurrences(keyword, text), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(occurrences(rf"\b{forbidden_word}\b", text) for forbidden_word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: compared(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: compared(
        sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: compared(
        len(WORD.findall(text)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(PLACEHOLDER.findall(text)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: len(BULLET.findall(text)) == num_bullets,
    "detectable_format:constrained_response": lambda text: any(option in text for option in CONSTRAINED),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        sum(bool(highlight.strip("* ")) for highlight in HIGHLIGHT.findall(text)) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": lambda text: parsed(without_fence(text)) is not None,
    "detectable_format:title": lambda text: any(title.strip("<> ") for title in TITLE.findall(text)),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().casefold().startswith(prompt_to_repeat.strip().casefold())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').casefold().endswith(end_phrase.strip().casefold())
    ),
    "startend:quotation": lambda text: bool(re.fullmatch(r'\s*".*"\s*', text, re.DOTALL)),
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: compared(
        sum(word.isupper() for word in WORD.findall(text)), capital_relation, capital_frequency
    ),
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}
