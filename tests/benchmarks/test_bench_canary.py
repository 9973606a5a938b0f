"""The canary's verdict on simulated rollouts with fixed seeds; ``make bench-canary`` has many more."""

from __future__ import annotations

import pytest

from benchmarks.canary import IDENTICAL, MIRRORED, SOUND, WORSE, rollout, table
from benchmarks.servers import SimulatedServer, Simulation, World
from stages.parts.records.rollout import Journal

RUNS = 3


def rollouts(name: str) -> list[tuple[Journal, float]]:
    world, canary = WORSE[name] if name in WORSE else (IDENTICAL[name], SOUND)
    return [rollout(world, canary, [number, *name.encode()]) for number in range(RUNS)]


@pytest.mark.parametrize(
    "name",
    [
        "no clients",
        "bursts ×4, 8/s",
        "9/s, growing by half in six minutes",
        "12 clients that stick",
        "failures in bursts at both",
        "the machine pauses for 5 s a minute",
    ],
)
def test_an_identical_canary_is_promoted(name: str) -> None:
    assert [journal.state for journal, _ in rollouts(name)] == ["promoting"] * RUNS


def test_a_good_canary_takes_no_longer_than_its_steps() -> None:
    assert all(seconds < 4 * 60 + 10 for _, seconds in rollouts("even, 4 requests/s"))


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("TTFT ×2, p95 0.11 s", "time to first token"),
        ("TPOT ×1.25", "time per output token"),
        ("6 % of requests wait 5 s more", "far too l"),
        ("5 % of requests fail", "requests failed"),
        ("TPOT ×1.3, a request in three seconds", "time per output token"),
    ],
)
def test_a_worse_canary_is_rolled_back_for_what_is_wrong_with_it(name: str, check: str) -> None:
    for journal, _ in rollouts(name):
        assert journal.state == "rolling back"
        assert check in journal.reason


@pytest.mark.parametrize("name", ["TPOT ×1.25", "6 % of requests wait 5 s more", "5 % of requests fail"])
def test_with_copies_a_worse_canary_is_rolled_back_before_it_gets_clients(name: str) -> None:
    journal, _ = rollout(*WORSE[name], [1], MIRRORED)
    assert (journal.state, journal.observed) == ("rolling back", ())


def test_with_copies_a_canary_whose_cache_is_cold_is_not_called_slow() -> None:
    journal, _ = rollout(IDENTICAL["prefix caches, 97 % continue a session"], SOUND, [1], MIRRORED)
    assert journal.state == "promoting"
    assert sum(part.canary.copies for part in journal.observed[0].slices) > 1000


def test_a_server_that_is_busier_is_slower_and_counts_as_vllm_does() -> None:
    tpot_s = []
    for rate in (1.0, 12.0):
        simulation = Simulation(World(rate=rate), SimulatedServer(), [1])
        simulation.advance(120.0)
        found = simulation.servers["stable"].counters()
        assert found.answered == pytest.approx(120 * rate, rel=0.2)
        assert found.prompt_tokens == pytest.approx(300 * found.prompts, rel=0.2)
        assert found.ttft[-1] >= found.answered == found.tpot[-1]
        tpot_s.append(found.tpot_s / found.tpot[-1])
    assert tpot_s[1] > 1.5 * tpot_s[0] > 0.015


def test_the_table_has_a_row_for_each_truth_that_was_asked_for() -> None:
    rows = list(table(1, only="no clients"))
    plain, mirrored = (row for row in rows if "no clients" in row)
    assert plain == "| no clients | 0.0% | 0.0% | 244 s |"
    assert mirrored == "| no clients | 0.0% | 0.0% | 0.0% | 545 s |"
