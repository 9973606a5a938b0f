from __future__ import annotations

import math

import numpy as np
import pytest

from scoring.starts import effects, log_means
from scoring.student import quantile


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


def test_the_model_is_the_analysis_of_variance_of_two_ways():
    logs = blocks(np.random.default_rng(0))
    found = effects(logs)
    residuals = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean(axis=(0, 1))
    assert found.degrees == (3 - 1) * (5 - 1)
    assert found.means == pytest.approx(logs.mean(axis=0))
    assert np.diag(found.residual) == pytest.approx((residuals**2).sum(axis=(0, 1)) / 8)
    assert found.spread[0, 0] + found.spread[1, 1] - 2 * found.spread[0, 1] == pytest.approx(2 / 5)


def test_what_a_block_has_in_common_does_not_count():
    logs = blocks(np.random.default_rng(0))
    slower = logs + np.array([0.0, 3.0, -1.0, 0.5, 2.0])[:, None, None]
    assert effects(slower).residual == pytest.approx(effects(logs).residual)
    assert np.diff(effects(slower).means, axis=0) == pytest.approx(np.diff(effects(logs).means, axis=0))


def test_a_variant_that_was_dropped_still_counts_where_it_was_measured():
    logs = blocks(np.random.default_rng(1))
    logs[2:, 0] = np.nan
    found, alone = effects(logs), effects(logs[:, 1:])
    assert found.degrees == 12 + 1 - 3 - 5 + 1 - 1
    # Two that were in every block are compared as if there were no other; only the noise is known better.
    assert np.diff(found.means[1:], axis=0) == pytest.approx(np.diff(alone.means, axis=0))
    assert alone.degrees == 4
    first = np.nanmean(logs[:2, 0] - logs[:2, 1:].mean(axis=1), axis=0)
    assert found.means[0] - found.means[1:].mean(axis=0) == pytest.approx(first)


def test_a_single_start_says_nothing_about_the_noise():
    found = effects(blocks(np.random.default_rng(0), count=1))
    assert found.degrees == 0
    assert np.isnan(found.residual).all()


def test_variants_that_share_no_block_are_not_compared():
    logs = blocks(np.random.default_rng(0), variants=2, count=2)
    logs[0, 0] = logs[1, 1] = np.nan
    with pytest.raises(ValueError, match="share no block"):
        effects(logs)


def test_the_intervals_hold_as_often_as_they_say():
    random, inside, runs = np.random.default_rng(2), 0, 2000
    for _ in range(runs):
        found = effects(blocks(random, count=3))
        deviation = math.sqrt(2 / 3 * found.residual[0, 0])
        inside += abs(found.means[1, 0] - found.means[0, 0] - 0.1) < quantile(0.9, found.degrees) * deviation
    assert inside / runs == pytest.approx(0.8, abs=0.03)
