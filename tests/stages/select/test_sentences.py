"""The sentences that say why agree with the verdict and its numbers."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from scoring.choice import Verdict, judge, lacking
from scoring.criteria import Criteria, Weights
from scoring.estimate import Evidence
from scoring.losses import Quality
from scoring.metrics import odds
from scoring.results import Change
from scoring.starts import Effects
from stages.select.sentences import reason_of

FRAMES = 60
VARIANTS = ("fp16", "awq", "gptq")


def evidence(seed: int) -> Evidence:
    """Three variants a little or a lot apart, measured with little or much noise, on one or several starts."""
    chance = np.random.default_rng(seed)
    apart, noise = chance.choice([0.002, 0.03, 0.3]), chance.choice([0.002, 0.03, 0.1])
    starts = int(chance.choice([1, 2, 5]))
    speed = chance.normal(0, apart, (1, 3, 1)) * [-1, 1] + noise * chance.standard_normal((starts, 3, 2))
    quality = math.log(0.6) - np.abs(chance.normal(0, apart / 10, 3))
    covariance = np.eye(3) * (noise / 10) ** 2
    return Evidence(VARIANTS, Quality(quality, covariance), Effects(speed), np.exp(chance.normal(0, apart, 3)))


def said(verdict: Verdict, criteria: Criteria | None = None, starts: int = 2) -> str:
    return reason_of(verdict, criteria or Criteria(), starts=starts, change={}, missing=(), excluded={})


def test_every_sentence_agrees_with_its_verdict() -> None:
    outcomes = set()
    for seed in range(FRAMES):
        found = evidence(seed)
        verdict = judge(found, Criteria())
        sentence = said(verdict, starts=found.speed.blocks)
        outcomes.add((verdict.outcome, found.speed.blocks > 1))
        first, others = verdict.ranking[0], verdict.ranking[1:]
        if verdict.outcome == "decided":
            sure = odds(min(each.confidence for each in verdict.comparisons))
            assert sentence == f"{first} is better than {others[0]} and {others[1]}, with a confidence of {sure}."
        elif verdict.outcome == "equivalent":
            equal = [first, *(each.other for each in verdict.comparisons if each.relation == "equivalent")]
            assert all(name in sentence.partition(" are equivalent")[0] for name in equal)
            assert ("Every other is worse." in sentence) == (len(equal) < 3)
            assert sentence.endswith(f"{verdict.chosen} is chosen as the cheapest to run, by memory, then by speed.")
        else:
            open_ones = [each.other for each in verdict.comparisons if each.relation == "open"]
            assert sentence.startswith(f"{first} ranks first, but there are too few data to tell whether it is better")
            assert all(name in sentence for name in open_ones)
            if verdict.chances:
                assert f"the best with a probability of {odds(verdict.chances[first])}" in sentence
            more = re.search(r"(\d+) more starts of each server", sentence)
            assert (int(more[1]) if more else 0) == (verdict.more.starts if verdict.more else 0)
            items = re.search(r"(\d+) times as many items", sentence)
            assert (int(items[1]) if items else 1) == (verdict.more.items if verdict.more else 1)
            assert ("started only once" in sentence) == (found.speed.blocks == 1)
    assert {each for each, _ in outcomes} == {"decided", "equivalent", "unresolved"}
    assert ("unresolved", False) in outcomes


def test_only_margins_of_metrics_that_count_are_named() -> None:
    same = Evidence(VARIANTS, Quality(np.zeros(3), np.zeros((3, 3))), Effects(np.zeros((3, 3, 2))), np.ones(3))
    speed = Criteria(weights=Weights(quality=0, latency=1, throughput=0, memory=0))
    assert "they differ by less than 3% in speed." in said(judge(same, speed), speed)
    assert "less than 0.5% in quality, 3% in speed and 1% in memory." in said(judge(same, Criteria()))


def test_a_missing_variant_comes_first_and_what_is_excluded_last() -> None:
    verdict = lacking(judge(evidence(1), Criteria(), able=["fp16"]), ["gptq"])
    change = {
        "quality": Change(value=-0.004, low=-0.02, high=0.01),
        "latency": Change(value=-0.2, low=-0.25, high=-0.15),
        "memory": Change(value=-0.75, low=-0.75, high=-0.75),
    }
    excluded = {"gptq": "vLLM did not start"}
    sentence = reason_of(verdict, Criteria(), starts=2, change=change, missing=["gptq"], excluded=excluded)
    assert sentence == (
        "Incomplete: gptq could not be made or measured. Of the others, fp16 is the only variant that can be chosen. "
        "Against fp16: quality -0.4% (within noise), latency -20.0%, throughput not comparable, memory -75.0%. "
        "Excluded: gptq: vLLM did not start."
    )


@pytest.mark.parametrize("low", [None, -0.1])
def test_noise_is_named_only_where_it_is_known(low: float | None) -> None:
    verdict = judge(evidence(1), Criteria())
    change = {"latency": Change(value=-0.01, low=low, high=None if low is None else 0.1)}
    sentence = reason_of(verdict, Criteria(), starts=1, change=change, missing=(), excluded={})
    assert ("latency -1.0% (within noise)" in sentence) == (low is not None)
