"""A model of 0.7 billion weights on a machine whose memory does not hold it in 16 bit, and on one that does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from scoring.units import GIB
from tests.demo import DEMO
from tests.extras import need
from tests.serving import processes_with

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CGROUPS: Final = Path("/sys/fs/cgroup")
LIMIT_BYTES: Final = 9 * GIB
"""fp16, served in float32, needs 2.6 GiB besides 6.8 for vLLM and what asks it, and int8 a quarter of it."""
SETTINGS: Final[dict[str, Any]] = {
    "workload": {
        "name": "short",
        "budget_minutes": 1,
        "prompt_tokens": 16,
        "output_tokens": 4,
        "concurrency": 1,
        "warmup_requests": 1,
        "slo": None,
        "steady_s": 2,
        "ramp_s": 0.1,
        "quality_tasks": ["perplexity_prose"],
        "quality_limit": 24,
        "divergence_documents": 2,
        "divergence_tokens": 16,
    },
    "profile": {"name": "lenient", "task_loss": 0.3, "constraints": {"quality_recovery": {"min": 0.5}}},
    "optimize": {"variants": ["fp16", "int8"]},
    "serving": {"dtype": "float32", "kv_cache_mib": 256, "enforce_eager": True, "max_model_len": 512, "port": 0},
}
NAMED: Final = ("--set", "profile.reference=int8", "--set", "optimize.variants=[int8]")


@dataclass(frozen=True)
class Machine:
    """The command line on a machine with a store of its own."""

    root: Path
    model: Path
    limited_by: tuple[str, ...] = ()
    """The command that limits the memory of what follows."""

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        settings = self.model.with_name("settings.yaml")
        settings.write_text(yaml.safe_dump(SETTINGS))
        variables = {"SLIPWAY_STORE": str(self.root), "SLIPWAY_CONFIG": str(settings)}
        command = [*self.limited_by, sys.executable, "-m", "pipeline", *arguments]
        return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call("run", str(self.model), "--no-serve", *arguments)

    def decision(self) -> dict[str, Any]:
        (path,) = self.root.glob("*/runs/*/decision.json")
        decision: dict[str, Any] = json.loads(path.read_text())
        return decision

    def report(self) -> str:
        (path,) = self.root.glob("*/runs/*/report.html")
        return path.read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with random weights."""
    need("vllm")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model") / "random-0.7b"
    shutil.copytree(DEMO / "model", folder, ignore=shutil.ignore_patterns("model*.safetensors*"))
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    shape = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=1024, dtype="bfloat16", **shape)
    made = LlamaForCausalLM(config).to(torch.bfloat16)
    assert 0.68e9 < sum(parameter.numel() for parameter in made.parameters()) < 0.72e9
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Machine:
    """The machine as it is, on which the run has ended."""
    machine = Machine(tmp_path_factory.mktemp("large"), model)
    ended = machine.run()
    assert ended.returncode == 0, ended.stderr
    return machine


@pytest.fixture
def small(tmp_path: Path, model: Path) -> Iterator[Machine]:
    """The same with a limit of memory, as a container has it."""
    controller = memory_controller()
    group = controller / f"slipway-test-{os.getpid()}"
    limit = "memory.max" if (controller / "memory.max").exists() or controller == CGROUPS else "memory.limit_in_bytes"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"needs a control group with a limit of memory: {error}")
    inside = f'echo $$ > {group}/cgroup.procs && mount --bind {group} {controller} && exec "$@"'
    yield Machine(tmp_path / "small", model, ("unshare", "--mount", "sh", "-c", inside, "sh"))
    assert processes_with(str(tmp_path)) == []
    with suppress(OSError):
        group.rmdir()


def memory_controller() -> Path:
    first = CGROUPS / "memory"
    return first if first.is_dir() else CGROUPS


def refused(machine: Machine, *arguments: Sequence[str]) -> str:
    ended = machine.run(*map(str, arguments))
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


def test_it_is_refused_with_the_ways_out_and_released_by_kept_answers(small: Machine, large: Machine) -> None:
    why = "fp16 needs 9.3 GiB for weights, KV cache, vLLM itself and what asks it, and this machine has 9.0"
    said = refused(small)
    assert why in said
    assert "slipway samples export" in said
    assert "profile.reference=int8" in said
    assert f"a run on this machine is refused: {why}" in small.call("plan", str(small.model), "--gpu", "h100").stdout
    answers = small.root.with_name("answers.jsonl")
    exported = large.call("samples", "export", str(large.model))
    assert exported.returncode == 0, exported.stderr
    answers.write_text(exported.stdout)
    imported = small.call("samples", "import", str(answers))
    assert imported.returncode == 0, imported.stderr
    planned = small.call("plan", str(small.model), "--gpu", "h100").stdout
    assert f"a run on this machine takes no GPU, 512 tokens of context; without fp16 ({why})" in planned
    ended = small.run()
    assert ended.returncode == 0, ended.stderr
    decision = small.decision()
    assert (decision["winner"], decision["anchor"], decision["outcome"]) == ("int8", "int8", "decided")
    assert decision["candidates"][0]["losses"]
    assert decision["candidates"][1]["excluded"] == why
    assert "fp16 was asked the questions and not loaded" in small.report()
    whole = {candidate["variant"]: candidate for candidate in large.decision()["candidates"]}
    # The same answers of both machines, but for arithmetic in another order.
    assert decision["candidates"][0]["losses"][0]["value"] == pytest.approx(
        whole["int8"]["losses"][0]["value"], abs=1e-3
    )
    assert small.call("verify-decision").returncode == 0


def test_it_is_released_by_another_reference_and_the_report_says_what_is_not_known(small: Machine) -> None:
    ended = small.run(*NAMED)
    assert ended.returncode == 0, ended.stderr
    assert small.decision()["winner"] == "int8"
    assert "The loss against 16 bit is not known: int8 took the place of fp16." in small.report()
