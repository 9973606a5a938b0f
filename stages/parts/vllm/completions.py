"""Asks a server for answers and probabilities: vLLM's ``/v1`` and ``/tokenize`` over plain HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from stages.parts.base.errors import ServerFailed, TransientError
from stages.parts.vllm.client import credentials, http

TIMEOUT_S: Final = 120.0
PASSING: Final = frozenset({429, 502, 503, 504})
"""Statuses of a server, or of a gateway before it, that may pass."""
GREEDY: Final = {"temperature": 0, "repetition_penalty": 1.0}
"""Otherwise a model's own generation_config.json would change its answers."""

Distribution = Mapping[str, Mapping[str, float]]
"""For each token id: ``logprob`` (natural) and ``rank`` (1 is the likeliest)."""


def complete(
    url: str, model: str, api_key: str, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Any
) -> list[dict[str, Any]]:
    """Ask the server at *url* (without ``/v1``) for the answer to each prompt (text or token ids), greedy, in the
    prompts' order. *options* are those of the completions API.

    Raises:
        ServerFailed: it refuses, or its reply is not a valid answer.
        TransientError: it does not answer at the moment.
    """
    body = {"model": model, "prompt": [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]}
    reply = post(f"{url}/v1/completions", body | GREEDY | options, api_key)
    try:
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
    except (LookupError, TypeError, ValueError) as error:
        raise no_answer(url, error) from error
    if len(choices) != len(prompts):
        raise ServerFailed(f"{url} answered {len(choices)} of {len(prompts)} prompts")
    return choices


def chat(url: str, model: str, api_key: str, prompt: str, **options: Any) -> dict[str, Any]:
    """Ask for the greedy answer to a user's message."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    reply = post(f"{url}/v1/chat/completions", body | GREEDY | options, api_key)
    try:
        choice: dict[str, Any] = reply["choices"][0]
    except (LookupError, TypeError) as error:
        raise no_answer(url, error) from error
    return choice


def tokenize(url: str, model: str, api_key: str, text: str) -> list[int]:
    """Turn *text* into token ids, including what the model puts at the start of a text."""
    reply = post(f"{url}/tokenize", {"model": model, "prompt": text}, api_key)
    try:
        return [int(token) for token in reply["tokens"]]
    except (LookupError, TypeError, ValueError) as error:
        raise no_answer(url, error) from error


def given(choice: Mapping[str, Any]) -> list[Distribution]:
    """Ask for the distribution at each position of the prompt after its first token, given the tokens before it.

    *choice* was requested with ``prompt_logprobs``: each distribution holds that many of the likeliest tokens, and the
    prompt's own token."""
    places: list[Distribution] = choice["prompt_logprobs"]
    return places[1:]


def post(url: str, body: Mapping[str, Any], api_key: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Send a request. Raises: ServerFailed, TransientError: as ``complete``."""
    try:
        reply = http().post(url, json=body, headers=credentials(api_key), timeout=timeout_s)
    except httpx.TransportError as error:
        raise TransientError(f"{url} did not answer: {type(error).__name__}: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_answer(url, error) from error
    if not reply.is_success:
        kind = TransientError if reply.status_code in PASSING else ServerFailed
        raise kind(f"{url} refused: {reply.status_code} {reply.text[:200].strip()}")
    try:
        return reply.json()
    except ValueError as error:
        raise no_answer(url, error) from error


def no_answer(url: str, error: Exception) -> ServerFailed:
    return ServerFailed(f"{url} did not give a usable answer: {type(error).__name__}: {error}")
