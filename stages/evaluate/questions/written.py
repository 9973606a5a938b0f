"""Prompts of our own in IFEval's form: short texts to write, each with some instructions that a program can check."""

from __future__ import annotations

import random
from typing import Any, Final

COUNT: Final = 7490
"""With IFEval's 510, eight thousand."""
SEED: Final = 20260103
TEXTS: Final = (
    "a note",
    "a letter",
    "a short story",
    "an advertisement",
    "a diary entry",
    "a piece of advice",
    "a message",
)
TOPICS: Final = (
    "a lost umbrella",
    "the first day in a new job",
    "a neighbour's dog",
    "a train that is late",
    "baking bread",
    "moving to another town",
    "a broken bicycle",
    "an old photograph",
    "learning to swim",
    "a night market",
    "repairing a roof",
    "a chess tournament",
    "the smell of rain",
    "a school play",
    "growing tomatoes",
    "a forgotten birthday",
    "a walk in the snow",
    "a power cut",
    "a visit to the dentist",
    "renting a boat",
)
WORDS: Final = ("window", "river", "paper", "morning", "stone", "colour", "garden", "music", "bridge", "silence")
AVOIDED: Final = ("very", "good", "nice", "and", "but", "really", "always", "never")
ENDINGS: Final = ("That is all for today.", "Tell me what you think.", "We will see.", "Nothing else matters.")
Instruction = tuple[str, str, dict[str, Any]]
"""The words of a prompt, IFEval's name of the instruction, and its arguments."""


def rows() -> list[dict[str, Any]]:
    """``COUNT`` different prompts, as rows of IFEval's table."""
    chance, prompts = random.Random(SEED), dict[str, dict[str, Any]]()
    while len(prompts) < COUNT:
        instructions = _instructions(chance)
        task = f"Write {chance.choice(TEXTS)} about {chance.choice(TOPICS)}."
        prompt = " ".join([task, *(words for words, _, _ in instructions)])
        row = {
            "instruction_id_list": [name for _, name, _ in instructions],
            "kwargs": [arguments for _, _, arguments in instructions],
        }
        prompts.setdefault(prompt, {"prompt": prompt} | row)
    return list(prompts.values())


def _instructions(chance: random.Random) -> list[Instruction]:
    """Three or four that can be followed together."""
    shape = chance.choice((_bullets, _paragraphs, _sentences, _title, _quotation))
    further = chance.choice((_ending, _postscript, _placeholders))
    words = chance.choice((_no_comma, _forbidden, _existing, _frequent))
    small = [_small] if chance.random() < 0.25 else []
    return [make(chance) for make in (_short, shape, chance.choice((further, words)), *small)]


def _short(chance: random.Random) -> Instruction:
    most = chance.choice((50, 60, 80, 100))
    name = "length_constraints:number_words"
    return f"Use fewer than {most} words.", name, {"relation": "less than", "num_words": most}


def _bullets(chance: random.Random) -> Instruction:
    count = chance.randrange(2, 6)
    words = f'Answer with exactly {count} bullet points, each of which begins with "* ".'
    return words, "detectable_format:number_bullet_lists", {"num_bullets": count}


def _paragraphs(chance: random.Random) -> Instruction:
    count = chance.randrange(2, 4)
    words = f"Write exactly {count} paragraphs, separated by the markdown divider ***."
    return words, "length_constraints:number_paragraphs", {"num_paragraphs": count}


def _sentences(chance: random.Random) -> Instruction:
    count = chance.randrange(3, 6)
    arguments = {"relation": "at least", "num_sentences": count}
    return f"Write at least {count} sentences.", "length_constraints:number_sentences", arguments


def _title(_: random.Random) -> Instruction:
    return "Give it a title in double angular brackets, such as <<title>>.", "detectable_format:title", {}


def _quotation(_: random.Random) -> Instruction:
    return "Wrap the whole answer in double quotation marks.", "startend:quotation", {}


def _ending(chance: random.Random) -> Instruction:
    phrase = chance.choice(ENDINGS)
    return f'End with exactly these words: "{phrase}"', "startend:end_checker", {"end_phrase": phrase}


def _postscript(_: random.Random) -> Instruction:
    arguments = {"postscript_marker": "P.S."}
    return "Add a postscript at the end that begins with P.S.", "detectable_content:postscript", arguments


def _placeholders(chance: random.Random) -> Instruction:
    count = chance.randrange(2, 5)
    words = f"Use at least {count} placeholders in square brackets, such as [name]."
    return words, "detectable_content:number_placeholders", {"num_placeholders": count}


def _no_comma(_: random.Random) -> Instruction:
    return "Do not use any commas.", "punctuation:no_comma", {}


def _forbidden(chance: random.Random) -> Instruction:
    words = chance.sample(AVOIDED, 2)
    sentence = f'Use neither the word "{words[0]}" nor the word "{words[1]}".'
    return sentence, "keywords:forbidden_words", {"forbidden_words": words}


def _existing(chance: random.Random) -> Instruction:
    words = chance.sample(WORDS, 2)
    return f'Include the words "{words[0]}" and "{words[1]}".', "keywords:existence", {"keywords": words}


def _frequent(chance: random.Random) -> Instruction:
    word, count = chance.choice(WORDS), chance.randrange(2, 4)
    arguments = {"relation": "at least", "keyword": word, "frequency": count}
    return f'Use the word "{word}" at least {count} times.', "keywords:frequency", arguments


def _small(_: random.Random) -> Instruction:
    return "Write everything in lowercase letters.", "change_case:english_lowercase", {}
