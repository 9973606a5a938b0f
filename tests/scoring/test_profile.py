from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from scoring.profile import DEFAULT, Profile, Weights

PROFILES = sorted((Path(__file__).parents[2] / "configs" / "profiles").glob("*.yaml"))


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"normalization": "z-score"},
        {"decision": {"confidence": 0.5}},
        {"decision": {"confidence": 90}},
        {"constraints": {"speed": {"min": 1}}},
    ],
)
def test_a_profile_that_means_nothing_is_refused(wrong):
    with pytest.raises(ValidationError):
        Profile.model_validate({"name": "mine"} | wrong)


def test_a_profile_survives_its_way_through_json():
    profile = Profile.model_validate({"name": "mine", "constraints": {"memory_gib": {"max": 20}}})
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_shipped_profile_gates_quality(path):
    profile = Profile.model_validate({"name": path.stem} | yaml.safe_load(path.read_text()))
    assert profile.constraints.limits()["quality_recovery"] >= 0.95
