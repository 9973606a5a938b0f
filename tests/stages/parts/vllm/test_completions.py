"""What goes wrong between us and a server that is asked about probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stages.parts.base.errors import ServerFailed, TransientError
from stages.parts.vllm.client import Access, complete, http, stream_completion, tokenize
from tests.stages.parts.vllm.answering import Answering

CHOICES = {"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]}


def test_answers_are_greedy_and_in_the_order_of_the_prompts() -> None:
    with Answering(lambda path, asked: (200, CHOICES)) as server:
        found = complete(Access(server.url, "m", "secret"), ["one", "two"], max_tokens=4)
    assert [each["text"] for each in found] == ["a", "b"]
    (asked,) = server.asked
    assert asked == {
        "model": "m",
        "prompt": ["one", "two"],
        "max_tokens": 4,
        "temperature": 0,
        "repetition_penalty": 1.0,
    }
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_is_busy_or_not_reached_is_a_transient_error(status: int) -> None:
    with Answering(lambda path, asked: (status, {})) as server, pytest.raises(TransientError, match=str(status)):
        complete(Access(server.url, "m"), ["one"])


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, {"error": {"message": "no such model"}}, "refused: 400 .*no such model"),
        (401, {}, "refused: 401"),
        (500, b"broken", "refused: 500 broken"),
        (200, b"<html>", "usable answer: JSONDecodeError"),
        (200, {"choices": [{"text": "a"}]}, "usable answer: KeyError"),
        (200, {"error": "none"}, "usable answer: KeyError"),
        (200, {"choices": [{"index": 0}]}, "answered 1 of 2 prompts"),
    ],
)
def test_a_refusal_and_an_invalid_answer_are_failures_of_the_server(status: int, body: Any, message: str) -> None:
    with Answering(lambda path, asked: (status, body)) as server, pytest.raises(ServerFailed, match=message):
        complete(Access(server.url, "m"), ["one", "two"])


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_a_streams_events_end_where_sse_says_and_not_within_a_text(end: str) -> None:
    texts = ["a\u2028b", "c\x85d", "e\u2029f"]
    events = [json.dumps({"choices": [{"text": text}]}, ensure_ascii=False) for text in texts]
    stream = "".join(f"data: {event}{end}" for event in [*events, "[DONE]"]).encode()
    with Answering(lambda path, asked: (200, stream)) as server:
        reply = stream_completion(http(), Access(server.url, "m"), [1], 3)
    assert (reply.error, reply.tokens) == ("", 3)


def test_a_refused_connection_is_a_transient_error() -> None:
    with Answering(lambda path, asked: (200, {})) as server:
        url = server.url
    with pytest.raises(TransientError, match="did not answer: ConnectError"):
        tokenize(Access(url, "m"), "text")


def test_a_server_s_refusal_is_shown_shortened_and_without_the_key() -> None:
    with Answering(lambda path, asked: (400, b"x" * 100_000)) as server, pytest.raises(ServerFailed) as raised:
        tokenize(Access(server.url, "m", "secret"), "text")
    assert len(str(raised.value)) < 400
    assert "secret" not in raised.value.render()


def test_tokens_that_are_not_numbers_are_not_a_valid_answer() -> None:
    with (
        Answering(lambda path, asked: (200, {"tokens": ["one"]})) as server,
        pytest.raises(ServerFailed, match="usable"),
    ):
        tokenize(Access(server.url, "m"), "text")
