from __future__ import annotations

import numpy as np
import pytest

from scoring.divergence import Distributions, divergence, position_divergences


def told(full: np.ndarray, listed: int) -> Distributions:
    """The likeliest tokens of full distributions (places, vocabulary), as a server reports them."""
    order = np.argsort(-full, axis=1)[:, :listed]
    return Distributions(order, np.log(np.take_along_axis(full, order, axis=1)).round(6))


def pair(seed: int, vocabulary: int, noise: float, concentration: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Distributions at 40 places, and the same disturbed."""
    chance = np.random.default_rng(seed)
    reference = chance.dirichlet(np.full(vocabulary, concentration), size=40) + 1e-9
    reference /= reference.sum(axis=1, keepdims=True)
    disturbed = reference * np.exp(noise * chance.normal(size=reference.shape))
    return reference, disturbed / disturbed.sum(axis=1, keepdims=True)


def true_kl(reference: np.ndarray, variant: np.ndarray) -> np.ndarray:
    return (reference * np.log(reference / variant)).sum(axis=1)


@pytest.mark.parametrize("noise", [0.01, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("listed", [1, 5, 20])
def test_the_divergence_is_never_more_than_the_true_one(noise, listed):
    for seed in range(20):
        reference, variant = pair(seed, vocabulary=60, noise=noise)
        found = position_divergences(told(reference, listed), told(variant, listed))
        assert (found >= 0).all()
        assert (found <= true_kl(reference, variant) + 1e-5).all()


def test_with_all_tokens_listed_it_is_the_true_one():
    reference, variant = pair(1, vocabulary=20, noise=0.5)
    found = position_divergences(told(reference, 20), told(variant, 20))
    assert found == pytest.approx(true_kl(reference, variant), abs=1e-4)


def test_of_a_few_tokens_it_is_most_of_the_true_one_for_a_slight_disturbance():
    reference, variant = pair(2, vocabulary=2000, noise=0.1, concentration=0.005)
    found = position_divergences(told(reference, 20), told(variant, 20)).mean()
    assert 0.7 < found / true_kl(reference, variant).mean() <= 1


def test_distributions_without_a_common_token_are_far_apart():
    logprobs = np.log([[0.6, 0.3]])
    one, other = Distributions(np.array([[1, 2]]), logprobs), Distributions(np.array([[3, 4]]), logprobs)
    # The other's rest is 0.1, so at most 0.1 of it can be on this one's tokens, which hold 0.9.
    assert position_divergences(one, other)[0] > 0.9 * np.log(0.9 / 0.1) - 0.5


def test_certain_tokens_and_rounding_cause_no_divergence():
    certain = Distributions(np.array([[7, 8]]), np.array([[0.0, -30.0]]))
    nearly = Distributions(np.array([[7, 9]]), np.array([[-0.000001, -9999.0]]))
    for ours, theirs in ((certain, certain), (certain, nearly), (nearly, certain)):
        assert 0 <= position_divergences(ours, theirs)[0] < 1e-4


def test_a_distribution_is_not_apart_from_itself():
    reference = [told(each, 20) for each in (pair(3, 60, 0.1)[0], pair(4, 60, 0.1)[0])]
    found = divergence(reference, reference)
    assert (found.kl, found.kl_high, found.top1_agreement, found.top1_low) == (0.0, 0.0, 1.0, 1.0)
    assert (found.documents, found.tokens) == (2, 80)


def test_means_are_over_places_and_intervals_over_documents():
    even, odd = np.array([[0.6, 0.4]]), np.array([[0.4, 0.6]])
    reference = [told(np.repeat(even, places, axis=0), 2) for places in (1, 3)]
    variant = [told(even, 2), told(np.repeat(odd, 3, axis=0), 2)]
    found = divergence(reference, variant)
    assert found.top1_agreement == pytest.approx(1 / 4)
    assert (found.top1_low, found.top1_high) == (0.0, 1.0)
    assert found.kl == pytest.approx(3 / 4 * 0.2 * np.log(0.6 / 0.4), abs=1e-5)


def test_a_greater_disturbance_is_a_greater_divergence_and_less_agreement():
    found = []
    for noise in (0.05, 0.2, 0.8):
        pairs = [pair(seed, 60, noise) for seed in range(8)]
        found.append(divergence([told(ours, 20) for ours, _ in pairs], [told(theirs, 20) for _, theirs in pairs]))
    assert found[0].kl_high < found[1].kl_low
    assert found[1].kl_high < found[2].kl_low
    assert found[0].top1_agreement > found[1].top1_agreement > found[2].top1_agreement


GOOD = Distributions(np.array([[1, 2]]), np.log([[0.5, 0.2]]))


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Distributions(np.array([[1, 2]]), np.array([[np.nan, -1.0]])), "not finite"),
        (Distributions(np.array([[1, 2]]), np.array([[-0.1, -0.1]])), "more than 1"),
        (Distributions(np.array([[1, 2]]), np.array([[-3.0, -1.0]])), "in descending order"),
        (Distributions(np.array([[1, 2]]), np.array([[-1.0]])), "need one shape"),
        (Distributions(np.array([1, 2]), np.array([-1.0, -2.0])), "need one shape"),
        (Distributions(np.zeros((0, 2), dtype=int), np.zeros((0, 2))), "need one shape"),
        (Distributions(np.array([[1, 2]] * 2), np.log([[0.5, 0.2]] * 2)), "1 positions of the reference, 2"),
    ],
)
def test_invalid_or_unpaired_distributions_are_refused(variant, message):
    with pytest.raises(ValueError, match=message):
        divergence([GOOD], [variant])


def test_other_documents_or_none_are_refused():
    with pytest.raises(ValueError, match="argument"):
        divergence([GOOD, GOOD], [GOOD])
    with pytest.raises(ValueError, match="no documents"):
        divergence([], [])


def test_greedy_answers_agree_as_far_as_their_tokens_do() -> None:
    reference = [(1, 2, 3, 4), (5, 6), (), (7,)]
    found = divergence([GOOD], [GOOD], (reference, [(1, 2, 9, 4), (5, 6), (), (8, 8)]))
    assert found.greedy_agreement == 0.5
    assert found.greedy_prefix == pytest.approx((0.5 + 1 + 1 + 0) / 4)
    assert found.greedy_low is not None
    assert found.greedy_high is not None
    assert 0 <= found.greedy_low < 0.5 < found.greedy_high <= 1


def test_the_same_greedy_answers_agree_wholly_and_unpaired_ones_are_refused() -> None:
    found = divergence([GOOD], [GOOD], ([(1, 2)] * 3, [(1, 2)] * 3))
    assert (found.greedy_low, found.greedy_prefix) == (1.0, 1.0)
    with pytest.raises(ValueError, match="zip"):
        divergence([GOOD], [GOOD], ([(1,)], []))
    with pytest.raises(ValueError, match="no items"):
        divergence([GOOD], [GOOD], ([], []))
