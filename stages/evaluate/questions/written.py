"""Prompts of our own in IFEval's form: short texts to write, each with some instructions that a program can check."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stages.parts.base.settings import Settings, parse, read_yaml

COUNT: Final = 7490
"""With IFEval's 510, eight thousand."""
SEED: Final = 20260103
TABLE: Final = Path(__file__).with_suffix(".yaml")


class Two(Settings):
    """Two different ones of these are drawn."""

    two: Sequence[str]


class Instruction(Settings):
    words: str
    name: str
    arguments: Mapping[str, str | Sequence[Any] | Two] = {}

    def drawn(self, chance: random.Random) -> tuple[str, str, dict[str, Any]]:
        """Draw the arguments, and return them after the words and the name."""
        arguments = {key: _drawn(chance, values) for key, values in self.arguments.items()}
        return self.words.format(**arguments), self.name, arguments


class Written(Settings):
    """The table, which says itself what its fields are."""

    texts: tuple[str, ...]
    topics: tuple[str, ...]
    short: Instruction
    shapes: tuple[Instruction, ...]
    further: tuple[Instruction, ...]
    wording: tuple[Instruction, ...]
    small: Instruction


def rows() -> list[dict[str, Any]]:
    """``COUNT`` different prompts, as rows of IFEval's table: three or four instructions that can be followed
    together."""
    table = parse(Written, read_yaml(TABLE), str(TABLE))
    chance, prompts = random.Random(SEED), dict[str, dict[str, Any]]()
    while len(prompts) < COUNT:
        kinds = [chance.choice(kind) for kind in (table.shapes, table.further, table.wording)]
        small = [table.small] if chance.random() < 0.25 else []
        chosen = [table.short, kinds[0], chance.choice(kinds[1:]), *small]
        words, names, arguments = zip(*(instruction.drawn(chance) for instruction in chosen), strict=True)
        task = f"Write {chance.choice(table.texts)} about {chance.choice(table.topics)}."
        prompt = " ".join([task, *words])
        prompts.setdefault(prompt, {"prompt": prompt, "instruction_id_list": list(names), "kwargs": list(arguments)})
    return list(prompts.values())


def _drawn(chance: random.Random, values: str | Sequence[Any] | Two) -> Any:
    if isinstance(values, Two):
        return chance.sample(values.two, 2)
    return values if isinstance(values, str) else chance.choice(values)
