"""The load after one start of a server, as production sees it: requests that arrive at random, whether or not earlier
ones are answered.

1. The capacity: the highest rate at which the workload's targets hold, by trials.
2. The rounds: latency at a fixed rate, the same for all variants: 70 % of the reference's capacity.

All variants get the same prompts at the same times in the rounds, and in the trials of a start the same lengths in the
same pattern of arrivals, faster or slower. Where nobody waits for the answers (``slo: null``), there are only rounds,
with a fixed number of requests in flight: their throughput is that of the saturated server.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from scoring.schedule import ROUNDS
from stages.evaluate.bench import Call, Limits, Target, send
from stages.evaluate.search import OTHER_STEPS, OWN_STEPS, Search
from stages.evaluate.trace import Trace
from stages.parts.base.errors import ConfigError, MeasurementFailed
from stages.parts.base.settings import Serving, Slo, Workload
from stages.parts.samples.capacity import SHARE, capacity_per_s, strain_of, throughput_of, tried
from stages.parts.samples.lines import LoadRun, LoadSamples, Phase, TimedRequest

LOWER_TRIALS: Final = 5
"""Further trials if no rate has held yet: a machine that was busy for some seconds must not end a variant."""
RATE_SHARE: Final = 0.7
"""The share of the reference's capacity at which latency is measured: as busy as a server that still has room for peaks
usually is."""
FEWEST: Final = 20
"""Requests of a trial and of all rounds, so that 95 % of them is a whole number."""
RUNS: Final = 1000
"""More than the runs of one start."""
PROMPTS: Final = 1_000_000
"""More than the requests of one run."""


@dataclass(frozen=True)
class StartLoad:
    """What was measured of one start or of several, in the order of their numbers."""

    rounds: Sequence[LoadSamples] = ()
    trials: Sequence[LoadSamples] = ()

    def capacity_per_s(self) -> float | None:
        """Requests/s, the geometric mean over the starts; None without trials of a rate."""
        rated = [each for each in self.trials if tried(each)]
        starts = {each.run.restart for each in rated}
        found = [
            capacity_per_s([rate for each in rated if each.run.restart == start and (rate := tried(each))])
            for start in starts
        ]
        return math.exp(fmean(math.log(each) for each in found if each)) if any(found) else None


@dataclass(frozen=True)
class Known:
    """What earlier starts have shown."""

    reference: StartLoad = StartLoad()
    """The reference; empty only at its own first start. The rounds of its first one fix the rate, and the number of
    requests, for all variants."""
    own: StartLoad = StartLoad()
    """The variant itself."""


def check_lengths(directory: Path, workload: Workload, serving: Serving, trace: Trace | None) -> None:
    """Refuse a workload that does not fit the model, before anything is started.

    Raises:
        ConfigError: prompt and answer together are longer than the model or the server allows.
    """
    config = json.loads((directory / "config.json").read_text())
    known = config.get("text_config", config).get("max_position_embeddings")
    limits = [each for each in (serving.max_model_len, known) if isinstance(each, int)]
    check_fits(workload, trace, min(limits, default=sys.maxsize))


def check_fits(workload: Workload, trace: Trace | None, max_model_len: int) -> None:
    """Raises: ConfigError."""
    if trace:
        return trace.check_fits(max_model_len)
    prompt, answer = workload.longest()
    if prompt + answer > max_model_len:
        raise ConfigError(
            f"workload {workload.name!r} needs {prompt} + {answer} = {prompt + answer} tokens, "
            f"but the model is served with {max_model_len}",
            hint="lower prompt_tokens, output_tokens or their spread, or raise serving.max_model_len if the model "
            "allows it",
        )
    return None


def check_known(workload: Workload, name: str, known: Known) -> None:
    """Raises: MeasurementFailed: the rate of the rounds is not known, because the reference was not measured."""
    if not workload.request_rate_per_s and not known.reference.rounds:
        raise MeasurementFailed(
            f"the load of {name} depends on what the reference can serve, which could not be measured",
            hint="see why, or set the workload's request_rate_per_s",
        )


def described(found: StartLoad) -> str:
    """What the load of a start showed, in a few words."""
    counted = sum(len(each.requests) for each in found.rounds)
    rate = f" at {found.rounds[0].run.rate_per_s:.3g} requests/s" if found.rounds[0].run.rate_per_s else ""
    capacity = found.capacity_per_s()
    limit = f"capacity {capacity:.3g} requests/s, " if capacity else ""
    return f"{limit}{counted} requests{rate}, {throughput_of(found.rounds, found.trials):.0f} tokens/s"


def load_start(target: Target, start: int, known: Known) -> StartLoad:
    """Measure one start of a server under load.

    Args:
        start: the number of the start, from 0.

    Raises:
        MeasurementFailed: a request failed, a figure is not finite, or the targets hold at no rate.
        ServerFailed: the server ended.
    """
    workload = target.workload
    if (slo := workload.slo) is None:
        return StartLoad(_saturated(target, start, known))
    own, reference = known.own.capacity_per_s(), known.reference.capacity_per_s()
    trials = [] if own else [_first_look(target, start)]
    if own:
        search = Search.around(own, OWN_STEPS, start)
    else:
        sent = _sent_per_s(trials[0])
        search = Search.around(reference, OTHER_STEPS, start) if reference else Search.after(sent, start)
    found = _find_capacity(target, start, search, slo, trials)
    fixed = known.reference.rounds[0].run.rate_per_s if known.reference.rounds else workload.request_rate_per_s
    return StartLoad(_steady_rounds(target, start, fixed or RATE_SHARE * found), tuple(trials))


def _first_look(target: Target, start: int) -> LoadSamples:
    """A short run with ``concurrency`` requests in flight: it warms up what is compiled at first use, and shows with
    which rate to begin."""
    concurrency = target.workload.concurrency
    requests = send(target, _call(target, start, 1, 3 * concurrency, concurrency=concurrency)) or []
    return _labelled(requests, concurrency, 2 * concurrency, start, "trial", start * RUNS)


def _find_capacity(target: Target, start: int, search: Search, slo: Slo, trials: list[LoadSamples]) -> float:
    """The capacity in requests/s; each trial is appended to *trials*.

    Raises:
        MeasurementFailed: no rate that was tried held.
    """
    before = len(trials)
    while (made := len(trials) - before) < target.workload.trials + LOWER_TRIALS:
        rated = [each for each in map(tried, trials) if each]
        if made >= target.workload.trials and any(each.held for each in rated):
            break
        if (rate := search.following(rated)) is None:
            break
        trials.append(_try(target, start, rate, slo, len(trials)))
    rated = [each for each in map(tried, trials) if each]
    found = capacity_per_s(rated)
    if found is None:
        lowest = min(each.rate_per_s for each in rated)
        raise MeasurementFailed(
            f"{slo.ttft_ms:g} ms to the first token and {slo.tpot_ms:g} ms per token don't hold for {SHARE:.0%} of the "
            f"requests even at {lowest:.3g} requests/s",
            hint="raise the workload's slo, or set slo: null if nobody waits for the answers",
        )
    return found


def _try(target: Target, start: int, rate: float, slo: Slo, number: int) -> LoadSamples:
    """A trial of a rate, which is ended early once the targets can't hold any more."""
    workload = target.workload
    ramp, counted = math.ceil(rate * workload.ramp_s), max(FEWEST, math.ceil(rate * workload.trial_s))
    allowed = counted - math.ceil(SHARE * counted)
    limits = Limits(slo.ttft_ms, slo.tpot_ms, allowed, ramp, ramp + counted)
    call = _call(target, start, number + 1, counted + 2 * ramp, rate_per_s=rate, limits=limits)
    requests = send(target, call)
    common = {"targets_ms": (slo.ttft_ms, slo.tpot_ms), "rate_per_s": rate}
    label = {"restart": start, "phase": "trial", "number": start * RUNS + number}
    if requests is None:
        run = LoadRun.model_validate({**label, **common, "concurrency": 0, "duration_s": counted / rate, "held": False})
        return LoadSamples(run, ())
    found = _labelled(requests, ramp, ramp + counted, start, "trial", start * RUNS + number)
    held = strain_of(found.requests, slo.ttft_ms, slo.tpot_ms) <= 1
    return LoadSamples(found.run.model_copy(update={**common, "held": held}), found.requests)


def _steady_rounds(target: Target, start: int, rate: float) -> tuple[LoadSamples, ...]:
    """Rounds at one rate, without a pause between them; the requests of the ramps before and after don't count."""
    ramp, size = math.ceil(rate * target.workload.ramp_s), _round_size(target.workload, rate)
    requests = send(target, _call(target, start, 0, 2 * ramp + size * ROUNDS, rate_per_s=rate))
    rounds = _rounds(requests or [], ramp, size, start)
    return tuple(LoadSamples(each.run.model_copy(update={"rate_per_s": rate}), each.requests) for each in rounds)


def _saturated(target: Target, start: int, known: Known) -> tuple[LoadSamples, ...]:
    """Rounds with ``concurrency`` requests in flight all the time. The ramps are the first and the last so many."""
    concurrency = target.workload.concurrency
    if known.reference.rounds:
        size = len(known.reference.rounds[0].requests)
    else:
        size = _round_size(
            target.workload, target.workload.request_rate_per_s or _sent_per_s(_first_look(target, start))
        )
    call = _call(target, start, 0, 2 * concurrency + size * ROUNDS, concurrency=concurrency)
    return _rounds(send(target, call) or [], concurrency, size, start)


def _round_size(workload: Workload, rate: float) -> int:
    return math.ceil(max(FEWEST, rate * workload.steady_s) / ROUNDS)


def _call(
    target: Target,
    start: int,
    number: int,
    requests: int,
    *,
    rate_per_s: float | None = None,
    concurrency: int | None = None,
    limits: Limits | None = None,
) -> Call:
    """
    Args:
        number: the run within the start: 0 the rounds, which continue a trace from start to start.
    """
    workload = target.workload
    return Call(
        requests=requests,
        seed=workload.seed + start,
        first=(start * RUNS + number) * PROMPTS if number else start * requests,
        rate_per_s=rate_per_s,
        concurrency=concurrency,
        warmups=workload.warmup_requests if number == 1 else 0,
        limits=limits,
    )


def _rounds(requests: Sequence[TimedRequest], ramp: int, size: int, start: int) -> tuple[LoadSamples, ...]:
    return tuple(
        _labelled(requests, ramp + size * place, ramp + size * (place + 1), start, "round", start * ROUNDS + place)
        for place in range(ROUNDS)
    )


def _labelled(
    requests: Sequence[TimedRequest], first: int, end: int, start: int, phase: Phase, number: int
) -> LoadSamples:
    """The requests from *first* up to *end*, as samples of one run."""
    label = {"restart": start, "phase": phase, "number": number}
    changed = label if phase == "round" else label | {"itl_ms": ()}
    counted = tuple(each.model_copy(update=changed) for each in requests[first:end])
    duration_s = requests[end].start_s - counted[0].start_s
    in_flight = sum(each.e2el_ms for each in counted) / 1000 / duration_s
    run = LoadRun.model_validate(label | {"concurrency": max(1, round(in_flight)), "duration_s": duration_s})
    return LoadSamples(run, counted)


def _sent_per_s(samples: LoadSamples) -> float:
    return len(samples.requests) / samples.run.duration_s
