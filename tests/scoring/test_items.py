from __future__ import annotations

import numpy as np
import pytest

from scoring.items import Items, aligned, by_cluster, common, growth

ASKED = Items(np.array([1.0, 0.0, 1.0]), names=("a", "b", "c"), clusters=("t", "t", "u"))


def test_common_items_are_those_of_the_same_names_in_the_same_order():
    other = Items(np.array([5.0, 6.0, 7.0]), names=("c", "x", "a"))
    ours, theirs = common(ASKED, other)
    assert (ours.named(), theirs.named()) == (("a", "c"), ("a", "c"))
    assert (ours.values.tolist(), theirs.values.tolist()) == ([1.0, 1.0], [7.0, 5.0])
    assert ours.clusters == ("t", "u")


def test_items_without_names_are_paired_by_position():
    assert Items(np.zeros(2)).named() == ("0", "1")
    both = {"fp16": Items(np.zeros(2)), "awq": Items(np.ones(2))}
    assert aligned(both) == both


def test_an_item_that_a_variant_was_not_asked_counts_nothing_for_it():
    texts = Items(np.array([-8.0]), np.array([4.0]), names=("a",))
    found = aligned({"fp16": texts, "awq": Items(np.array([-6.0]), np.array([3.0]), names=("b",))})
    assert (found["fp16"].values.tolist(), found["awq"].values.tolist()) == ([-8.0, 0.0], [0.0, -6.0])
    assert found["awq"].sizes is not None
    assert found["awq"].sizes.tolist() == [0.0, 3.0]
    answers = aligned({"fp16": ASKED, "awq": Items(np.array([1.0]), names=("c",), clusters=("u",))})
    assert answers["awq"].weights is not None
    assert answers["awq"].weights.tolist() == [0.0, 0.0, 1.0]
    assert answers["awq"].clusters == ("t", "t", "u")


def test_influences_are_added_up_within_a_cluster():
    influences = np.array([[1.0, 2.0, 4.0], [0.5, 0.5, -1.0]])
    assert by_cluster(influences, ASKED.clusters).tolist() == [[3.0, 4.0], [1.0, -1.0]]
    assert by_cluster(influences, None) is influences


def test_the_interval_of_a_growth_covers_the_truth_in_95_of_100_samples() -> None:
    random, covered = np.random.default_rng(0), 0
    for _ in range(400):
        before = random.lognormal(4, 0.5, 60)
        found = growth(before, before * 1.3 * random.uniform(0.5, 1.5, 60))
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.3 <= found.high
    assert 0.91 < covered / 400 < 0.98


def test_one_answer_shows_no_noise() -> None:
    with pytest.raises(ValueError, match="1 items show no noise"):
        growth(np.ones(1), np.ones(1))
