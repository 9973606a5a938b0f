from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from scoring.choice import judge, lacking
from scoring.criteria import Criteria, Values, Weights
from scoring.estimate import Estimate, Evidence
from scoring.losses import Quality
from scoring.results import More
from scoring.starts import Effects

CRITERIA = Criteria()
NOISE = np.array([[1, -2, 1, 0], [-1, 0, 1, 0], [0, 1, -2, 1], [0, 1, 0, -1]]) / 2
"""Each variant's own effect in four starts (columns), in units of the noise."""


def evidence(noise=0.01, starts=4, quality_noise=0.001, **variants) -> Evidence:
    """Variants by (times the reference's quality, speed, memory)."""
    quality, speed, memory = np.array(list(variants.values()), dtype=float).T
    logs = np.stack([-np.log(speed), np.log(speed)], axis=1)[None] + noise * np.stack(
        [NOISE[: len(speed), :starts].T, -NOISE[: len(speed), :starts].T], axis=2
    )
    covariance = np.eye(len(speed)) * quality_noise**2 / 2
    return Evidence(tuple(variants), Quality(np.log(0.7 * quality), covariance), Effects(logs), 16e9 * memory)


def test_a_clear_lead_is_decided():
    verdict = judge(evidence(fp16=(1, 1, 1), awq=(0.99, 1.3, 0.3), gptq=(0.99, 1.6, 0.3)), CRITERIA)
    assert (verdict.outcome, verdict.chosen) == ("decided", "gptq")
    assert verdict.ranking == ("gptq", "awq", "fp16")
    assert [each.relation for each in verdict.comparisons] == ["better", "better"]
    lead = verdict.comparisons[0]
    assert lead.lead == pytest.approx(0.2 * math.log2(1.6 / 1.3), abs=0.01)
    assert (lead.low or 0) < lead.lead < (lead.high or 0)
    assert lead.confidence > 0.99
    assert verdict.chances["gptq"] > 0.99
    assert verdict.more is None


def test_of_equivalent_variants_the_cheapest_is_chosen_by_memory_then_by_speed():
    lighter = evidence(noise=0.002, fp16=(1, 1, 1), awq=(1, 1.3, 0.3), gptq=(1, 1.31, 0.302))
    assert (judge(lighter, CRITERIA).outcome, judge(lighter, CRITERIA).chosen) == ("equivalent", "awq")
    assert judge(lighter, CRITERIA).ranking[0] == "gptq"
    faster = evidence(noise=0.002, fp16=(1, 1, 1), awq=(1, 1.3, 0.3), gptq=(1, 1.31, 0.3))
    assert (judge(faster, CRITERIA).outcome, judge(faster, CRITERIA).chosen) == ("equivalent", "gptq")


def test_a_little_less_memory_and_nothing_else_is_equivalent():
    verdict = judge(evidence(noise=0.002, fp16=(1, 1, 1), lighter=(1, 1, 0.995)), CRITERIA)
    assert (verdict.outcome, verdict.chosen) == ("equivalent", "lighter")


@pytest.mark.parametrize("other", [(1, 1.05, 1), (1, 1, 0.98), (0.99, 1, 1)])
def test_a_difference_beyond_one_margin_is_not_equivalent(other):
    verdict = judge(evidence(noise=0.0005, quality_noise=1e-5, fp16=(1, 1, 1), other=other), CRITERIA)
    assert verdict.outcome == "decided"


def test_a_metric_without_a_weight_makes_no_difference():
    only_speed = Criteria(weights=Weights(quality=0, latency=1, throughput=1, memory=0))
    assert judge(evidence(noise=0.002, fp16=(1, 1, 1), other=(0.5, 1, 2)), only_speed).outcome == "equivalent"


def test_too_few_data_are_unresolved_and_the_first_of_the_ranking_is_served():
    verdict = judge(evidence(noise=0.2, fp16=(1, 1, 1), awq=(1, 1.1, 1)), CRITERIA)
    assert (verdict.outcome, verdict.chosen) == ("unresolved", "awq")
    assert 0.5 < verdict.chances["awq"] < 0.97
    assert (verdict.comparisons[0].low or 0) < 0 < (verdict.comparisons[0].high or 0)


def test_what_would_settle_a_choice_does_settle_it():
    few = judge(evidence(noise=0.03, starts=2, fp16=(1, 1, 1), awq=(1, 1.1, 1)), CRITERIA)
    assert few.outcome == "unresolved"
    assert few.more is not None
    assert few.more.items == 1
    # Items, where starts have no influence.
    vague = judge(evidence(noise=0.0001, quality_noise=0.01, fp16=(1, 1, 1), awq=(0.99, 1.1, 1)), CRITERIA)
    assert vague.more == More(starts=0, items=32)
    exact = evidence(noise=0.0001, quality_noise=0.01 / math.sqrt(32), fp16=(1, 1, 1), awq=(0.99, 1.1, 1))
    assert judge(exact, CRITERIA).outcome == "decided"


@pytest.mark.parametrize(("speed", "first"), [(0.8, "fp16"), (1.9, "awq"), (2.5, "awq")])
def test_a_single_start_settles_nothing(speed, first):
    verdict = judge(evidence(starts=1, fp16=(1, 1, 1), awq=(1, speed, 0.3)), CRITERIA)
    assert (verdict.outcome, verdict.chosen) == ("unresolved", first)
    assert verdict.chances == {}
    assert verdict.more is None
    assert verdict.comparisons[0].high is None


@pytest.mark.parametrize(
    ("inside", "beyond", "far"), [((1.9, 0.1), (2.05, 0.1), (9, 0.1)), ((9, 0.55), (9, 0.47), (9, 0.05))]
)
def test_a_speed_beyond_an_anchor_keeps_its_noise_until_it_is_surely_beyond(inside, beyond, far):
    def width(noise, speeds):
        given = evidence(noise, 4, 1e-9, fp16=(1, 1, 1), awq=(1, speeds[0], 1), gptq=(1, speeds[1], 1))
        found = {each.other: each for each in judge(given, CRITERIA).comparisons}["gptq"]
        return (found.high or 0) - (found.low or 0)

    assert width(0.2, beyond) > 0.5 * width(0.2, inside)
    assert width(0.002, beyond) < 0.01 * width(0.002, inside)
    assert width(0.2, far) < 0.01 * width(0.2, inside)


def test_an_early_look_needs_stronger_evidence():
    given = evidence(noise=0.02, fp16=(1, 1, 1), awq=(1, 1.15, 1))
    assert judge(given, CRITERIA).outcome == "decided"
    assert judge(given, CRITERIA, times=(0.05, 0.1, 0.15, 0.2), last=False).outcome == "unresolved"


def test_a_missing_variant_makes_the_choice_incomplete():
    verdict = lacking(judge(evidence(fp16=(1, 1, 1), awq=(0.99, 1.6, 0.3)), CRITERIA), ["gptq"])
    assert (verdict.outcome, verdict.chosen) == ("incomplete", "awq")


def test_a_beaten_variant_is_not_chosen_again():
    given = evidence(noise=0.002, fp16=(1, 1, 1), awq=(1, 1.3, 0.3), gptq=(1, 1.6, 0.3))
    assert judge(given, CRITERIA, beaten=["gptq"]).chosen == "awq"
    with pytest.raises(ValueError, match="no variant can be chosen"):
        judge(given, CRITERIA, able=[])


def test_a_reference_that_cannot_be_chosen_sets_the_scale():
    given = evidence(noise=0.002, fp16=(1, 1, 1), awq=(0.99, 1.3, 0.3), gptq=(0.96, 1.3, 0.3))
    verdict = judge(given, CRITERIA, able=["awq", "gptq"])
    assert (verdict.outcome, verdict.chosen) == ("decided", "awq")
    assert "fp16" not in verdict.scores


def test_without_a_reference_the_criteria_say_against_what():
    given = evidence(noise=0.002, awq=(0.99, 1.3, 0.3), gptq=(0.96, 1.3, 0.3))
    with pytest.raises(ValueError, match="'fp16' was not measured"):
        judge(given, CRITERIA)
    values = Values(quality=0.7, latency=1.0, throughput=1.0, memory=16e9)
    verdict = judge(given, Criteria(reference=values))
    with_reference = judge(evidence(noise=0.0, fp16=(1, 1, 1), awq=(0.99, 1.3, 0.3), gptq=(0.96, 1.3, 0.3)), CRITERIA)
    assert (verdict.outcome, verdict.chosen) == ("decided", "awq")
    assert verdict.scores["gptq"] == pytest.approx(with_reference.scores["gptq"], abs=0.002)


def test_the_order_of_the_variants_does_not_matter():
    variants = {"fp16": (1, 1, 1), "awq": (0.99, 1.3, 0.3), "gptq": (0.99, 1.3, 0.3)}
    first = judge(evidence(noise=0.0, **variants), CRITERIA)
    second = judge(evidence(noise=0.0, **dict(reversed(variants.items()))), CRITERIA)
    assert (first.outcome, first.chosen, first.ranking) == (second.outcome, second.chosen, second.ranking)


def test_a_third_variant_never_changes_the_order_of_two():
    random = np.random.default_rng(0)
    for _ in range(50):
        variants = {name: tuple(np.exp(random.normal(0, [0.02, 0.3, 0.3]))) for name in ("awq", "gptq", "int8")}
        given = evidence(fp16=(1, 1, 1), **variants)
        without = evidence(fp16=(1, 1, 1), awq=variants["awq"], gptq=variants["gptq"])
        three, two = (judge(each, CRITERIA, last=False).ranking for each in (given, without))
        assert [name for name in three if name != "int8"] == list(two)


def test_nothing_is_decided_against_a_variant_whose_gates_are_unclear():
    given = evidence(noise=0.002, fp16=(1, 1, 1), awq=(1, 1.3, 0.3), gptq=(1, 0.7, 0.3))
    better = judge(given, CRITERIA, able=["fp16", "gptq"], unclear={"awq": 3.0})
    assert (better.outcome, better.chosen, better.ranking) == ("unresolved", "fp16", ("fp16", "gptq"))
    assert {each.other: each.relation for each in better.comparisons} == {"gptq": "better", "awq": "open"}
    assert better.more is not None
    assert better.more.items >= 3
    worse = judge(given, CRITERIA, able=["fp16", "awq"], unclear={"gptq": 3.0})
    assert (worse.outcome, worse.chosen) == ("decided", "awq")


def test_an_equal_variant_whose_gates_are_unclear_changes_nothing():
    given = evidence(noise=0.0005, quality_noise=1e-5, fp16=(1, 1, 1), awq=(1, 1, 0.995))
    verdict = judge(given, CRITERIA, able=["fp16"], unclear={"awq": 3.0})
    assert (verdict.outcome, verdict.chosen) == ("equivalent", "fp16")


def test_two_starts_that_agree_by_chance_decide_nothing():
    given = evidence(noise=1e-6, starts=2, quality_noise=0.002, fp16=(1, 1, 1), awq=(1, 1.1, 1))
    lead = Estimate(given, CRITERIA).lead(1, 0)
    assert lead.below(0) < 0.01
    noisy = replace(lead, by_starts=(lead.value / 12) ** 2, degrees=1)
    assert 0.02 < noisy.below(0) < 0.03
    assert noisy.reach(0.025) > lead.value


def beside(noise=0.002, gate="pass", **variants) -> Evidence:
    measured = evidence(noise=noise, **variants)
    return replace(measured, standing=dict.fromkeys(variants, gate))


@pytest.mark.parametrize(
    ("new", "gate", "relation"),
    [
        ((1.02, 1.3, 0.3), "pass", "better"),
        ((1, 1.3, 0.3), "pass", "equivalent"),
        ((1.02, 1.2, 0.3), "pass", "worse"),
        ((0.98, 1.5, 0.3), "pass", "worse"),
        ((1.02, 1.3, 0.3), "fail", "worse"),
        ((1.02, 1.3, 0.3), "unclear", "open"),
    ],
)
def test_what_is_in_production_gives_way_only_to_what_is_better_and_in_nothing_worse(new, gate, relation):
    measured = beside(gate=gate, fp16=(1, 1, 1), new=new, production=(1, 1.3, 0.3))
    verdict = judge(measured, CRITERIA)
    assert (verdict.chosen, verdict.standing and verdict.standing.relation) == ("new", relation)
    assert "production" not in verdict.ranking


def test_too_few_data_keep_what_is_in_production():
    measured = beside(noise=0.05, fp16=(1, 1, 1), new=(1.02, 1.32, 0.3), production=(1, 1.3, 0.3))
    verdict = judge(measured, CRITERIA)
    assert verdict.standing is not None
    assert verdict.standing.relation == "open"
    assert verdict.standing in verdict.open_comparisons
