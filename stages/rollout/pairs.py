"""The rollout's own requests: each is sent to both releases at the same moment, and timed here."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from stages.parts.vllm.client import Access, http
from stages.parts.vllm.streaming import VOCABULARY, Reply, stream_completion

ANSWER_TOKENS: Final = 16
"""Enough to measure a time per output token."""
SHORTEST_S: Final = 1e-3
"""No less is timed: on a busy machine several tokens may be read at once, as if none of them had taken any time."""


@dataclass(frozen=True)
class Timing:
    """What one release did with a request. Without an answer in time, both latencies are NaN."""

    ttft_s: float
    tpot_s: float

    @property
    def answered(self) -> bool:
        return math.isfinite(self.ttft_s)

    @property
    def total_s(self) -> float:
        return self.ttft_s + (ANSWER_TOKENS - 1) * self.tpot_s


LOST: Final = Timing(math.nan, math.nan)


def send_pairs(
    accesses: Sequence[Access], names: Sequence[str], prompt_tokens: int, over_s: float, timeout_s: float
) -> list[tuple[Timing, ...]]:
    """Send each of these requests to all releases at the same moment, and the requests evenly over *over_s* seconds.
    Returns, for each request, what each release did.

    A disturbance of the machine affects all releases alike. Which of them is asked first is drawn for each request. A
    prompt is drawn by the request's name, which must be new, or a prefix cache answers it.
    """
    began_s = time.monotonic()

    def send(name: str, place: int, at_s: float) -> Timing:
        prompt = random.Random(name).choices(VOCABULARY, k=prompt_tokens)
        time.sleep(max(0.0, began_s + at_s - time.monotonic()))
        return timing(stream_completion(http(), accesses[place], prompt, ANSWER_TOKENS, timeout_s))

    places = range(len(accesses))
    with ThreadPoolExecutor(len(names) * len(accesses)) as pool:
        sent = [
            {
                place: pool.submit(send, name, place, over_s * turn / len(names))
                for place in random.sample(places, len(places))
            }
            for turn, name in enumerate(names)
        ]
        return [tuple(replies[place].result() for place in places) for replies in sent]


def timing(reply: Reply) -> Timing:
    if reply.error or reply.first_token_s is None:
        return LOST
    # Several tokens may come in one event.
    token_s = (reply.ended_s - reply.first_token_s) / (ANSWER_TOKENS - 1)
    return Timing(max(SHORTEST_S, reply.first_token_s - reply.sent_s), max(SHORTEST_S, token_s))
