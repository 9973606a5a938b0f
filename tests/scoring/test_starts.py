from __future__ import annotations

import math

import numpy as np
import pytest

from scoring.starts import Effects, comparable, log_means, weighted
from scoring.student import quantile

APART = np.array([[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
"""The second variant's first metric, compared with the first variant's."""


def blocks(random, variants=3, count=5, noise=0.01):
    """Variant v is v × 10 % slower; the machine changes by 10 % between blocks."""
    machine = 0.1 * random.standard_normal((count, 1, 1))
    return 0.1 * np.arange(variants)[:, None] + machine + noise * random.standard_normal((count, variants, 2))


def test_the_difference_of_two_variants_is_the_mean_of_the_requests_log_ratios():
    times = np.exp(np.random.default_rng(0).standard_normal((2, 50)))
    difference = log_means(times) @ [1, -1]
    assert difference == pytest.approx(np.log(times[0] / times[1]).mean())


def test_a_request_that_one_variant_did_not_answer_counts_for_none():
    times = np.array([[100.0, 200.0, np.nan], [100.0, 200.0, 900.0]])
    assert log_means(times).tolist() == pytest.approx([math.log(20000) / 2] * 2)
    with pytest.raises(ValueError, match="no answered request in common"):
        log_means(np.array([[1.0, np.nan], [np.nan, 1.0]]))


def test_a_block_in_which_every_server_was_lost_tells_nothing():
    logs = blocks(np.random.default_rng(0))
    with_lost = Effects(np.insert(logs, 2, np.nan, axis=0))
    assert with_lost.means == pytest.approx(Effects(logs).means)
    assert with_lost.spread(APART) == Effects(logs).spread(APART)


def test_a_comparison_of_three_starts_has_the_noise_of_its_own_differences():
    logs = blocks(np.random.default_rng(0), count=3)
    logs[:, :2] += np.random.default_rng(1).normal(0, 0.2, (3, 2, 1))
    found = Effects(logs)
    differences = logs[:, 1, 0] - logs[:, 0, 0]
    assert found.means[1, 0] - found.means[0, 0] == pytest.approx(differences.mean())
    assert found.spread(APART) == (pytest.approx(differences.var(ddof=1) / 3), 2)
    # Two that agree by chance have the noise of all.
    logs[:, 1] = logs[:, 0]
    assert Effects(logs).spread(APART) == (pytest.approx(2 * Effects(logs).residual[0, 0] / 3), (3 - 1) * (3 - 1))


def test_what_a_block_has_in_common_does_not_count():
    logs = blocks(np.random.default_rng(0))
    slower = logs + np.array([0.0, 3.0, -1.0, 0.5, 2.0])[:, None, None]
    assert Effects(slower).spread(APART) == pytest.approx(Effects(logs).spread(APART))
    assert np.diff(Effects(slower).means, axis=0) == pytest.approx(np.diff(Effects(logs).means, axis=0))


def test_one_slow_start_among_ten_moves_a_difference_little():
    logs = blocks(np.random.default_rng(0))
    before = Effects(logs.copy())
    logs[3, 1] += 0.15
    after = Effects(logs)
    moved = (after.means - before.means)[1, 0] - (after.means - before.means)[0, 0]
    assert 0 < moved < 0.15 / 5 / 3
    assert after.weights[3, 1, 0] < 0.2 < after.weights[3, 0, 0]
    assert after.spread(APART).variance < np.var(logs[:, 1, 0] - logs[:, 0, 0], ddof=1) / 5 / 2


def test_the_mean_of_few_values_is_not_weighted():
    mean, weights, variance = weighted(np.array([0.0, 0.1, 5.0]))
    assert (mean, weights.tolist()) == (pytest.approx(1.7), [1, 1, 1])
    assert variance == pytest.approx(np.var([0.0, 0.1, 5.0], ddof=1) / 3)
    assert weighted(np.full(6, 2.0))[::2] == (2.0, 0.0)


def test_a_variant_that_was_dropped_still_counts_where_it_was_measured():
    logs = blocks(np.random.default_rng(1))
    logs[2:, 0] = np.nan
    found, alone = Effects(logs), Effects(logs[:, 1:])
    assert np.diff(found.means[1:], axis=0) == pytest.approx(np.diff(alone.means, axis=0), abs=0.002)
    assert found.means[0, 0] - found.means[1:, 0].mean() == pytest.approx(
        (logs[:2, 0, 0] - logs[:2, 1:, 0].mean(axis=1)).mean(), abs=0.003
    )
    assert found.spread(APART).degrees in (1, found.joint)


def test_a_single_start_says_nothing_about_the_noise():
    found = Effects(blocks(np.random.default_rng(0), count=1))
    assert found.degrees == 0
    assert math.isnan(found.spread(APART).variance)


def test_variants_that_share_no_block_are_not_compared():
    measured = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]])
    logs = np.where(measured, 0.0, np.nan)[..., None]
    assert comparable(logs, 0) == [0, 1, 2]
    assert comparable(logs, 3) == [3]


@pytest.mark.parametrize("noisier", [1, 10])
def test_the_intervals_hold_as_often_as_they_say_even_beside_quieter_variants(noisier):
    random, inside, runs = np.random.default_rng(2), 0, 2000
    for _ in range(runs):
        logs = blocks(random, count=3)
        logs[:, :2] += 0.01 * math.sqrt(noisier**2 - 1) * random.standard_normal((3, 2, 2))
        found = Effects(logs)
        spread = found.spread(APART)
        apart = abs(found.means[1, 0] - found.means[0, 0] - 0.1)
        inside += apart < quantile(0.9, spread.degrees) * math.sqrt(spread.variance)
    assert 0.77 < inside / runs < 0.9
