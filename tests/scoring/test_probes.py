from __future__ import annotations

import math

import pytest

from scoring.probes import agreement, common_prefix

SURE = [math.log(0.9)] * 16


def test_the_same_probabilities_are_full_agreement():
    assert agreement(SURE, SURE, SURE, SURE) == 1.0


def test_noise_in_every_token_and_one_late_flip_of_a_near_tie_cost_little():
    noisy = [each + (0.02 if place % 2 else -0.02) for place, each in enumerate(SURE)]
    near_tie = [*SURE[:-1], math.log(0.49)]
    assert agreement(SURE, noisy, near_tie, [*SURE[:-1], math.log(0.5)]) > 0.97


def test_other_weights_fail_whatever_they_say_and_however_sure_they_are():
    garbage = [math.log(1e-4)] * 16
    assert agreement(SURE, garbage, SURE, SURE) < 0.01
    # Surer than recorded is another model, too.
    assert agreement([math.log(0.3)] * 16, SURE, SURE, SURE) == pytest.approx(1 / 3)


def test_broken_decoding_with_correct_weights_fails_by_its_consistency():
    said = [SURE[0], *[math.log(0.001)] * 15]
    assert agreement(SURE, SURE, said, SURE) < 0.01
    assert agreement(SURE, SURE, SURE, SURE) == 1.0, "by its likeness"


@pytest.mark.parametrize("again", [[], [math.nan] * 16, [-math.inf] * 16, SURE[:-1]])
def test_missing_or_infinite_probabilities_are_refused(again):
    with pytest.raises(ValueError, match=r"argument|missing or not finite"):
        agreement(SURE, again, SURE, SURE)


@pytest.mark.parametrize(("theirs", "same"), [([1, 2, 3], 3), ([1, 9, 3], 1), ([9], 0), ([], 0), ([1, 2, 3, 4], 3)])
def test_the_common_prefix_ends_at_the_first_other_token(theirs, same):
    assert common_prefix([1, 2, 3], theirs) == same
