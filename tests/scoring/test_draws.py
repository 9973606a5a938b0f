from __future__ import annotations

import numpy as np
import pytest

from scoring.draws import Items, Round, load_draws, quality_draws, resampled

VARIANTS = ("fp16", "awq", "gptq")


def rounds_of(speeds: list[float], requests: int = 128, seed: int = 0) -> list[Round]:
    chance = np.random.default_rng(seed)
    return [Round(chance.gamma(20, 5, requests) * 100 / speed, speed) for speed in speeds]


def right(share: float, items: int = 500, seed: int = 0) -> Items:
    return Items((np.random.default_rng(seed).random(items) < share).astype(float))


def test_the_same_seed_gives_the_same_draws_whoever_else_is_drawn():
    rounds = {name: rounds_of([90, 100, 110], seed=place) for place, name in enumerate(VARIANTS)}
    alone, all_three = load_draws({"awq": rounds["awq"]}), load_draws(rounds)
    assert np.array_equal(alone["awq"]["latency"], all_three["awq"]["latency"])
    assert np.array_equal(alone["awq"]["throughput"], all_three["awq"]["throughput"])
    assert not np.array_equal(load_draws(rounds, seed=1)["awq"]["latency"], all_three["awq"]["latency"])
    tasks = {name: {"arc": right(0.8)} for name in VARIANTS}
    backwards = {name: tasks[name] for name in reversed(VARIANTS)}
    assert np.array_equal(quality_draws(tasks)["awq"]["quality"], quality_draws(backwards)["awq"]["quality"])


def test_throughput_varies_as_the_mean_of_so_few_rounds_does():
    speeds = [90.0, 100.0, 110.0]
    drawn = load_draws({"fp16": rounds_of(speeds)}, draws=20_000)["fp16"]["throughput"]
    assert drawn.mean() == pytest.approx(100, rel=0.005)
    assert drawn.std() == pytest.approx(np.std(speeds, ddof=1) / np.sqrt(3), rel=0.03)


def test_latency_varies_between_rounds_more_than_within_one():
    steady = load_draws({"fp16": rounds_of([100, 100, 100])})["fp16"]["latency"]
    shaky = load_draws({"fp16": rounds_of([60, 100, 160])})["fp16"]["latency"]
    assert shaky.std() > 3 * steady.std() > 0


def test_latency_is_drawn_around_the_percentile_of_all_requests():
    rounds = rounds_of([100, 100, 100], requests=400)
    measured = np.percentile(np.concatenate([each.latencies_ms for each in rounds]), 95)
    assert load_draws({"fp16": rounds})["fp16"]["latency"].mean() == pytest.approx(measured, rel=0.02)


def test_rounds_may_have_different_numbers_of_requests():
    rounds = [Round(np.full(2, 5.0), 10.0), Round(np.full(50, 7.0), 10.0)]
    assert set(load_draws({"fp16": rounds})["fp16"]["latency"]) == {5.0, 7.0}


def test_one_round_tells_no_noise_of_throughput():
    drawn = load_draws({"fp16": rounds_of([100])})["fp16"]
    assert set(drawn) == {"latency"}
    assert drawn["latency"].std() > 0


def test_what_paired_rounds_have_in_common_cancels_out():
    busy = {"fp16": rounds_of([50, 100, 150]), "awq": rounds_of([51, 102, 153])}
    apart, together = load_draws(busy), load_draws(busy, paired=True)
    difference = {
        name: each["awq"]["throughput"] - each["fp16"]["throughput"]
        for name, each in (("apart", apart), ("together", together))
    }
    assert difference["together"].min() > 0
    assert difference["apart"].min() < 0


def test_paired_rounds_of_different_number_are_refused():
    with pytest.raises(ValueError, match="same number"):
        load_draws({"fp16": rounds_of([1, 2]), "awq": rounds_of([1])}, paired=True)


def test_all_variants_get_the_same_items():
    hard = np.random.default_rng(0).random(500)
    tasks = {"fp16": {"arc": Items((hard < 0.8).astype(float))}, "awq": {"arc": Items((hard < 0.78).astype(float))}}
    drawn = quality_draws(tasks)
    assert (drawn["fp16"]["quality"] >= drawn["awq"]["quality"]).all()
    assert drawn["fp16"]["quality"].std() == pytest.approx(np.sqrt(0.8 * 0.2 / 500), rel=0.1)


def test_quality_is_the_mean_over_tasks_of_accuracy_and_probability_per_byte():
    sizes = np.array([8.0, 16.0])
    # One bit per byte, so one half.
    perplexity = Items(-np.log(2) * sizes, sizes)
    drawn = quality_draws({"fp16": {"arc": Items(np.ones(10)), "wiki": perplexity}}, draws=10)["fp16"]["quality"]
    assert drawn.tolist() == pytest.approx([0.75] * 10)


@pytest.mark.parametrize("cells", [1, 700, 9999])
def test_many_items_are_drawn_in_blocks_that_do_not_show(cells):
    whole = [each for _, each in resampled(50, 200, np.random.default_rng(0))]
    blocks = list(resampled(50, 200, np.random.default_rng(0), cells))
    assert [start for start, _ in blocks] == list(range(0, 200, len(blocks[0][1])))
    assert np.array_equal(np.concatenate([each for _, each in blocks]), np.concatenate(whole))


@pytest.mark.parametrize(
    "other",
    [{"arc": right(0.5, items=499)}, {"wiki": right(0.5)}, {}, {"arc": right(0.5), "wiki": right(0.5)}],
    ids=["other items", "another task", "no task", "one more task"],
)
def test_quality_on_other_items_can_not_be_compared(other):
    with pytest.raises(ValueError, match="same tasks"):
        quality_draws({"fp16": {"arc": right(0.5)}, "awq": other})


def test_a_task_without_items_has_no_quality():
    with pytest.raises(ValueError, match="at least one"):
        quality_draws({"fp16": {"arc": Items(np.array([]))}})
