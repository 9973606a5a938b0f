"""Alters valid documents at random, in the ways at which parsers are known to fail."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Final

DEEP: Final = "nested as deeply as no parser likes it"
NESTED: Final = 5_000
ODD: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**400, 10**4290, -0.0, 0.5, 1e308, float("inf"), float("nan")),
    *("", "0", "auto", "a" * 300, "\0", "a\nb", "\x1b]0;title\x07", "\ud800", "\u202e", "../../../etc/passwd"),
    *("/etc/passwd", "{{workflow.name}}", "{{ ''.__class__.__mro__ }}", "{% for x in range(10**9) %}x{% endfor %}"),
    *("2024-13-45", "1e999", "NaN", "4", "*.*", "[", "(a+)+$", "C:\\x", "https://host.invalid/x", DEEP),
    *([], {}, [[]], [{}], {"": {}}, [None], [0] * 40, [9_999_999] * 40, {"a": {"b": {}}}, {"config_groups": []}),
)
MOST_BYTES: Final = 100
"""Of what is cut out of, or put into, a text at once."""


def altered(value: Any, random: Random) -> Any:
    """Alter a JSON value in one place: remove, rename, repeat or exchange something in it."""
    inside = random.random() < 0.9
    if isinstance(value, dict) and value and inside:
        name = random.choice(sorted(value))
        chance = random.random()
        if chance < 0.1:
            return {key: each for key, each in value.items() if key != name}
        if chance < 0.15:
            return {**value, random.choice([each for each in ODD if isinstance(each, str)]): value[name]}
        if chance < 0.2:
            return {**value, name: value[random.choice(sorted(value))]}
        return {**value, name: altered(value[name], random)}
    if isinstance(value, list) and value and inside:
        place = random.randrange(len(value))
        chance = random.random()
        if chance < 0.1:
            return [*value[:place], *value[place + 1 :]]
        if chance < 0.2:
            return [*value, value[place]]
        return [*value[:place], altered(value[place], random), *value[place + 1 :]]
    if type(value) is int and inside:
        small, large = value % 2**53, value * 2**40 % 10**4290
        return random.choice((value + 1, value - 1, -value, large, float(small), str(small), [value]))
    if isinstance(value, str) and value and inside:
        return damaged(value.encode(errors="surrogatepass"), random).decode(errors="replace")
    return random.choice(ODD)


def some(value: Any, random: Random) -> Any:
    """Alter a JSON value in none to four places."""
    for _ in range(random.randrange(5)):
        value = altered(value, random)
    return value


def damaged(content: bytes, random: Random) -> bytes:
    """Exchange, cut out, repeat or put in some bytes."""
    start = random.randrange(len(content) + 1)
    length = random.randrange(min(MOST_BYTES, len(content) - start) + 1)
    put = random.choice(
        (b"", content[start : start + length] * 2, random.randbytes(4), b"\xff", b"\0", b"\n", b"}", b"[" * 8)
    )
    return content[:start] + put + content[start + random.choice((0, length)) :]


def text(value: Any, random: Random) -> bytes:
    """Write an altered value as JSON, of which a tenth is damaged."""
    written = json.dumps(some(value, random)).replace(f'"{DEEP}"', "[" * NESTED + "]" * NESTED).encode()
    return damaged(written, random) if random.random() < 0.1 else written
