"""Revisions of the demo model, pushed one after another, on real vLLM: what serves stays unless a new one is better."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from stages.parts.releases.release import current_release
from tests.demo import DEMO, MODEL
from tests.demo import train as training
from tests.demo.corpus import build_corpus
from tests.end_to_end.command_line import SETTINGS, TOKEN, Pipeline
from tests.hub.server import HubServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS: Final = 150
"""Of the training: the demo model had seven passes over all of the text."""
# Where the speed does not count, the questions decide. What they show is the same on every machine.
PROFILE: Final = "name: memory and quality\nweights: {quality: 0.5, latency: 0, throughput: 0, memory: 0.5}\n"
CHANGED: Final = ("optimize.variants=[fp16]", "workload.budget_minutes=1")


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.tokens[TOKEN] = {MODEL}
        yield server


@pytest.fixture(scope="module")
def trained_less(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model after a small part of its training."""
    folder = tmp_path_factory.mktemp("revision") / "trained-less"
    shutil.copytree(DEMO / "model", folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    random.seed(training.SEED)
    torch.manual_seed(training.SEED)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = training.encode_samples(build_corpus(), tokenizer)
    random.shuffle(samples)
    wanted = STEPS * training.BATCH_SEQUENCES * training.SEQUENCE_TOKENS
    some = samples[: next(count for count in range(len(samples)) if sum(map(len, samples[:count])) > wanted)]
    model = LlamaForCausalLM(training.model_config(tokenizer))
    training.train(model, some, some[:8], epochs=1)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def as_good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with other bytes in one of its norms, as after a step of training too small to be seen."""
    folder = tmp_path_factory.mktemp("revision") / "as-good"
    shutil.copytree(DEMO / "model", folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][0] *= 1.01
            path.unlink()
            save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, hub: HubServer) -> Pipeline:
    return Pipeline(tmp_path_factory.mktemp("store"), hub)


@pytest.fixture(scope="module")
def decisions(pipeline: Pipeline, hub: HubServer, trained_less: Path, as_good: Path) -> dict[str, dict[str, Any]]:
    """What runs printed of the revisions that were pushed in this order, with what was in production after each."""
    profile, found = pipeline.root / "profile.yaml", {}
    profile.write_text(PROFILE)
    sets = [text for each in CHANGED for text in ("--set", each)]
    pushed = {"first": trained_less, "better": DEMO / "model", "worse": trained_less, "equal": as_good}
    for name, folder in pushed.items():
        # A commit of its own, also of weights that were there before.
        hub.add_repo(MODEL, {**files(folder), "pushed.txt": name.encode()}, private=True)
        ended = pipeline.call(
            "run",
            MODEL,
            "--config",
            str(SETTINGS),
            "--profile",
            str(profile),
            *sets,
            "--no-serve",
            "--refresh",
            "--json",
        )
        assert ended.returncode == 0, ended.stderr
        decision = json.loads(ended.stdout)["decision"]
        found[name] = decision | {"production": current_release(pipeline.store)}
    return found


def files(folder: Path) -> dict[str, bytes | Path]:
    return {path.name: path for path in folder.iterdir()}


def test_a_better_revision_takes_the_place_of_what_serves(decisions: dict[str, dict[str, Any]]) -> None:
    first, better = decisions["first"], decisions["better"]
    assert first["production"] == first["release"]
    assert better["standing"]["relation"] == "better"
    assert better["standing"]["release"] == first["release"]
    assert better["production"] == better["release"] != first["release"]


def test_a_worse_revision_is_kept_and_says_which_task_got_worse(decisions: dict[str, dict[str, Any]]) -> None:
    worse = decisions["worse"]
    assert worse["standing"]["relation"] == "worse"
    assert any("demo_perplexity" in reason for reason in worse["standing"]["reasons"])
    assert worse["production"] == decisions["better"]["release"] != worse["release"]


def test_an_equal_revision_is_equivalent_and_changes_nothing(decisions: dict[str, dict[str, Any]]) -> None:
    equal = decisions["equal"]
    assert equal["standing"]["relation"] == "equivalent"
    assert equal["production"] == decisions["better"]["release"] != equal["release"]
