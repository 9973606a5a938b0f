"""Real vLLM: divergence and probes tell a model with 5 % of its weights set to zero from the sound one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from scoring.profile import Profile
from scoring.results import Divergence
from stages.evaluate.distributions import measure_distributions
from stages.parts.base.serving_settings import Serving
from stages.parts.base.settings import CONFIGS
from stages.parts.base.workload import Workload
from stages.parts.records.evaluation import Probe
from stages.parts.samples.evidence import divergences
from stages.parts.samples.lines import Samples
from stages.parts.vllm.client import Access
from stages.parts.vllm.probes import check_probes, record_probes
from stages.parts.vllm.server import Server, ServerSpec, running
from tests.extras import need
from tests.serving import DEMO, SERVING

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
WORKLOAD = Workload(
    name="w",
    prompt_tokens=8,
    output_tokens=8,
    concurrency=1,
    quality_tasks=("t",),
    divergence_documents=8,
    divergence_text="python-docs",  # the model knows no other
)


@dataclass(frozen=True)
class Found:
    recorded: tuple[Probe, ...]
    again: float
    damaged: float
    apart_from_itself: Divergence
    apart_from_damaged: Divergence


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The sound model and then the damaged one, served once each."""
    need("vllm")
    folder = tmp_path_factory.mktemp("against")
    with served(DEMO / "model", folder / "sound.log") as server:
        answers = record_probes(Access(server.url, server.name))
        again = check_probes(Access(server.url, server.name), answers)
        sound, repeated = distributions_of(server), distributions_of(server)
    with served(with_zeros(DEMO / "model", folder / "damaged", 0.05), folder / "damaged.log") as server:
        damaged, poor = check_probes(Access(server.url, server.name), answers), distributions_of(server)
    apart = (divergences({"fp16": sound, "x": each}, "fp16")["x"] for each in (repeated, poor))
    return Found(answers, again, damaged, *apart)


def served(model: Path, log: Path) -> Any:
    return running(ServerSpec(model, "m", Serving.model_validate(SERVING), log))


def distributions_of(server: Server) -> Samples:
    documents = measure_distributions(Access(server.url, server.name), WORKLOAD, server.max_model_len(), chats=True)
    return Samples(held_out=tuple(documents))


def with_zeros(source: Path, target: Path, share: float) -> Path:
    """The model with this share of its (16-bit) weights set to zero, at random."""
    shutil.copytree(source, target)
    chance = np.random.default_rng(0)
    for path in sorted(target.glob("*.safetensors")):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        weights = np.frombuffer(content[start:], dtype=np.uint16).copy()
        weights[chance.random(len(weights)) < share] = 0
        path.write_bytes(content[:start] + weights.tobytes())
    return target


def test_the_same_server_agrees_with_itself(found: Found) -> None:
    assert found.again > 0.97
    assert found.apart_from_itself.kl < 0.002
    assert found.apart_from_itself.top1_agreement > 0.97
    assert found.apart_from_itself.greedy_prefix is not None
    assert found.apart_from_itself.greedy_prefix > 0.8


def test_probes_hold_every_token_with_its_probability(found: Found) -> None:
    for probe in found.recorded:
        assert len(probe.tokens) == len(probe.token_ids) == len(probe.logprobs) == 16
        assert all(-20 < each <= 0 for each in probe.logprobs)
        assert probe.prompt_ids


def test_a_model_with_zeroed_weights_is_beyond_the_limit_of_the_default_profile(found: Found) -> None:
    text = (CONFIGS / "profiles" / "balanced.yaml").read_text()
    limits = Profile.model_validate({"name": "balanced"} | yaml.safe_load(text)).constraints.limits()
    assert found.apart_from_damaged.kl_low > limits["kl_divergence"]
    assert found.apart_from_damaged.top1_high < 0.8
    assert found.apart_from_damaged.greedy_agreement == 0


def test_a_server_with_zeroed_weights_fails_its_probes(found: Found) -> None:
    assert found.damaged < 0.9
    assert found.damaged < found.again - 0.2
