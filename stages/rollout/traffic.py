"""Requests of the rollout's own, where clients send too few to tell a good canary from a bad one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx

from stages.parts.engine.client import credentials, http
from stages.parts.records.rollout import Synthetic

PROMPT: Final = "Number {}. In a few words, what is the weather like in the month of your choice, and why?"
ANSWER_TOKENS: Final = 16
"""Enough for a time per output token."""


def send(
    urls: tuple[str, str], model: str, api_key: str, numbers: Sequence[int], timeout_s: float
) -> tuple[Synthetic, Synthetic]:
    """The same completions to each of two releases (base URLs without ``/v1``), all at the same time: what disturbs the
    machine disturbs both, and one that hangs takes *timeout_s* once.

    Args:
        numbers: of the prompts; they differ, so that no prefix cache answers them.

    Returns:
        How many were sent and failed, by release. Whatever is no completion in time has failed.
    """
    asked = [(url, number) for number in numbers for url in urls]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: _answered(each[0], model, api_key, each[1], timeout_s), asked))
    to_first, to_second = (
        Synthetic(sent=len(numbers), failed=sum(not each for each in answers[place::2])) for place in (0, 1)
    )
    return to_first, to_second


def more(before: Synthetic, now: Synthetic) -> Synthetic:
    return Synthetic(sent=before.sent + now.sent, failed=before.failed + now.failed)


def _answered(url: str, model: str, api_key: str, number: int, timeout_s: float) -> bool:
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
