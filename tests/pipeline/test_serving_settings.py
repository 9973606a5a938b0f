"""What a platform says of endpoints on KServe."""

from __future__ import annotations

import pytest

from pipeline.settings.config import kserve_settings, load
from stages.parts.base.files import canonical_json
from stages.parts.base.settings import parse_json
from stages.rollout.kserve.settings import KServe


def test_releases_are_served_on_the_gpu_that_was_measured_on() -> None:
    config = load(chosen={"platform": "gke"}, assignments=["kserve.node_selector={zone: a}"])
    settings = kserve_settings(config)
    assert settings.node_selector == {"cloud.google.com/gke-accelerator": "nvidia-l4", "zone": "a"}
    assert [each.key for each in settings.tolerations] == ["nvidia.com/gpu"]
    assert (settings.claim, settings.namespace, settings.gpu) == ("slipway-models", "slipway", "nvidia.com/gpu")


def test_without_gpus_the_image_that_measured_also_serves() -> None:
    config = load(chosen={"platform": "kind"})
    settings = kserve_settings(config)
    assert (settings.gpu, settings.node_selector, settings.tolerations) == (None, {}, ())
    assert settings.image == config.platform.image_of("evaluate")
    own = load(chosen={"platform": "kind"}, assignments=["kserve.image=own/vllm:1"])
    assert kserve_settings(own).image == "own/vllm:1"


@pytest.mark.parametrize("platform", ["local", "gke", "kind"])
def test_settings_survive_the_way_to_the_stage(platform: str) -> None:
    settings = kserve_settings(load(chosen={"platform": platform}))
    assert parse_json(KServe, canonical_json(settings), "SLIPWAY_KSERVE") == settings
