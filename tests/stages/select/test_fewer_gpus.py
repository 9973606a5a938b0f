"""What is decided, and said, of the winner on fewer GPUs than all variants were measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scoring.constraints import AtMost, Constraints
from scoring.profile import Profile
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import Capacity, Evaluation, Smaller, Trial
from stages.parts.records.production import Cost, FewerGpus
from stages.parts.releases.pinned import pinned
from stages.select.decision import fewer_gpus_of, sentences_of
from stages.select.selection import select
from tests.samples import measured_store

TOKENS = 100
"""The tokens of an answer."""
COST = Cost(value=0.61, low=0.6, high=0.62, currency="USD", tokens_per_s=980, basis="goodput")


@pytest.fixture
def winner(tmp_path: Path) -> Evaluation:
    """An evaluation on two GPUs, which hold 9.8 requests/s."""
    store: ModelStore = measured_store(tmp_path)
    found = Evaluation.read(store.evaluation("awq"))
    assert found
    return found.model_copy(update={"capacity": capacity(9.7, 9.9)})


def capacity(*starts_per_s: float, failed: bool = True) -> Capacity:
    mean = (starts_per_s[0] * starts_per_s[-1]) ** 0.5
    rates = [
        Trial(restart=n, rate_per_s=each, requests=20, share=1.0, held=True) for n, each in enumerate(starts_per_s)
    ]
    above = [each.model_copy(update={"rate_per_s": 2 * each.rate_per_s, "held": False}) for each in rates]
    return Capacity(
        ttft_ms=1000,
        tpot_ms=100,
        requests_per_s=mean,
        output_tokens_per_s=TOKENS * mean,
        low=None,
        high=None,
        starts=tuple(TOKENS * each for each in starts_per_s),
        trials=tuple([*rates, *above] if failed else rates),
    )


def layout(winner: Evaluation, limits: Constraints | None = None, **smaller: Any) -> FewerGpus:
    """On one GPU, which holds 7.1 requests/s unless *smaller* says otherwise."""
    load = winner.load.model_copy(update={"rate_per_s": 5.2})
    given: dict[str, Any] = {"capacity": capacity(7.0, 7.2), "load": load, "engine": winner.engine, "seconds": 1.0}
    measured = Smaller(tensor_parallel_size=1, instead_of=2, **(given | smaller))
    found = fewer_gpus_of(winner.model_copy(update={"smaller": measured}), limits or Constraints())
    assert found
    return found


def test_what_meets_the_targets_and_costs_less_is_served_on_fewer_gpus(winner: Evaluation) -> None:
    found = layout(winner)
    assert found.against == ()
    assert sentences_of(found, "awq", COST) == (
        "awq on 1 GPU: 7.1 requests/s per GPU, on 2 GPUs 4.9: 1 GPU costs 31% less per request (26% to 36%), 0.421 "
        "instead of 0.61 USD for a million output tokens. It is served on 1 GPU unless serving.tensor_parallel_size is "
        "a number."
    )
    assert ", 0.421" not in sentences_of(found, "awq", None)


@pytest.mark.parametrize(
    ("smaller", "why"),
    [
        ({"capacity": capacity(4.0, 7.2)}, "the difference in cost may be chance"),
        ({"capacity": capacity(4.0, 4.1)}, "it holds the latency targets up to 4.05 requests/s, not at 5.2"),
        ({"capacity": capacity(4.0, 4.1)}, "it is not cheaper"),
        ({"failure": "the server was lost.\nmore"}, "the server was lost"),
    ],
)
def test_otherwise_it_is_served_as_it_was_measured_with_the_others(
    winner: Evaluation, smaller: dict[str, Any], why: str
) -> None:
    found = layout(winner, **smaller)
    assert why in found.against
    if why == "the difference in cost may be chance":
        assert "less per request (74% less to " in sentences_of(found, "awq", None)
    assert (
        f"With serving.tensor_parallel_size auto it is served on 2 GPUs: {'; '.join(found.against)}."
        in sentences_of(found, "awq", COST)
    )


def test_the_limits_of_the_profile_hold_on_fewer_gpus_too(winner: Evaluation) -> None:
    limit = winner.load.e2el_ms.p95
    assert layout(winner, Constraints(e2el_p95_ms=AtMost(max=limit), memory_gib=AtMost(max=1e-9))).against == ()
    (why,) = layout(winner, Constraints(e2el_p95_ms=AtMost(max=limit / 2))).against
    assert "above" in why


def test_a_capacity_that_is_only_known_from_below_shows_nothing(winner: Evaluation) -> None:
    unknown = winner.model_copy(update={"capacity": capacity(9.7, 9.9, failed=False)})
    assert layout(unknown).against == ("every rate held that was tried on 2 GPUs, so these can do more",)


def test_single_starts_do_not_show_that_it_is_cheaper(winner: Evaluation) -> None:
    once = winner.model_copy(update={"capacity": capacity(9.8)})
    found = layout(once, capacity=capacity(7.1))
    assert found.against == ("one start of each does not show how much chance there is in it",)
    assert "31% less per request." in sentences_of(found, "awq", None)


def test_without_targets_the_rates_of_the_saturated_servers_are_compared_start_by_start(winner: Evaluation) -> None:
    rounds = [winner.load.model_copy(update={"requests_per_s": rate}) for rate in (9.8, 9.8)]
    saturated = winner.model_copy(update={"capacity": None, "rounds": tuple(rounds)})
    halved = tuple(each.model_copy(update={"requests_per_s": each.requests_per_s * 0.7}) for each in rounds)
    found = layout(saturated, capacity=None, rounds=halved, load=halved[0])
    assert (found.requests_per_s, found.requests_per_s_before) == pytest.approx((6.86, 4.9), rel=1e-3)
    assert found.cost
    assert (found.cost.low, found.cost.high) == pytest.approx((0.5 / 0.7 - 1,) * 2)
    assert found.against == ()


def test_a_variant_that_was_measured_once_has_no_layout(winner: Evaluation) -> None:
    assert fewer_gpus_of(winner, Constraints()) is None
    assert "smaller" not in winner.model_dump(mode="json")


def test_the_same_winner_on_another_number_of_gpus_is_another_release(tmp_path: Path) -> None:
    store, profile, variants = measured_store(tmp_path), Profile(name="balanced"), ["fp16", "awq", "gptq"]
    first = select(store, profile, variants).decision
    found = Evaluation.read(store.evaluation(first.winner))
    assert found
    smaller = Smaller(
        tensor_parallel_size=1,
        instead_of=2,
        engine=found.engine,
        load=found.load,
        capacity=capacity(9 * found.load.requests_per_s),
        seconds=1.0,
    )
    found.model_copy(update={"smaller": smaller}).write(store.evaluation(first.winner))
    second = select(store, profile, variants).decision
    assert second.layout
    assert (second.winner, second.layout.against) == (first.winner, ())
    assert first.prompt_tokens_per_s
    assert second.prompt_tokens_per_s is None, "this store has no samples of the load on one GPU"
    assert (first.release[:4], second.release[:4]) == ("0001", "0002")
    assert pinned(store, AskedServing(), second.release).tensor_parallel_size == 1
    assert select(store, profile, variants).decision.release == second.release
