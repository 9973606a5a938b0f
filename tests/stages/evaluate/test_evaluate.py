"""The stage as a program: what it refuses, what its failures leave, and (e2e) one whole evaluation by vLLM."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from stages.evaluate.probes import PROMPTS
from stages.program import OUTPUTS_VARIABLE, RUN_VARIABLE, outcomes
from stages.records import Evaluation, Variant
from stages.select.fidelity import distributions
from stages.store import ModelStore
from tests.serving import (
    DEMO,
    MODEL,
    SERVING,
    Said,
    arguments_of,
    environment,
    living,
    processes_with,
    stage,
    stand_in_variant,
    variant_of,
    wait_until,
)

WORKLOAD: dict[str, Any] = {
    "name": "small",
    "protocol": "quick",
    "prompt_tokens": 32,
    "output_tokens": 16,
    "concurrency": 2,
    "requests": 8,
    "warmup_requests": 2,
    "rounds": 2,
    "quality_tasks": ["demo_continuation", "demo_perplexity"],
    "quality_limit": 12,
    "tasks_path": str(DEMO / "tasks"),
}
MEASURED: dict[str, Any] = {
    "prompt_spread": 0.5,
    "output_spread": 0.25,
    "sweep": [1],
    "slo": {"ttft_ms": 60_000, "tpot_ms": 60_000},
}
"""What the real vLLM is measured with."""
HANGING, FAILING = {"prompt_tokens": 2}, {"prompt_tokens": 3}
"""Loads that the stand-in never ends, and fails at."""


def evaluate(store: ModelStore, name: str, *, stand_in: bool = True, **workload: Any) -> Said:
    return stage("evaluate", *flags(name, **workload), variables=environment(store, stand_in=stand_in))


def flags(name: str, **workload: Any) -> list[str]:
    return ["--variant", name, "--workload", json.dumps(WORKLOAD | workload), "--serving", json.dumps(SERVING)]


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store", MODEL)


@pytest.fixture
def _lm_eval() -> None:
    pytest.importorskip("lm_eval", reason="the evaluate extra is not installed")


def test_a_variant_that_was_never_made_is_named(store: ModelStore) -> None:
    said = evaluate(store, "awq")
    assert said.returncode == 14
    assert "optimized/awq has no variant.json" in said.stderr


def test_a_damaged_variant_is_not_served(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    config = store.optimized("fp16") / "config.json"
    config.unlink()
    config.write_text("{}")
    said = evaluate(store, "fp16")
    assert said.returncode == 14
    assert "the fp16 variant is damaged: config.json has 2 bytes" in said.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "../base", "--workload", "{}"], "'../base' is not a variant's name"),
        (["--variant", "fp16", "--workload", "{"], "--workload is not JSON"),
        (["--variant", "fp16", "--workload", '{"promt_tokens": 1}'], "did you mean 'prompt_tokens'?"),
        (
            ["--variant", "fp16", "--workload", json.dumps(WORKLOAD), "--serving", "[]"],
            "--serving is not a JSON object",
        ),
    ],
)
def test_wrong_arguments_are_explained(store: ModelStore, arguments: list[str], message: str) -> None:
    said = stage("evaluate", *arguments, variables=environment(store))
    assert said.returncode == 2
    assert message in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.usefixtures("_lm_eval")
@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"tasks_path": "/no/such/folder"}, "tasks_path '/no/such/folder' is not a folder"),
        ({"prompt_tokens": 1020}, "needs 1020 + 16 = 1036 tokens, but the model is served with 1024"),
    ],
)
def test_a_workload_that_cannot_be_measured_starts_no_server(
    store: ModelStore, workload: dict[str, Any], message: str
) -> None:
    stand_in_variant(store, "fp16")
    said = evaluate(store, "fp16", **workload)
    assert said.returncode == 2
    assert message in said.stderr
    assert "ready in" not in said.stderr


@pytest.mark.usefixtures("_lm_eval")
def test_a_server_that_does_not_start_fails_the_stage_and_its_log_stays(store: ModelStore) -> None:
    stand_in_variant(store, "fp16", refuses="out of kernels")
    variables = environment(store, stand_in=True, **{RUN_VARIABLE: "run-1"})
    said = stage("evaluate", *flags("fp16"), variables=variables)
    assert said.returncode == 30
    log = store.run("run-1") / "logs" / "evaluate-fp16.vllm.log"
    assert "out of kernels" in said.stderr
    assert f"see {log}" in said.stderr
    assert "KV cache size" in log.read_text()
    (outcome,) = outcomes(store.run("run-1"))
    assert (outcome.stage, outcome.variant, outcome.result, outcome.key) == ("evaluate", "fp16", "failed", "")
    assert not store.evaluation("fp16").exists()


@pytest.mark.usefixtures("_lm_eval")
def test_a_server_that_dies_under_load_ends_the_load_too(store: ModelStore) -> None:
    stand_in_variant(store, "fp16", ends_after_s=2)
    said = evaluate(store, "fp16", **HANGING)
    assert said.returncode == 30
    assert "error: vLLM ended: RuntimeError: out of luck" in said.stderr
    assert not store.evaluation("fp16").exists()
    assert not processes_with(str(store.root))


@pytest.mark.usefixtures("_lm_eval")
@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (FAILING, "the load generator failed (1): RuntimeError: no tokenizer"),
        ({}, "7 of 8 requests failed: TimeoutError: slow"),
    ],
)
def test_a_failed_load_is_no_measurement(store: ModelStore, workload: dict[str, Any], message: str) -> None:
    stand_in_variant(store, "fp16")
    said = evaluate(store, "fp16", **workload)
    assert said.returncode == 31
    assert message in said.stderr
    assert not store.evaluation("fp16").exists()


@pytest.mark.usefixtures("_lm_eval")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_stopped_under_load_it_leaves_no_process_and_no_evaluation(
    store: ModelStore, number: signal.Signals, status: int
) -> None:
    stand_in_variant(store, "fp16")
    with Measuring(store, "fp16", stand_in=True, **HANGING) as (process, family):
        process.send_signal(number)
        assert process.wait(60) == status
        wait_until(lambda: not living(family), "the end of every process")
    assert not list(store.evaluation("fp16").parent.glob("*"))


class Measuring:
    """The stage, under way: from the moment that the load is."""

    def __init__(self, store: ModelStore, name: str, *, stand_in: bool, **workload: Any) -> None:
        self.root = str(store.root)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stages.evaluate", "--model", MODEL, *flags(name, **workload)],
            env=environment(store, stand_in=stand_in),
        )

    def __enter__(self) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
        try:
            wait_until(self._load, "the load")
        except BaseException:
            self.__exit__()
            raise
        return self.process, psutil.Process(self.process.pid).children(recursive=True)

    def _load(self) -> list[psutil.Process]:
        assert self.process.poll() is None, "it ended before the load"
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in family if "stages.evaluate.generator" in arguments_of(each) and each.children()]

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Evaluated:
    store: ModelStore
    variant: Variant
    said: Said
    outputs: Path
    evaluation: Evaluation


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """The demo model in 16 bit, evaluated once by the real vLLM and lm-eval."""
    folder = tmp_path_factory.mktemp("evaluated")
    store = ModelStore(folder / "store", MODEL)
    variant = variant_of(store, "fp16", DEMO / "model")
    variables = environment(store, **{RUN_VARIABLE: "run-1", OUTPUTS_VARIABLE: str(folder / "outputs")})
    said = stage("evaluate", *flags("fp16", **MEASURED), variables=variables)
    assert said.returncode == 0, said.stderr
    evaluation = Evaluation.read(store.evaluation("fp16"))
    assert evaluation
    return Evaluated(store, variant, said, folder / "outputs", evaluation)


@pytest.mark.e2e
def test_an_evaluation_is_complete_finite_and_says_what_served(evaluated: Evaluated) -> None:
    found = evaluated.evaluation
    assert (found.variant, found.variant_digest) == ("fp16", evaluated.variant.digest)
    assert all(map(math.isfinite, numbers(found.model_dump(mode="json"))))
    assert [(each.requests, each.concurrency) for each in found.rounds] == [(8, 2)] * 2
    assert found.load.requests == 16
    assert 16 * 12 <= found.load.output_tokens <= 16 * 20
    assert 16 * 16 <= found.load.prompt_tokens <= 16 * 48
    assert [(each.requests, each.concurrency) for each in found.sweep] == [(24, 1)]
    assert found.goodput
    assert found.goodput.share == 1
    assert found.goodput.output_tokens_per_s == pytest.approx(found.load.output_tokens_per_s)
    assert found.drift
    assert found.drift.before.compute_gflop_per_s > 0
    assert found.drift.measured_again == 0
    assert 0 < found.load.ttft_ms.p50 <= found.load.ttft_ms.p95 <= found.load.e2el_ms.p99
    assert found.engine.arguments[:2] == ("--dtype", found.engine.dtype)
    assert (found.engine.quantization, found.engine.kernel) == (None, None)
    assert found.memory.kv_cache_tokens > 1024
    assert found.memory.weights_bytes == evaluated.variant.weights_bytes
    assert 1 << 28 < found.memory.peak_resident_bytes < found.hardware.memory_bytes
    assert set(found.tool_versions) == {"vllm", "lm_eval", "torch"}


@pytest.mark.e2e
def test_quality_is_measured_through_the_server_with_intervals_and_samples(evaluated: Evaluated) -> None:
    accuracy, perplexity = evaluated.evaluation.quality
    assert (accuracy.task, accuracy.kind, accuracy.items) == ("demo_continuation", "accuracy", 12)
    assert (perplexity.task, perplexity.kind, perplexity.items) == ("demo_perplexity", "perplexity", 12)
    assert accuracy.low <= accuracy.value <= accuracy.high
    assert perplexity.low < perplexity.value < perplexity.high
    assert perplexity.score == pytest.approx(2**-perplexity.value)
    path = evaluated.store.evaluation("fp16").with_suffix(".samples.jsonl")
    head, *samples = map(json.loads, path.read_text().splitlines())
    assert head == {"evaluation": evaluated.evaluation.key}
    requests = [each for each in samples if "round" in each and "e2el_ms" in each]
    assert [each["round"] for each in requests] == [0] * 8 + [1] * 8
    assert all(12 <= each["output_tokens"] <= 20 for each in requests)
    assert len({each["prompt_tokens"] for each in requests}) > 4, "lengths are drawn"
    assert float(np.percentile([each["e2el_ms"] for each in requests], 95)) == pytest.approx(
        evaluated.evaluation.load.e2el_ms.p95
    )
    samples = [each for each in samples if "task" in each]
    right = [each["correct"] for each in samples if each["task"] == "demo_continuation"]
    assert sum(right) / len(right) == pytest.approx(accuracy.value)
    texts = [each for each in samples if each["task"] == "demo_perplexity"]
    bits = -sum(each["loglikelihood"] for each in texts) / math.log(2) / sum(each["bytes"] for each in texts)
    assert bits == pytest.approx(perplexity.value)


@pytest.mark.e2e
def test_its_next_token_distributions_and_its_answers_to_fixed_questions_are_kept(evaluated: Evaluated) -> None:
    lines = map(json.loads, evaluated.store.evaluation("fp16").with_suffix(".samples.jsonl").read_text().splitlines())
    texts, told = distributions([line for line in lines if "document" in line])
    assert [len(each) for each in texts] == [128] * 32
    assert all(each.tokens.shape == each.logprobs.shape == (127, 20) for each in told)
    assert [each.prompt for each in evaluated.evaluation.probes] == list(PROMPTS)
    assert evaluated.evaluation.workload["divergence_digest"]


@pytest.mark.e2e
def test_the_stage_tells_its_progress_its_outcome_and_a_summary(evaluated: Evaluated) -> None:
    said, store = evaluated.said, evaluated.store
    lines = [
        "serving fp16: ready in ",
        "load of fp16: round 2, 8 requests, ",
        "quality of fp16: demo_perplexity ",
        "done: fp16: ",
    ]
    positions = [said.stderr.index(line) for line in lines]
    assert positions == sorted(positions)
    summary = json.loads(said.stdout)
    assert summary == json.loads((evaluated.outputs / "summary").read_text())
    assert summary["e2el_p95_ms"] == evaluated.evaluation.load.e2el_ms.p95
    assert summary["quality"] == pytest.approx(sum(each.score for each in evaluated.evaluation.quality) / 2)
    (outcome,) = outcomes(store.run("run-1"))
    assert (outcome.result, outcome.key) == ("done", evaluated.evaluation.key)
    assert "Starting vLLM server" in (store.run("run-1") / "logs" / "evaluate-fp16.vllm.log").read_text()
    assert not processes_with(str(store.root))


@pytest.mark.e2e
def test_a_second_call_measures_nothing_and_loads_nothing_heavy(evaluated: Evaluated, tmp_path: Path) -> None:
    variables = environment(evaluated.store, PYTHONPROFILEIMPORTTIME="1")
    # The same tasks elsewhere, and another port, are the same conditions.
    (tmp_path / "tasks").symlink_to(DEMO / "tasks")
    arguments = flags("fp16", **MEASURED, tasks_path=str(tmp_path / "tasks"))
    arguments[-1] = json.dumps(SERVING | {"port": 1234, "startup_timeout_s": 7})
    said = stage("evaluate", *arguments, variables=variables)
    assert said.returncode == 0
    assert "reused: fp16: " in said.stderr
    assert json.loads(said.stdout) == json.loads(evaluated.said.stdout)
    imported = {line.rpartition("|")[2].strip() for line in said.stderr.splitlines() if line.startswith("import time:")}
    assert "json" in imported
    assert not imported & {"torch", "vllm", "transformers", "lm_eval", "datasets", "numpy"}


@pytest.mark.slow
@pytest.mark.e2e
def test_a_trace_is_sent_line_by_line_at_its_rate(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store", MODEL)
    variant_of(store, "fp16", DEMO / "model")
    lines: list[dict[str, Any]] = [{"prompt_tokens": 20 + number, "output_tokens": 4 + number} for number in range(5)]
    lines += [{"prompt": "The function returns a list of", "output_tokens": 9}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    workload = {name: value for name, value in WORKLOAD.items() if name not in ("prompt_tokens", "output_tokens")}
    workload |= {"trace": str(tmp_path / "trace.jsonl"), "requests": 4, "request_rate_per_s": 8, "quality_limit": 2}
    arguments = ["--variants", "fp16", "--workload", json.dumps(workload), "--serving", json.dumps(SERVING)]
    said = stage("evaluate", *arguments, variables=environment(store))
    assert said.returncode == 0, said.stderr
    found = Evaluation.read(store.evaluation("fp16"))
    assert found
    path = store.evaluation("fp16").with_suffix(".samples.jsonl")
    requests = [line for line in map(json.loads, path.read_text().splitlines()) if "e2el_ms" in line]
    assert [each["output_tokens"] for each in requests] == [4, 5, 6, 7, 8, 9, 4, 5]
    assert all(abs(each["prompt_tokens"] - 20 - number) <= 2 for number, each in enumerate(requests[:4]))
    # Four arrivals at 8 a second take half a second, however fast the server is.
    assert all(each.duration_s >= 0.4 for each in found.rounds)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield float(value)
