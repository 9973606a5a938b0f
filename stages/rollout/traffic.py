"""Requests of the rollout's own, where clients send too few to tell a good canary from a bad one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx

from stages.rollout.journal import Synthetic
from stages.server import credentials, http

PROMPT: Final = "Number {}. In a few words, what is the weather like in the month of your choice, and why?"
ANSWER_TOKENS: Final = 16
"""Enough for a time per output token."""
TIMEOUT_S: Final = 60.0


def send(urls: tuple[str, str], model: str, api_key: str, count: int, first: int = 0) -> tuple[Synthetic, Synthetic]:
    """The same *count* completions to each of two releases (base URLs without ``/v1``), at the same time, one after
    the other at each: what disturbs the machine disturbs both.

    Args:
        first: number of the first prompt; prompts differ, so that no prefix cache answers them.

    Returns:
        How many were sent and failed, by release. Whatever is no completion has failed.
    """
    numbers = range(first, first + count)
    with ThreadPoolExecutor(len(urls)) as pool:
        failed = list(pool.map(lambda url: sum(not _answered(url, model, api_key, each) for each in numbers), urls))
    return Synthetic(sent=count, failed=failed[0]), Synthetic(sent=count, failed=failed[1])


def more(before: Synthetic, now: Synthetic) -> Synthetic:
    return Synthetic(sent=before.sent + now.sent, failed=before.failed + now.failed)


def _answered(url: str, model: str, api_key: str, number: int) -> bool:
    body = {
        "model": model,
        "prompt": PROMPT.format(number),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    try:
        reply = http().post(f"{url}/v1/completions", json=body, headers=credentials(api_key), timeout=TIMEOUT_S)
        return reply.is_success and bool(reply.json()["choices"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return False
