from __future__ import annotations

import numpy as np

from scoring.items import Items, aligned, by_cluster, common

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
