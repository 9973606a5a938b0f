"""The simulation of ``slipway watch``, with fewer looks than its table has."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.watch import FAULTS, SOUND, delay, samples
from scoring.watch import Watch

TEN_HOURS = 120


@pytest.mark.parametrize("name", SOUND)
def test_ten_hours_at_a_sound_endpoint_show_nothing(name: str) -> None:
    for run in range(5):
        watch = Watch()
        for sample in samples(SOUND[name], TEN_HOURS, np.random.default_rng([run, *name.encode()])):
            assert watch.see(sample) == set()


@pytest.mark.parametrize(
    "name",
    [
        *("1 % of the weights are zero (0.2 nats)", "half as fast", "a shorter context", "5 % of the requests fail"),
        *("half as fast, after 12 looks", "another dtype, after 8 looks"),
    ],
)
def test_a_change_is_noticed_within_three_looks(name: str) -> None:
    delays = [delay(*FAULTS[name], seed=[run]) for run in range(20)]
    assert sum(looks <= 3 for looks in delays) >= 18
