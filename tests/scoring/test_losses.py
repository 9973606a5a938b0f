from __future__ import annotations

import math

import numpy as np
import pytest

from scoring.items import Items
from scoring.losses import TaskLoss, mean_quality, task_losses, task_quality


def flipped(random, model, flips, loss=0.0):
    """Answers like *model*'s, with so many flips of items both ways, and a share of its score lost."""
    accuracy = model.mean()
    lost, gained = (flips / 2 + loss * accuracy) / accuracy, flips / 2 / (1 - accuracy)
    return model ^ (random.random(len(model)) < np.where(model, lost, gained))


def answered(*answers):
    return task_quality([Items(each.astype(float)) for each in answers])


def difference(quality):
    variance = quality.covariance[0, 0] + quality.covariance[1, 1] - 2 * quality.covariance[0, 1]
    return quality.logs[1] - quality.logs[0], math.sqrt(variance)


def test_the_noise_of_a_paired_difference_is_that_of_its_repetitions():
    random = np.random.default_rng(0)
    found = []
    for _ in range(1500):
        reference = random.random(1000) < 0.7
        found.append(difference(answered(reference, flipped(random, reference, 0.04))))
    moved, stated = np.array(found).T
    assert stated.mean() == pytest.approx(moved.std(), rel=0.1)
    assert stated.mean() == pytest.approx(math.sqrt(0.04 / 1000) / 0.7, rel=0.05)


def test_the_noise_of_a_perplexity_is_that_of_its_repetitions():
    random, sizes = np.random.default_rng(0), np.random.default_rng(1).integers(500, 4000, 200).astype(float)
    found = []
    for _ in range(400):
        nats = -0.5 * sizes * (1 + 0.2 * random.standard_normal(200))
        worse = nats + sizes * (math.log(0.99) + 0.02 * random.standard_normal(200))
        found.append(difference(task_quality([Items(nats, sizes=sizes), Items(worse, sizes=sizes)])))
    moved, stated = np.array(found).T
    assert moved.mean() == pytest.approx(math.log(0.99), abs=0.0005)
    assert stated.mean() == pytest.approx(moved.std(), rel=0.1)


def test_no_flips_in_a_few_items_do_not_show_that_there_are_none():
    right = np.arange(50) < 35
    moved, deviation = difference(answered(right, right))
    assert moved == 0
    assert deviation == pytest.approx(1 / 35, rel=0.01)


def test_the_quality_over_tasks_is_their_mean():
    random = np.random.default_rng(0)
    first, second = (answered(*(random.random((2, 500)) < share)) for share in (0.5, 0.8))
    found = mean_quality([first, second])
    assert np.exp(found.logs) == pytest.approx((np.exp(first.logs) + np.exp(second.logs)) / 2)
    assert difference(found)[1] < max(difference(first)[1], difference(second)[1])
    assert found.of([1]).logs.tolist() == [found.logs[1]]
    with pytest.raises(ValueError, match="no tasks"):
        mean_quality([])


def test_items_are_paired_by_their_names_and_weighted():
    names = tuple("abcd")
    ours = Items(np.array([1.0, 0, 1, 1]), weights=np.array([1.0, 1, 1, 3]), names=names)
    theirs = Items(np.array([1.0, 1, 0, 1]), weights=np.array([3.0, 1, 1, 1]), names=names[::-1])
    assert np.exp(task_quality([ours, theirs]).logs) == pytest.approx([5 / 6, 5 / 6])
    assert difference(task_quality([ours, ours]))[1] == pytest.approx(1 / 4 / (5 / 6))


def test_a_variant_without_items_has_no_quality():
    with pytest.raises(ValueError, match="no items"):
        task_quality([Items(np.zeros(0))])


def test_a_variant_without_a_right_answer_loses_nearly_everything():
    right, wrong = np.arange(100) < 60, np.zeros(100, dtype=bool)
    loss = task_losses({"task": answered(right, wrong)}, 1, 0, 0.03)["task"]
    assert loss.value == pytest.approx(1 - 0.5 / 60)
    assert loss.verdict == "fail"
    # A text that the model finds impossible.
    sizes = np.full(40, 2000.0)
    text = task_quality([Items(-0.5 * sizes, sizes=sizes), Items(-900 * sizes, sizes=sizes)])
    assert task_losses({"text": text}, 1, 0, 0.03)["text"].verdict == "fail"


def test_a_gate_passes_what_is_shown_to_lose_less_than_its_limit():
    random, passed, runs = np.random.default_rng(3), {0.0: 0, 0.03: 0}, 300
    for _ in range(runs):
        reference = random.random(2500) < 0.7
        for loss in passed:
            task = answered(reference, flipped(random, reference, 0.02, loss))
            passed[loss] += task_losses({"task": task}, 1, 0, 0.03)["task"].verdict == "pass"
    assert passed[0.0] / runs > 0.98
    assert passed[0.03] / runs < 0.1


def test_a_gate_says_how_many_items_it_needs():
    few = TaskLoss(value=0.01, low=-0.02, high=0.04, limit=0.03)
    assert few.verdict == "unclear"
    assert few.more_items == pytest.approx((0.03 / 0.02) ** 2)
    assert TaskLoss(value=0.01, low=0.0, high=0.02, limit=0.03).more_items == 1
    lost = TaskLoss(value=0.05, low=0.04, high=0.06, limit=0.03)
    assert (lost.verdict, lost.more_items) == ("fail", 1)
    worse = TaskLoss(value=0.04, low=0.02, high=0.06, limit=0.03)
    assert (worse.verdict, worse.more_items) == ("unclear", pytest.approx(4))
    assert TaskLoss(value=0.03, low=0.02, high=0.04, limit=0.03).more_items == math.inf


def test_items_of_one_text_are_sampled_together():
    """Twenty questions about each of 100 texts, of which the variant answers one text wholly wrong."""
    reference = np.ones(2000)
    variant = reference.copy()
    variant[:20] = 0.0
    clusters = tuple(str(place // 20) for place in range(2000))
    alone = task_quality([Items(reference), Items(variant)])
    together = task_quality([Items(reference, clusters=clusters), Items(variant, clusters=clusters)])
    assert together.logs == pytest.approx(alone.logs)
    assert together.covariance[1, 1] == pytest.approx(20 * alone.covariance[1, 1], rel=0.1)
    assert (alone.degrees, together.degrees) == (1999, 99)


def test_clusters_stay_with_their_items_where_variants_were_asked_different_ones():
    first = Items(np.ones(3), names=("a", "b", "c"), clusters=("x", "x", "y"))
    second = Items(np.array([1.0, 0.0]), names=("b", "d"), clusters=("x", "z"))
    assert task_quality([first, second]).degrees == 2
