"""The rollout's own requests, sent where clients send too few to tell a good canary from a bad one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx

from stages.parts.engine.client import credentials, http
from stages.parts.records.rollout import SyntheticRequests

PROMPT: Final = "Number {}. In a few words, what is the weather like in the month of your choice, and why?"
ANSWER_TOKENS: Final = 16
"""Enough to measure a time per output token."""


def send_alike(
    urls: Sequence[str], model: str, api_key: str, numbers: Sequence[int], timeout_s: float
) -> list[SyntheticRequests]:
    """Send the same completions to each release (base URLs without ``/v1``), all at the same time: a disturbance of the
    machine affects all alike, and a server that hangs costs *timeout_s* only once.

    Args:
        numbers: one for each prompt. The prompts differ, so that no prefix cache answers them.

    Returns:
        How many were sent and failed, for each release. Whatever is not a completion in time has failed.
    """
    requests = [(url, number) for number in numbers for url in urls]
    with ThreadPoolExecutor(len(requests)) as pool:
        completed = list(pool.map(lambda each: _completes(each[0], model, api_key, each[1], timeout_s), requests))
    return [
        SyntheticRequests(sent=len(numbers), failed=sum(not each for each in completed[place :: len(urls)]))
        for place in range(len(urls))
    ]


def _completes(url: str, model: str, api_key: str, number: int, timeout_s: float) -> bool:
    body = {
        "model": model,
        "prompt": PROMPT.format(number),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    try:
        reply = http().post(f"{url}/v1/completions", json=body, headers=credentials(api_key), timeout=timeout_s)
        return reply.is_success and bool(reply.json()["choices"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return False
