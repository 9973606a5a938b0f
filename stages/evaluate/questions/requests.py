"""Requests of users with what they ask for, as the arguments of a function: generated, the same everywhere.

An answer counts only if it is valid and every value is right, which any schema that allows the values includes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stages.evaluate.questions.question import Choice, Question, Served, message, said
from stages.parts.base.settings import read_yaml

COUNT: Final = 8000
SEED: Final = 20260101
MAX_TOKENS: Final = 256
FENCE: Final = "```"
JSON_BEGINS: Final = re.compile(r"[{\[]")

FIRST_NUMBER: Final = 2
TABLE: Final = read_yaml(Path(__file__).with_suffix(".yaml"))
WORDS: Final[Mapping[str, Sequence[str]]] = TABLE["words"]

Arguments = dict[str, Any]
Drawn = Callable[[random.Random], tuple[str, Arguments]]


@dataclass(frozen=True)
class Function:
    name: str
    description: str
    properties: dict[str, dict[str, Any]]
    drawn: Drawn
    """A user's words, and the arguments that they ask for."""

    def schema(self) -> dict[str, Any]:
        """All properties are required, and no other is allowed."""
        required = list(self.properties)
        return {"type": "object", "properties": self.properties, "required": required, "additionalProperties": False}

    def tool(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.schema()}
        return {"type": "function", "function": function}


def structured_outputs(served: Served) -> list[Question]:  # noqa: ARG001
    """Ask for arguments as a JSON object by a schema, without the engine's help: just that object, and nothing else."""
    return [_structured(*request) for request in drawn(SEED)]


def _structured(function: Function, words: str, arguments: Arguments) -> Question:
    prompt = (
        f"A customer writes:\n\n{words}\n\nWrite what the customer asks for as one JSON object that is valid under "
        f"this JSON schema:\n\n{json.dumps(function.schema())}\n\nAnswer with the JSON object only."
    )
    return message(prompt, MAX_TOKENS, lambda choice: same(parsed(without_fence(said(choice))), arguments))


def tool_calls(served: Served) -> list[Question]:
    """One of several tools has to be called: is it the right one, with the right arguments?

    With "none" the template shows the tools as well, and nothing forces the model to write a valid call.
    """
    options = {"tools": [each.tool() for each in FUNCTIONS], "tool_choice": "auto" if served.parses_calls else "none"}
    return [_tool_call(options, *request) for request in drawn(SEED + 1)]


def _tool_call(options: Mapping[str, Any], function: Function, words: str, arguments: Arguments) -> Question:
    def right(choice: Choice) -> bool:
        calls = [
            (call["function"]["name"], parsed(call["function"]["arguments"]))
            for call in choice["message"].get("tool_calls") or ()
        ] or written_calls(said(choice))
        return len(calls) == 1 and calls[0][0] == function.name and same(calls[0][1], arguments)

    return message(words, MAX_TOKENS, right, **options)


def written_calls(text: str) -> list[tuple[Any, Any]]:
    """Find the names and arguments of the calls in *text*: JSON objects, or lists of them, in other text or alone."""
    written, decoder, place = [], json.JSONDecoder(), 0
    while begins := JSON_BEGINS.search(text, place):
        try:
            value, place = decoder.raw_decode(text, begins.start())
        except (ValueError, RecursionError):
            place = begins.end()
            continue
        calls = [call for call in (value if isinstance(value, list) else [value]) if isinstance(call, dict)]
        written += [(call["name"], call.get("arguments", call.get("parameters"))) for call in calls if "name" in call]
    return written


def drawn(seed: int) -> list[tuple[Function, str, Arguments]]:
    """``COUNT`` different requests, the functions in turn."""
    chance, requests = random.Random(seed), dict[str, tuple[Function, str, Arguments]]()
    while len(requests) < COUNT:
        function = FUNCTIONS[len(requests) % len(FUNCTIONS)]
        words, arguments = function.drawn(chance)
        requests.setdefault(words, (function, words, arguments))
    return list(requests.values())


def parsed(text: str) -> Any:
    """Parse the JSON value that *text* is; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def without_fence(text: str) -> str:
    """Extract the content of the one code block that *text* consists of; otherwise *text*."""
    text = text.strip()
    if text.startswith(FENCE) and text.endswith(FENCE) and text.count(FENCE) == 2:
        return text.removesuffix(FENCE).partition("\n")[2]
    return text


def same(value: Any, expected: Any) -> bool:
    """Equal values of the same JSON types; of a text's letters the case does not count."""
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same(value[k], expected[k]) for k in expected)
        )
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(expected, str):
        return isinstance(value, str) and value.strip().casefold() == expected.casefold()
    return type(value) is type(expected) and bool(value == expected)


def _date(chance: random.Random) -> tuple[str, str]:
    """In words and as ISO 8601."""
    month, day, year = chance.randrange(len(WORDS["months"])), chance.randrange(1, 29), chance.randrange(2027, 2030)
    return f"{WORDS['months'][month]} {day}, {year}", f"{year}-{month + 1:02}-{day:02}"


def _clock(chance: random.Random) -> tuple[str, str]:
    hour, minute = chance.randrange(1, 12), chance.choice((0, 15, 30, 45))
    evening = chance.random() < 0.5
    return f"{hour}:{minute:02} {'p.m.' if evening else 'a.m.'}", f"{hour + 12 * evening:02}:{minute:02}"


def _number(chance: random.Random) -> tuple[str, int]:
    number = chance.randrange(len(WORDS["numbers"]))
    return WORDS["numbers"][number], number + FIRST_NUMBER


def book_table(chance: random.Random) -> tuple[str, Arguments]:
    place, name, (people, count) = chance.choice(WORDS["places"]), chance.choice(WORDS["names"]), _number(chance)
    (day, date), (clock, time) = _date(chance), _clock(chance)
    words = f"Please book a table for {people} at {place} on {day} at {clock}, in the name of {name}."
    return words, {"restaurant": place, "date": date, "time": time, "people": count, "name": name}


def book_flight(chance: random.Random) -> tuple[str, Arguments]:
    (start, end), (people, count), (day, date) = chance.sample(WORDS["cities"], 2), _number(chance), _date(chance)
    cabin = chance.choice(WORDS["cabins"])
    words = f"On {day} we want to fly to {end} from {start}, {people} of us, in {cabin} class."
    return words, {"from": start, "to": end, "date": date, "cabin": cabin, "passengers": count}


def place_order(chance: random.Random) -> tuple[str, Arguments]:
    order = [(*_number(chance), product) for product in chance.sample(WORDS["products"], chance.randrange(1, 4))]
    city, gift = chance.choice(WORDS["cities"]), chance.random() < 0.5
    listed = ", ".join(f"{word} pieces of the {product}" for word, _, product in order)
    how = "Wrap it as a gift, please." if gift else "No gift wrapping, please."
    items = [{"product": product, "quantity": count} for _, count, product in order]
    return f"I would like to order {listed}, sent to {city}. {how}", {"items": items, "city": city, "gift": gift}


def open_ticket(chance: random.Random) -> tuple[str, Arguments]:
    system, name, (word, hours) = chance.choice(WORDS["systems"]), chance.choice(WORDS["names"]), _number(chance)
    priority = chance.choice(WORDS["priorities"])
    words = (
        f"The {system} has been down for {word} hours. Open a ticket of {priority} priority and assign it to {name}."
    )
    return words, {"system": system, "priority": priority, "down_hours": hours, "assignee": name}


def schedule_meeting(chance: random.Random) -> tuple[str, Arguments]:
    topic, day, (clock, time) = chance.choice(WORDS["topics"]), chance.choice(WORDS["days"]), _clock(chance)
    minutes, online = chance.choice((15, 30, 45, 60, 90)), chance.random() < 0.5
    guests = chance.sample(WORDS["names"], chance.randrange(1, 4))
    where = "online" if online else "in the office"
    words = f"Set up a {topic} {where} next {day} at {clock}, {minutes} minutes, with {', '.join(guests)}."
    arguments = {"topic": topic, "weekday": day, "start": time, "minutes": minutes}
    return words, arguments | {"online": online, "guests": guests}


FUNCTIONS: Final = [
    Function(name=each.__name__, drawn=each, **TABLE["functions"][each.__name__])
    for each in (book_table, book_flight, place_order, open_ticket, schedule_meeting)
]
