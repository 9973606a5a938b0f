from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scoring.draws import Items, Round, allowing_for_few, common, load_draws, quality_draws, resampled, student_95

VARIANTS = ("fp16", "awq", "gptq")


def rounds_of(speeds: list[float], requests: int = 128, seed: int = 0) -> list[Round]:
    chance = np.random.default_rng(seed)
    return [Round(chance.gamma(20, 5, requests) * 100 / speed, speed) for speed in speeds]


def right(share: float, items: int = 500, seed: int = 0) -> Items:
    return Items((np.random.default_rng(seed).random(items) < share).astype(float))


def test_the_same_seed_gives_the_same_draws_whatever_the_other_variants():
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


def test_one_round_does_not_show_the_noise_of_throughput():
    drawn = load_draws({"fp16": rounds_of([100])})["fp16"]
    assert set(drawn) == {"latency"}
    assert drawn["latency"].std() > 0


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
    [{"wiki": right(0.5)}, {}, {"arc": right(0.5), "wiki": right(0.5)}],
    ids=["another task", "no task", "one more task"],
)
def test_quality_on_other_tasks_can_not_be_compared(other):
    with pytest.raises(ValueError, match="same tasks"):
        quality_draws({"fp16": {"arc": right(0.5)}, "awq": other})


def test_a_task_without_items_has_no_quality():
    with pytest.raises(ValueError, match="at least one"):
        quality_draws({"fp16": {"arc": Items(np.array([]))}})


def asked(items: Items, prefix: str) -> Items:
    return replace(items, names=tuple(f"{prefix} {number}" for number in range(items.values.shape[-1])))


def test_questions_of_the_same_number_but_of_other_names_are_not_paired():
    ours = right(0.5, items=400)
    same = quality_draws({"fp16": {"arc": asked(ours, "a")}, "awq": {"arc": asked(ours, "a")}})
    other = quality_draws({"fp16": {"arc": asked(ours, "a")}, "awq": {"arc": asked(ours, "b")}})
    assert (same["fp16"]["quality"] == same["awq"]["quality"]).all()
    # Two independent means of 400 each.
    apart = other["fp16"]["quality"] - other["awq"]["quality"]
    assert apart.std() == pytest.approx(np.sqrt(2 * 0.25 / 400), rel=0.1)
    assert apart.mean() == pytest.approx(0, abs=0.003)


def test_one_question_that_not_all_were_asked_leaves_the_others_in_pairs():
    ours = asked(right(0.5, items=400), "a")
    fewer = ours.at(np.arange(399))
    drawn = quality_draws({"fp16": {"arc": ours}, "awq": {"arc": fewer}})
    assert (drawn["fp16"]["quality"] - drawn["awq"]["quality"]).std() < 0.003
    assert [each.values.tolist() for each in common(ours, fewer)] == [fewer.values.tolist()] * 2


def test_the_order_of_the_items_does_not_matter_to_their_pairs():
    ours = asked(right(0.5, items=40), "a")
    drawn = quality_draws({"fp16": {"arc": ours}, "awq": {"arc": ours.at(np.arange(40)[::-1])}})
    assert drawn["fp16"]["quality"] == pytest.approx(drawn["awq"]["quality"])


def test_texts_of_other_names_are_not_paired_either_and_few_of_them_have_a_score_in_every_draw():
    text = Items(np.array([-8.0]), np.array([8.0]))
    drawn = quality_draws({"fp16": {"wiki": asked(text, "a")}, "awq": {"wiki": asked(text, "b")}})
    for each in drawn.values():
        assert each["quality"] == pytest.approx(2 ** (-1 / np.log(2)))


def test_items_count_by_their_weights():
    # Two thirds of the items are of a task that counts half, and are right; the others are wrong.
    values, weights = np.tile([1.0, 1.0, 0.0], 50), np.tile([0.75, 0.75, 1.5], 50)
    drawn = quality_draws({"fp16": {"group": Items(values, weights=weights)}})["fp16"]["quality"]
    assert drawn.mean() == pytest.approx(0.5, abs=0.01)
    plain = quality_draws({"fp16": {"group": Items(values)}}, draws=50)["fp16"]["quality"]
    alike = quality_draws({"fp16": {"group": Items(values, weights=np.ones(150))}}, draws=50)["fp16"]["quality"]
    assert alike.tolist() == pytest.approx(plain.tolist())


def starts_of(speeds: list[list[float]]) -> list[Round]:
    return [Round(np.full(4, 1000 / speed), speed, start) for start, each in enumerate(speeds) for speed in each]


def test_a_difference_between_starts_of_the_server_is_noise_even_if_the_rounds_agree():
    starts = starts_of([[90, 90, 90, 90], [110, 110, 110, 110], [100, 100, 100, 100]])
    one = [Round(each.latencies_ms, each.output_tokens_per_s) for each in starts]
    by_start, by_round = (load_draws({"fp16": each}, draws=20_000)["fp16"]["throughput"] for each in (starts, one))
    # A mean of three starts: s/√3 with s = 10; twelve independent rounds would have promised s/√12 or so.
    assert by_start.std() == pytest.approx(10 / np.sqrt(3), rel=0.03)
    assert by_round.std() < by_start.std() / 2


def test_goodput_is_drawn_from_the_same_rounds():
    rounds = [Round(np.ones(3), speed, good_tokens_per_s=speed / 2) for speed in (80.0, 100.0, 120.0)]
    drawn = load_draws({"fp16": rounds})["fp16"]
    assert np.allclose(drawn["goodput"], drawn["throughput"] / 2)


def test_constrained_measures_are_drawn_from_the_same_requests():
    rounds = [
        Round(each.latencies_ms, 100.0, others={"ttft_p95_ms": each.latencies_ms / 4, "goodput_share": good})
        for each in rounds_of([90, 100, 110])
        for good in [(each.latencies_ms < 110).astype(float)]
    ]
    plain = [Round(each.latencies_ms, 100.0) for each in rounds]
    drawn = load_draws({"fp16": rounds})["fp16"]
    assert np.allclose(drawn["ttft_p95_ms"], drawn["latency"] / 4)
    assert np.array_equal(drawn["latency"], load_draws({"fp16": plain})["fp16"]["latency"])
    share = np.mean([each.others["goodput_share"].mean() for each in rounds])
    assert drawn["goodput_share"].mean() == pytest.approx(share, abs=0.01)
    assert drawn["goodput_share"].std() > 0


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (2, 4.303), (9, 2.262), (10, 2.228), (12, 2.179), (30, 2.042), (1000, 1.962)]
)
def test_student_s_quantiles_are_those_of_the_tables(degrees, expected):
    assert student_95(degrees) == pytest.approx(expected, abs=0.003)


def test_few_rounds_spread_the_draws_and_many_hardly_do():
    for count, factor in ((4, 3.1824 / 1.96), (200, 1.972 / 1.96)):
        rounds = {"fp16": rounds_of(list(np.linspace(90, 110, count)))}
        drawn = load_draws(rounds)
        wider = allowing_for_few(drawn, rounds)["fp16"]["throughput"]
        assert np.log(wider).std() == pytest.approx(factor * np.log(drawn["fp16"]["throughput"]).std(), rel=0.01)
        assert np.log(wider).mean() == pytest.approx(np.log(drawn["fp16"]["throughput"]).mean())


def test_the_degrees_of_freedom_are_pooled_over_the_variants():
    rounds = {name: rounds_of([90, 100, 110]) for name in ("fp16", "awq", "gptq")}
    drawn = load_draws(rounds)
    alone, together = (
        allowing_for_few({"fp16": drawn["fp16"]}, {"fp16": rounds["fp16"]}),
        allowing_for_few(drawn, rounds),
    )
    # ν is 2 alone, 6 together.
    assert np.log(alone["fp16"]["throughput"]).std() > 1.7 * np.log(together["fp16"]["throughput"]).std()


def test_one_round_can_not_be_spread():
    rounds = {"fp16": rounds_of([100])}
    drawn = load_draws(rounds)
    assert np.array_equal(allowing_for_few(drawn, rounds)["fp16"]["latency"], drawn["fp16"]["latency"])


def test_a_goodput_of_none_stays_a_rate():
    rounds = {"fp16": [Round(np.ones(3), 100.0, good_tokens_per_s=good) for good in (0.0, 10.0, 20.0)]}
    spread = allowing_for_few(load_draws(rounds), rounds)["fp16"]["goodput"]
    assert spread.min() == 0
    assert np.isfinite(spread).all()


def test_answers_of_several_starts_are_averaged_and_their_difference_is_noise():
    agree, differ = np.tile([1.0, 0.0], 50), np.tile([0.0, 1.0], 50)
    all_right = np.ones(100)
    steady = quality_draws({"fp16": {"arc": Items(np.array([agree, agree, agree]))}})["fp16"]["quality"]
    single = quality_draws({"fp16": {"arc": Items(agree)}})["fp16"]["quality"]
    moved = quality_draws({"fp16": {"arc": Items(np.array([differ, agree, all_right]))}})["fp16"]["quality"]
    assert np.allclose(steady, single)
    assert moved.mean() == pytest.approx(2 / 3, abs=0.02)
    assert moved.std() > 2 * steady.std()
