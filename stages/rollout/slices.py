"""What both releases did within a few seconds, and what slices show together. The rollout's own requests are among it:
each is sent to both releases at the same moment, and timed here."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from scoring.canary import Counts
from stages.parts.records.rollout import Counters, Journal, Side, Slice, Window
from stages.parts.vllm.client import VOCABULARY, Access, Reply, http, stream_completion

SLICES: Final = 12
"""Number of slices in the shortest time of a step."""
LONGEST_S: Final = 30.0
"""Slices of long steps are no longer, so that a slow canary is not kept for most of the step."""
LATE: Final = 3.0
LATE_S: Final = 1.0
"""An answer is late if it takes longer than ``LATE`` times as long as is typical, and this time more."""
Latency = Literal["ttft", "tpot"]
LATENCIES: Final[tuple[Latency, ...]] = get_args(Latency)
Role = Literal["canary", "stable"]
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


@dataclass(frozen=True)
class CopiedRequest:
    """A client's request of which the canary got a copy."""

    lost: bool
    """The canary did not answer it."""
    failed: bool
    """The stable release did not."""
    timings: tuple[Timing, Timing] | None
    """The canary's and the stable release's; None if they are not comparable."""


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
        prompt = prompt_of(name, prompt_tokens)
        time.sleep(max(0.0, began_s + at_s - time.monotonic()))
        access = accesses[place]
        return timing(stream_completion(http(access.certificate), access, prompt, ANSWER_TOKENS, timeout_s))

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


def prompt_of(name: str, tokens: int) -> list[int]:
    """Draw a prompt by the name of its request."""
    return random.Random(name).choices(VOCABULARY, k=tokens)


def timing(reply: Reply) -> Timing:
    if reply.error or reply.first_token_s is None:
        return LOST
    # Several tokens may come in one event.
    token_s = (reply.ended_s - reply.first_token_s) / (ANSWER_TOKENS - 1)
    return Timing(max(SHORTEST_S, reply.first_token_s - reply.sent_s), max(SHORTEST_S, token_s))


def slices_of(journal: Journal, window: Window) -> list[Slice]:
    """List the slices of the whole rollout, whose present step has this *window*."""
    return [*(ended for step in journal.observed for ended in step.slices), *window.slices]


def begin_slice(window: Window, canary: Counters, stable: Counters | None, elapsed_s: float) -> Window:
    """Open a slice that begins now."""
    begun = Slice(seconds=elapsed_s)
    return window.model_copy(update={"open": begun, "canary_from": canary, "stable_from": stable})


def end_slice(window: Window, canary: Counters, stable: Counters | None, elapsed_s: float, late_s: float) -> Window:
    """Move the open slice to those that have ended, and open another one. A request that waits longer than *late_s* for
    its first token is delayed."""
    ended, begun = window.open, window.canary_from
    if ended and begun:
        changes: dict[str, Any] = {"seconds": elapsed_s - ended.seconds}
        changes["canary"] = _with_counted(ended.canary, canary.since(begun, late_s))
        if stable and window.stable_from:
            changes["stable"] = _with_counted(ended.stable, stable.since(window.stable_from, late_s))
        window = window.model_copy(update={"slices": (*window.slices, ended.model_copy(update=changes))})
    return begin_slice(window, canary, stable, elapsed_s)


def _with_counted(side: Side, counted: Side) -> Side:
    return side.model_copy(update=counted.model_dump(exclude_unset=True))


def add_pairs(into: Slice, pairs: Sequence[tuple[Timing, ...]], late_s: float) -> Slice:
    """Add these requests to a slice: each as the canary answered it and, if that was asked, the stable release. An
    answer that takes longer than *late_s* is late."""
    counted = []
    for place in (0, 1):
        sent = [pair[place] for pair in pairs if len(pair) > place]
        lost, late = sum(not timing.answered for timing in sent), sum(timing.total_s > late_s for timing in sent)
        counted.append({"sent": len(sent), "lost": lost, "late": late})
    return _with(into, [pair for pair in pairs if len(pair) > 1 and all(timing.answered for timing in pair)], counted)


def add_copies(into: Slice, copied: Sequence[CopiedRequest]) -> Slice:
    lost = (sum(request.lost for request in copied), sum(request.failed for request in copied))
    counted = [{"copies": len(copied), "lost_copies": each} for each in lost]
    return _with(into, [request.timings for request in copied if request.timings], counted)


def _with(into: Slice, timed: Sequence[tuple[Timing, ...]], counted: Sequence[Mapping[str, float]]) -> Slice:
    """Add to a slice what both releases answered, and what was *counted* of each."""
    sides = []
    for place, side in enumerate((into.canary, into.stable)):
        logs = {f"log_{name}": sum(math.log(getattr(pair[place], f"{name}_s")) for pair in timed) for name in LATENCIES}
        more = {**counted[place], **logs}
        sides.append(side.model_copy(update={name: getattr(side, name) + more[name] for name in more}))
    return into.model_copy(update={"pairs": into.pairs + len(timed), "canary": sides[0], "stable": sides[1]})


def late_s(slices: Sequence[Slice], pairs: Sequence[tuple[Timing, ...]] = ()) -> float:
    """From when on an answer is late: the typical one is the stable release's so far or, in the beginning, the quicker
    half of these pairs."""
    first, token = typical_s(logs(slices, "stable", "ttft")), typical_s(logs(slices, "stable", "tpot"))
    if first and token:
        return LATE_S + LATE * Timing(first, token).total_s
    totals = sorted(timing.total_s for pair in pairs for timing in pair if timing.answered)
    return LATE_S + LATE * totals[(len(totals) - 1) // 2] if totals else math.inf


def logs(slices: Sequence[Slice], role: Role, name: Latency) -> list[float]:
    """Average the logarithms of a release's latencies in seconds, in each slice that has any: of the pairs or, if none
    were sent, of all requests, from the sums that the server counts."""
    paired = any(part.pairs for part in slices)
    values = (_log(part, role, name, paired=paired) for part in slices)
    return [value for value in values if value is not None]


def log_ratios(slices: Sequence[Slice], name: Latency) -> list[float]:
    """Compute the same of the canary relative to the stable release, in each slice in which both have latencies."""
    paired = any(part.pairs for part in slices)
    values = ((_log(part, "canary", name, paired=paired), _log(part, "stable", name, paired=paired)) for part in slices)
    return [canary - stable for canary, stable in values if canary is not None and stable is not None]


def _log(part: Slice, role: Role, name: Latency, *, paired: bool) -> float | None:
    side: Side = getattr(part, role)
    if paired:
        return getattr(side, f"log_{name}") / part.pairs if part.pairs else None
    seconds, count = getattr(side, f"{name}_s"), getattr(side, f"{name}_count")
    return math.log(seconds / count) if seconds > 0 and count > 0 else None


def typical_s(logs: Sequence[float]) -> float | None:
    """Compute the geometric mean of latencies whose logarithms these are; None without any."""
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def load(slices: Sequence[Slice], role: Role) -> float:
    """Compute the requests per second that a release began to answer."""
    seconds = math.fsum(part.seconds for part in slices)
    return math.fsum(getattr(part, role).ttft_count for part in slices) / seconds if seconds else 0.0


def counts(slices: Iterable[Slice], role: Role, of: Callable[[Side], tuple[float, float]]) -> Counts:
    """Count in each slice how many of how many requests of a release *of* tells."""
    return Counts(tuple(of(getattr(part, role)) for part in slices))
