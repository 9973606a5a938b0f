"""Prompts of our own in IFEval's form: short texts to write, each with some instructions that a program can check."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

COUNT: Final = 7490
"""With IFEval's 510, eight thousand."""
SEED: Final = 20260103
TEXTS: Final = (
    *("a note", "a letter", "a short story", "an advertisement", "a diary entry", "a piece of advice", "a message"),
)
TOPICS: Final = (
    *("a lost umbrella", "the first day in a new job", "a neighbour's dog", "a train that is late", "baking bread"),
    *("moving to another town", "a broken bicycle", "an old photograph", "learning to swim", "a night market"),
    *("repairing a roof", "a chess tournament", "the smell of rain", "a school play", "growing tomatoes"),
    *("a forgotten birthday", "a walk in the snow", "a power cut", "a visit to the dentist", "renting a boat"),
)
WORDS: Final = ("window", "river", "paper", "morning", "stone", "colour", "garden", "music", "bridge", "silence")
AVOIDED: Final = ("very", "good", "nice", "and", "but", "really", "always", "never")
ENDINGS: Final = ("That is all for today.", "Tell me what you think.", "We will see.", "Nothing else matters.")


@dataclass(frozen=True)
class Two:
    """Two different ones of these are drawn."""

    of: Sequence[str]


@dataclass(frozen=True)
class Instruction:
    words: str
    """In the prompt, with the arguments by their names."""
    name: str
    """IFEval's."""
    arguments: Mapping[str, str | Sequence[Any] | Two] = field(default_factory=dict)
    """IFEval's: a text as it is, one value of a sequence, or two."""

    def drawn(self, chance: random.Random) -> tuple[str, str, dict[str, Any]]:
        """Draw the arguments, and return them after the words and the name."""
        arguments = {key: _drawn(chance, values) for key, values in self.arguments.items()}
        return self.words.format(**arguments), self.name, arguments


SHORT: Final = Instruction(
    "Use fewer than {num_words} words.",
    "length_constraints:number_words",
    {"relation": "less than", "num_words": (50, 60, 80, 100)},
)
SHAPES: Final = (
    Instruction(
        'Answer with exactly {num_bullets} bullet points, each of which begins with "* ".',
        "detectable_format:number_bullet_lists",
        {"num_bullets": range(2, 6)},
    ),
    Instruction(
        "Write exactly {num_paragraphs} paragraphs, separated by the markdown divider ***.",
        "length_constraints:number_paragraphs",
        {"num_paragraphs": range(2, 4)},
    ),
    Instruction(
        "Write at least {num_sentences} sentences.",
        "length_constraints:number_sentences",
        {"relation": "at least", "num_sentences": range(3, 6)},
    ),
    Instruction("Give it a title in double angular brackets, such as <<title>>.", "detectable_format:title"),
    Instruction("Wrap the whole answer in double quotation marks.", "startend:quotation"),
)
FURTHER: Final = (
    Instruction('End with exactly these words: "{end_phrase}"', "startend:end_checker", {"end_phrase": ENDINGS}),
    Instruction(
        "Add a postscript at the end that begins with P.S.",
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
    ),
    Instruction(
        "Use at least {num_placeholders} placeholders in square brackets, such as [name].",
        "detectable_content:number_placeholders",
        {"num_placeholders": range(2, 5)},
    ),
)
WORDING: Final = (
    Instruction("Do not use any commas.", "punctuation:no_comma"),
    Instruction(
        'Use neither the word "{forbidden_words[0]}" nor the word "{forbidden_words[1]}".',
        "keywords:forbidden_words",
        {"forbidden_words": Two(AVOIDED)},
    ),
    Instruction(
        'Include the words "{keywords[0]}" and "{keywords[1]}".', "keywords:existence", {"keywords": Two(WORDS)}
    ),
    Instruction(
        'Use the word "{keyword}" at least {frequency} times.',
        "keywords:frequency",
        {"relation": "at least", "keyword": WORDS, "frequency": range(2, 4)},
    ),
)
SMALL: Final = Instruction("Write everything in lowercase letters.", "change_case:english_lowercase")


def rows() -> list[dict[str, Any]]:
    """``COUNT`` different prompts, as rows of IFEval's table: three or four instructions that can be followed
    together."""
    chance, prompts = random.Random(SEED), dict[str, dict[str, Any]]()
    while len(prompts) < COUNT:
        shape, further, wording = chance.choice(SHAPES), chance.choice(FURTHER), chance.choice(WORDING)
        small = [SMALL] if chance.random() < 0.25 else []
        chosen = [SHORT, shape, chance.choice((further, wording)), *small]
        words, names, arguments = zip(*(instruction.drawn(chance) for instruction in chosen), strict=True)
        task = f"Write {chance.choice(TEXTS)} about {chance.choice(TOPICS)}."
        prompt = " ".join([task, *words])
        prompts.setdefault(prompt, {"prompt": prompt, "instruction_id_list": list(names), "kwargs": list(arguments)})
    return list(prompts.values())


def _drawn(chance: random.Random, values: str | Sequence[Any] | Two) -> Any:
    if isinstance(values, Two):
        return chance.sample(values.of, 2)
    return values if isinstance(values, str) else chance.choice(values)
