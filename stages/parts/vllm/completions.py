"""Asks a server for answers and probabilities: vLLM's ``/v1`` and ``/tokenize`` over plain HTTP.

What asks raises ServerFailed if the server refuses or its reply is not a valid answer, and TransientError if it does
not answer at the moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import httpx

from stages.parts.base.errors import ServerFailed, TransientError
from stages.parts.vllm.client import Access, http

TIMEOUT_S: Final = 120.0
PASSING: Final = frozenset({429, 502, 503, 504})
"""Statuses of a server, or of a gateway before it, that may pass."""
GREEDY: Final = {"temperature": 0, "repetition_penalty": 1.0}
"""Otherwise a model's own generation_config.json would change its answers."""

Distribution = Mapping[str, Mapping[str, float]]
"""For each token id: ``logprob`` (natural) and ``rank`` (1 is the likeliest)."""


def complete(access: Access, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Any) -> list[dict[str, Any]]:
    """Ask for the answer to each prompt (text or token ids), greedy, in the prompts' order. *options* are those of the
    completions API."""
    body = {"prompt": [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]}
    reply = post(access, "/v1/completions", body | GREEDY | options)
    with usable(access.url):
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
    if len(choices) != len(prompts):
        raise ServerFailed(f"{access.url} answered {len(choices)} of {len(prompts)} prompts")
    return choices


def chat(access: Access, prompt: str, **options: Any) -> dict[str, Any]:
    """Ask for the greedy answer to a user's message."""
    body = {"messages": [{"role": "user", "content": prompt}]}
    reply = post(access, "/v1/chat/completions", body | GREEDY | options)
    with usable(access.url):
        choice: dict[str, Any] = reply["choices"][0]
    return choice


def tokenize(access: Access, text: str) -> list[int]:
    """Turn *text* into token ids, including what the model puts at the start of a text."""
    reply = post(access, "/tokenize", {"prompt": text})
    with usable(access.url):
        return [int(token) for token in reply["tokens"]]


def given(choice: Mapping[str, Any]) -> list[Distribution]:
    """Read the distribution at each position of the prompt after its first token, given the tokens before it.

    *choice* was requested with ``prompt_logprobs``: each distribution holds that many of the likeliest tokens, and the
    prompt's own token."""
    places: list[Distribution] = choice["prompt_logprobs"]
    return places[1:]


def post(access: Access, path: str, body: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> Any:
    """Send a request to the model."""
    url = access.at(path)
    with usable(url):
        try:
            reply = http().post(url, json={"model": access.model, **body}, headers=access.headers, timeout=timeout_s)
        except httpx.TransportError as error:
            raise TransientError(f"{url} did not answer: {type(error).__name__}: {error}") from error
        if not reply.is_success:
            kind = TransientError if reply.status_code in PASSING else ServerFailed
            raise kind(f"{url} refused: {reply.status_code} {reply.text[:200].strip()}")
        return reply.json()


@contextlib.contextmanager
def usable(url: str) -> Iterator[None]:
    """Read an answer of the server at *url*: what it lacks is the server's failure."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerFailed(f"{url} did not give a usable answer: {type(error).__name__}: {error}") from error
