"""What is sent to a server, which of it counts, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from stages.evaluate import load
from stages.evaluate.bench import Call, Limits, LoadTarget, command, lengths, timed_requests, write_requests
from stages.evaluate.load import Loading, check_lengths
from stages.parts.base.errors import ConfigError, MeasurementFailed
from stages.parts.base.serving_settings import Serving
from stages.parts.base.workload import Slo, Workload
from stages.parts.samples.capacity import mean_capacity_per_s
from stages.parts.samples.lines import StartLoad, TimedRequest
from tests.stages.evaluate.loading import load_start

WORKLOAD = Workload(
    name="w",
    prompt_tokens=100,
    output_tokens=20,
    concurrency=2,
    steady_s=10,
    ramp_s=1,
    trial_s=20,
    trials=7,
    slo=Slo(ttft_ms=1000, tpot_ms=100),
    quality_tasks=("arc_easy",),
)


def target(workload: Workload = WORKLOAD) -> LoadTarget:
    server: Any = type("Server", (), {"url": "http://here", "name": "m"})
    generator: Any = None
    return LoadTarget(generator, server, Path("model"), workload, None, Path("log"))


def generated(**changed: Any) -> dict[str, Any]:
    """What ``vllm bench serve`` writes: in seconds, a request takes 0.1 s to its first token, and 19 × 0.01 s more."""
    told = {"completed": 3, "failed": 0, "errors": ["", "", ""]}
    details = {"start_times": [50.0, 50.0, 50.5], "ttfts": [0.1, 0.1, 0.1], "itls": [[0.01] * 19] * 3}
    return told | details | {"input_lens": [100, 101, 100], "output_lens": [20, 20, 20]} | changed


def test_the_generator_s_figures_are_kept_with_their_units() -> None:
    last = timed_requests(generated(), [20, 20, 20])[2]
    assert (last.start_s, last.prompt_tokens, last.output_tokens) == (0.5, 100, 20)
    assert (last.ttft_ms, last.tpot_ms, last.e2el_ms, last.itl_ms) == (100.0, 10.0, 290.0, (10.0,) * 19)


def test_failed_requests_fail_the_measurement_with_their_reason() -> None:
    failed = generated(completed=1, failed=2, errors=["", "Traceback\n  ...\nTimeoutError: too slow", "x"])
    with pytest.raises(MeasurementFailed, match="2 of 3 requests failed: TimeoutError: too slow"):
        timed_requests(failed, [20] * 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_not_a_number_fails_the_measurement(value: float) -> None:
    with pytest.raises(MeasurementFailed, match=f"ttft is {value}"):
        timed_requests(generated(ttfts=[0.1, value, 0.1]), [20] * 3)


@pytest.mark.parametrize("missing", [{"ttfts": []}, {"itls": [[0.01] * 19] * 2}, {"output_lens": None}])
def test_missing_requests_fail_the_measurement(missing: dict[str, Any]) -> None:
    with pytest.raises(MeasurementFailed, match="not usable"):
        timed_requests(generated(**missing), [20] * 3)


def test_an_answer_of_another_length_than_requested_fails_the_measurement() -> None:
    with pytest.raises(MeasurementFailed, match="gave 19 tokens, not the 20 asked for"):
        timed_requests(generated(output_lens=[20, 19, 20]), [20] * 3)


@pytest.mark.parametrize(("config_tokens", "served_tokens"), [(119, None), (1024, 119)])
def test_a_workload_longer_than_the_model_is_refused(tmp_path: Path, config_tokens: int, served_tokens: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": config_tokens}))
    with pytest.raises(ConfigError, match=r"100 \+ 20 = 120 tokens, but the model is served with 119"):
        check_lengths(tmp_path, WORKLOAD, Serving(max_model_len=served_tokens), None)


def test_a_workload_that_just_fits_is_accepted_and_its_longest_requests_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 120}}))
    check_lengths(tmp_path, WORKLOAD, Serving(), None)
    for changed in ({"output_tokens": 21}, {"prompt_spread": 0.01}):
        with pytest.raises(ConfigError, match="= 121 tokens"):
            check_lengths(tmp_path, WORKLOAD.model_copy(update=changed), Serving(), None)


def test_lengths_are_drawn_within_their_spreads_and_more_requests_begin_with_the_same() -> None:
    spread = WORKLOAD.model_copy(update={"prompt_spread": 0.5, "output_spread": 0.25})
    drawn = lengths(spread, 3, 5000)
    prompts, answers = zip(*drawn, strict=True)
    assert (min(prompts), max(prompts), min(answers), max(answers)) == (50, 150, 15, 25)
    assert lengths(spread, 3, 7) == drawn[:7] != lengths(spread, 4, 7)


def test_prompts_of_the_same_number_are_the_same_and_no_others(tmp_path: Path) -> None:
    sent = []
    for first in (0, 0, 1000):
        write_requests(tmp_path / "sent.jsonl", target(), Call(requests=2, seed=1, first=first))
        sent.append([json.loads(line) for line in (tmp_path / "sent.jsonl").read_text().splitlines()])
    assert sent[0] == sent[1]
    assert [(each["input_length"], each["output_length"]) for each in sent[0]] == [(100, 20)] * 2
    assert len({str(each["hash_ids"]) for sent_once in sent[1:] for each in sent_once}) == 4


def test_requests_are_sent_at_a_rate_without_a_limit_on_those_in_flight() -> None:
    arguments = command(target(), Call(requests=2, seed=1, first=0, rate_per_s=4.5), Path("work"))
    assert arguments[arguments.index("--request-rate") + 1] == "4.5"
    assert "--max-concurrency" not in arguments
    arguments = command(target(), Call(requests=2, seed=1, first=0, concurrency=3), Path("work"))
    assert arguments[arguments.index("--max-concurrency") + 1] == "3"
    assert "--request-rate" not in arguments


class Queue:
    """Servers that take a fixed time for a request, and what was sent to them, in place of the load generator."""

    def __init__(self, slots: int, request_s: float) -> None:
        self.slots, self.request_s = slots, request_s
        self.calls: list[Call] = []
        self.pauses: set[int] = set()
        """The calls in whose middle all stand still for two seconds."""

    def send(self, to: LoadTarget, call: Call) -> list[TimedRequest] | None:
        self.calls.append(call)
        free_s = [0.0] * self.slots
        found: list[TimedRequest] = []
        for start_s, length in zip(self._arrivals(call), lengths(to.workload, call.seed, call.requests), strict=True):
            if len(self.calls) - 1 in self.pauses and len(found) == call.requests // 2:
                free_s = [max(each, start_s) + 2.0 for each in free_s]
            place = free_s.index(min(free_s))
            begin_s = max(start_s, free_s[place])
            free_s[place] = begin_s + self.request_s
            found.append(request(start_s, 1000 * (begin_s - start_s + self.request_s), length))
            if call.limits and self._missed(found, call.limits) > call.limits.allowed:
                return None
        return found

    def _arrivals(self, call: Call) -> list[float]:
        """As vLLM's: a Poisson process, scaled so that its mean rate is exact."""
        if call.rate_per_s is None:
            return [number * self.request_s / self.slots for number in range(call.requests)]
        drawn = random.Random(call.seed)
        times = list(itertools.accumulate(drawn.expovariate(1.0) for _ in range(call.requests)))
        return [each * call.requests / call.rate_per_s / times[-1] for each in times]

    def _missed(self, found: list[TimedRequest], limits: Limits) -> int:
        return sum(each.ttft_ms > limits.ttft_ms for each in found[limits.first : limits.end])


def request(start_s: float, ttft_ms: float, length: tuple[int, int]) -> TimedRequest:
    return TimedRequest(
        restart=0,
        phase="round",
        number=0,
        start_s=start_s,
        ttft_ms=ttft_ms,
        tpot_ms=1.0,
        e2el_ms=ttft_ms + length[1],
        itl_ms=(1.0,) * (length[1] - 1),
        prompt_tokens=length[0],
        output_tokens=length[1],
    )


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    found = Queue(slots=4, request_s=0.5)
    monkeypatch.setattr(load, "send", found.send)
    return found


def test_the_search_finds_the_rate_that_a_queue_can_serve(queue: Queue) -> None:
    """Four requests at a time of half a second each: 8 requests/s, and a little less with random arrivals."""
    found = mean_capacity_per_s(load_start(target(), 0))
    assert found is not None
    assert 5.5 < found < 8.5


def test_the_rounds_are_at_seventy_percent_of_the_reference_s_capacity_for_all_variants(queue: Queue) -> None:
    reference = load_start(target(), 0)
    rate = reference.rounds[0].run.rate_per_s
    assert rate == pytest.approx(0.7 * (mean_capacity_per_s(reference) or 0))
    queue.slots = 6
    other = load_start(target(), 0, reference)
    again = load_start(target(), 1, reference, other)
    assert {each.run.rate_per_s for each in (*other.rounds, *again.rounds)} == {rate}
    assert (mean_capacity_per_s(other) or 0) > 1.3 * (mean_capacity_per_s(reference) or 0)
    assert (mean_capacity_per_s(again) or 0) == pytest.approx(mean_capacity_per_s(other) or 0, rel=0.2)
    assert [(each.run.restart, each.run.number) for each in again.rounds] == [(1, 1)]


def test_all_variants_get_the_same_requests_at_the_same_times_and_each_start_others(queue: Queue) -> None:
    reference = load_start(target(), 0)
    sent = queue.calls[-1]
    load_start(target(), 0, reference)
    assert queue.calls[-1] == sent
    load_start(target(), 1, reference, reference)
    assert (queue.calls[-1].seed, queue.calls[-1].first) == (sent.seed + 1, sent.requests)


def test_no_prompt_is_sent_twice_to_a_server(queue: Queue) -> None:
    load_start(target(), 3)
    numbers = [number for each in queue.calls for number in range(each.first, each.first + each.requests)]
    assert len(set(numbers)) == len(numbers)


def test_later_starts_begin_with_what_was_found_before(queue: Queue) -> None:
    first = load_start(target(), 0)
    before = len(queue.calls)
    later = load_start(target(), 1, first, first)
    assert len(later.trials) < len(first.trials)
    capacity = mean_capacity_per_s(first) or 0
    assert all(capacity / 1.3 < (each.rate_per_s or 0) < 1.3 * capacity for each in queue.calls[before:-1])


def test_requests_of_the_ramps_do_not_count(queue: Queue) -> None:
    found = load_start(target(), 0)
    sent, rate = queue.calls[-1], found.rounds[0].run.rate_per_s or 0
    ramp = math.ceil(rate * WORKLOAD.ramp_s)
    counted = [each for one in found.rounds for each in one.requests]
    assert len(counted) == sent.requests - 2 * ramp
    assert counted[0].start_s > 0
    assert [each.run.duration_s for each in found.rounds] == [pytest.approx(WORKLOAD.steady_s, rel=0.35)]


def test_a_trial_that_fails_early_is_kept_without_requests(queue: Queue) -> None:
    fast = load_start(target(), 0)
    queue.slots = 2
    trials = load_start(target(), 0, fast).trials
    early = [each for each in trials if each.run.held is False and not each.requests]
    assert early
    assert all(each.requests or each.run.held is False for each in trials)
    assert not any(one.itl_ms for each in trials for one in each.requests)


def test_the_number_of_trials_is_bounded(queue: Queue) -> None:
    """Beyond it, only until the capacity is enclosed within a factor of one and a half."""
    few, usual = (
        [each for each in load_start(given, 0).trials if each.run.rate_per_s]
        for given in (target(WORKLOAD.model_copy(update={"trials": 3})), target())
    )
    assert 3 <= len(few) < len(usual) <= WORKLOAD.trials


def test_a_rate_that_failed_once_is_tried_again_with_other_prompts_at_the_same_times(queue: Queue) -> None:
    reference = load_start(target(), 0)
    queue.slots = 6
    undisturbed = mean_capacity_per_s(load_start(target(), 0, reference))
    before = len(queue.calls)
    queue.pauses = {before + 1}  # the first trial of a rate
    found = load_start(target(), 0, reference)
    rates = [each.run.rate_per_s for each in found.trials]
    assert rates[1] == rates[2]
    assert [each.run.held for each in found.trials[1:3]] == [False, True]
    failed, again = queue.calls[before + 1 : before + 3]
    assert (failed.seed, failed.rate_per_s) == (again.seed, again.rate_per_s)
    assert again.first >= failed.first + failed.requests
    assert mean_capacity_per_s(found) == pytest.approx(undisturbed, rel=0.1)


def test_a_pause_in_a_later_start_does_not_halve_what_an_earlier_one_found(queue: Queue) -> None:
    first = load_start(target(), 0)
    for paused in range(3):
        queue.pauses = {len(queue.calls) + paused}
        later = load_start(target(), 1, first, first)
        assert mean_capacity_per_s(later) == pytest.approx(mean_capacity_per_s(first), rel=0.25)


def test_targets_that_hold_at_no_rate_are_named(queue: Queue) -> None:
    queue.request_s = 3.0
    for rate in (None, 0.5):
        given = target(WORKLOAD.model_copy(update={"request_rate_per_s": rate}))
        with pytest.raises(
            MeasurementFailed, match="1000 ms to the first token and 100 ms per token don't hold for 95%"
        ):
            load_start(given, 0)


def test_a_server_that_holds_a_low_rate_only_is_measured_beyond_the_number_of_trials(queue: Queue) -> None:
    queue.request_s, few = 0.9, target(WORKLOAD.model_copy(update={"trials": 3}))
    first = load_start(few, 0)
    queue.slots = 1
    found = load_start(few, 1, first, first)
    rated = [each for each in found.trials if each.run.rate_per_s]
    assert mean_capacity_per_s(found)
    assert len(rated) > 3
    assert [each.run.held for each in rated][-1]


def test_a_workload_may_fix_the_rate_itself(queue: Queue) -> None:
    fixed = target(WORKLOAD.model_copy(update={"request_rate_per_s": 2.5}))
    assert load_start(fixed, 0).rounds[0].run.rate_per_s == 2.5


def test_without_targets_the_saturated_server_is_measured(queue: Queue) -> None:
    offline = target(WORKLOAD.model_copy(update={"slo": None, "concurrency": 4}))
    found = load_start(offline, 0)
    assert found.trials == ()
    assert {(each.run.rate_per_s, each.run.concurrency) for each in found.rounds} == {(None, 4)}
    assert found.rounds[0].output_tokens_per_s == pytest.approx(8 * 20)
    assert queue.calls[-1].concurrency == 4
    queue.slots = 2
    other = load_start(offline, 0, found)
    assert [len(each.requests) for each in other.rounds] == [len(each.requests) for each in found.rounds]


def test_in_the_first_block_all_follow_the_pace_that_the_reference_s_search_has_shown(queue: Queue) -> None:
    reference, other = (Loading(target(), 0, StartLoad(), StartLoad()) for _ in range(2))
    list(reference.search())
    queue.slots = 8
    list(other.search())
    assert other.pace != reference.pace
    for each in (reference, other):
        list(each.measure(reference.pace))
    first, second = (
        [(one.run.number, one.run.rate_per_s, len(one.requests)) for one in each.rounds] for each in (reference, other)
    )
    assert first == second
    assert len(first) == 1
    assert Loading(target(), 1, other.found, StartLoad()).pace == reference.pace


def test_without_trials_no_capacity_is_known() -> None:
    assert mean_capacity_per_s(StartLoad()) is None
