"""Which side of a split a request is on."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from stages.parts.endpoint.sides import MOST_BODY_BYTES, SIDES, first_messages, side

SYSTEM = {"role": "system", "content": 'Say "[{}]", never \\.'}


def chat(*contents: str, **fields: Any) -> bytes:
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    return json.dumps(fields | {"messages": [SYSTEM, *turns]}).encode()


def of(body: bytes, *, client: str = "app", session: str = "", request: str = "1") -> int:
    return side(client, session, body, request)


def test_all_turns_of_a_conversation_are_on_one_side() -> None:
    names = [f"question {number}" for number in range(200)]
    sides = [of(chat(name), request=name) for name in names]
    assert sides == [of(chat(name, "answer", "and then?", temperature=0)) for name in names]
    assert len(set(sides)) > 70, "and conversations are on many sides"
    assert sides != [of(chat(name), client="other") for name in names]


def test_the_session_decides_before_the_messages() -> None:
    assert of(chat("a"), session="s") == of(chat("b"), session="s") == of(b"", session="s", request="2")
    assert len({of(b"", session=f"{number}") for number in range(200)}) > 70


def test_sides_are_even() -> None:
    counted = Counter(of(b"", session=f"{number}") for number in range(100 * SIDES))
    assert set(counted) == set(range(SIDES))
    assert max(counted.values()) < 150


def test_a_long_conversation_is_known_by_the_part_that_is_read() -> None:
    long = chat("x" * MOST_BODY_BYTES, "answer", "more")[:MOST_BODY_BYTES]
    assert of(long) == of(chat("x" * MOST_BODY_BYTES, "another answer")[:MOST_BODY_BYTES])


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ('{"input": "hello", "model": "m"}', '"hello"'),
        ('{"input": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "!"}]}', '"hello"'),
        ('{"note": "\\"messages\\": [", "messages": [ {"content": "b", "role": "user"} ]}', '"b"'),
        ('{"messages": [{"role": "system", "content": "a"}]}', '"a"'),
        ('{"messages": [{"role": "user", "content": "ab', '{"role": "user", "content": "ab'),
        ('{"messages": []}', ""),
        ('{"messages": 3}', ""),
        ('{"prompt": "once upon a time"}', ""),
        ("not JSON at all", ""),
        ("", ""),
    ],
)
def test_the_first_messages_are_found_in_any_body(body: str, messages: str) -> None:
    assert first_messages(body) == messages


def test_a_request_of_no_conversation_is_on_a_side_of_its_own() -> None:
    body = json.dumps({"prompt": "once upon a time"}).encode()
    assert len({of(body, request=f"{number}") for number in range(200)}) > 70
    assert of(b"\xff\xfe{") in range(SIDES)
