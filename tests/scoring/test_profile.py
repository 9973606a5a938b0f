from __future__ import annotations

import pytest
from pydantic import ValidationError

from scoring.profile import DEFAULT, Weights


def test_weights_are_shares_whatever_their_sum():
    assert Weights(quality=5, latency=2, throughput=2, memory=1).shares() == pytest.approx(DEFAULT.shares())
    assert sum(Weights(quality=3, latency=1, throughput=0, memory=0.5).shares().values()) == pytest.approx(1)


LEGAL = DEFAULT.model_dump()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"quality": 0, "latency": 0, "throughput": 0, "memory": 0}, "all weights are zero"),
        (LEGAL | {"quality": -1}, "greater than or equal to 0"),
        (LEGAL | {"quality": float("inf")}, "finite"),
        (LEGAL | {"speed": 1}, "Extra inputs"),
        ({"quality": 1}, "Field required"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, message):
    with pytest.raises(ValidationError, match=message):
        Weights(**weights)
