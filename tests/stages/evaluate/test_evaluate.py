"""The stage as a program: what it refuses, and what its failures leave.

What it measures is shown by the whole pipeline's tests, and a trace here, by the real vLLM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.parts.base.program import RUN_VARIABLE, outcomes
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import Evaluation
from stages.parts.samples.lines import read_samples
from tests.extras import need
from tests.samples import samples_path
from tests.serving import (
    DEMO,
    MODEL,
    SERVING,
    Said,
    arguments_of,
    ended,
    environment,
    living,
    processes_with,
    stage,
    stand_in_variant,
    variant_of,
    wait_until,
)
from tests.stages.evaluate.program import EVALUATE
from tests.tool_models import llama_like

LM_EVAL = Path(__file__).with_name("standin")
GENERATOR = ["-m", "stages.evaluate.generator"]
WORKLOAD: dict[str, Any] = {
    "name": "small",
    "budget_minutes": 0.1,
    "prompt_tokens": 32,
    "output_tokens": 16,
    "concurrency": 2,
    "warmup_requests": 2,
    "steady_s": 1,
    "ramp_s": 0.25,
    "quality_tasks": ["demo_continuation", "demo_perplexity"],
    "quality_limit": 12,
    "tasks_path": str(DEMO / "tasks"),
}
STAND_IN: dict[str, Any] = {"quality_tasks": ["questions"], "tasks_path": None, "divergence_documents": 0}
"""What the stand-ins can be asked before any load."""
HANGING: dict[str, Any] = {"prompt_tokens": 2}
FAILING: dict[str, Any] = {"prompt_tokens": 3}
"""Loads that the stand-in never ends, and fails at."""


def evaluate(store: ModelStore, name: str, **workload: Any) -> Said:
    return ended([*EVALUATE, "--model", MODEL, *flags(name, **workload)], surroundings(store))


def flags(name: str, **workload: Any) -> list[str]:
    given = WORKLOAD | STAND_IN | workload
    return ["--variants", name, "--workload", json.dumps(given), "--serving", json.dumps(SERVING)]


def surroundings(store: ModelStore, **more: str) -> dict[str, str]:
    """The environment of the stage, with stand-ins for vLLM and lm-eval."""
    variables = environment(store, stand_in=True, STANDIN_JOURNAL=str(store.root / "journal"), **more)
    return variables | {"PYTHONPATH": os.pathsep.join([str(LM_EVAL), variables["PYTHONPATH"]])}


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store", MODEL)


@pytest.fixture
def _lm_eval() -> None:
    need("lm_eval")


def test_a_variant_that_was_never_made_is_named(store: ModelStore) -> None:
    said = evaluate(store, "fp16")
    assert said.returncode == 14
    assert "optimized/fp16 is damaged: variant.json is missing" in said.stderr


def test_without_fp16_there_is_nothing_to_compare_with(store: ModelStore) -> None:
    said = evaluate(store, "awq,gptq")
    assert said.returncode == 2
    assert "fp16 is not among the variants" in said.stderr


def test_a_damaged_variant_is_not_served(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    config = store.optimized("fp16") / "config.json"
    config.unlink()
    config.write_text("{}")
    said = evaluate(store, "fp16")
    assert said.returncode == 14
    assert "optimized/fp16 is damaged: config.json has 2 bytes" in said.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "../base", "--workload", "{}"], "'../base' is not a variant's name"),
        (["--variants", "fp16", "--workload", "{"], "--workload is not JSON"),
        (["--variants", "fp16", "--workload", '{"promt_tokens": 1}'], "did you mean 'prompt_tokens'?"),
        (
            ["--variants", "fp16", "--workload", json.dumps(WORKLOAD), "--serving", "[]"],
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
    variables = surroundings(store, **{RUN_VARIABLE: "run-1"})
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
def test_a_server_that_is_killed_under_load_is_worth_another_try(store: ModelStore) -> None:
    stand_in_variant(store, "fp16", engine="sleep 3; kill -KILL $$")
    said = evaluate(store, "fp16", **HANGING)
    assert said.returncode == 75
    assert "error: vLLM's EngineCore was ended by SIGKILL while it served StandInForCausalLM" in said.stderr
    assert not store.evaluation("fp16").exists()
    assert not processes_with(str(store.root))


@pytest.mark.usefixtures("_lm_eval")
@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (FAILING, "the load generator failed (1): RuntimeError: no tokenizer"),
        ({}, "5 of 6 requests failed: TimeoutError: slow"),
    ],
)
def test_a_failed_load_fails_the_measurement(store: ModelStore, workload: dict[str, Any], message: str) -> None:
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
    with Measuring(store, "fp16", **HANGING) as (process, family):
        process.send_signal(number)
        assert process.wait(60) == status
        wait_until(lambda: not living(family), "the end of every process")
    assert not list(store.evaluation("fp16").parent.glob("*"))


class Measuring:
    """The stage, under way: from the moment that the load is."""

    def __init__(self, store: ModelStore, name: str, **workload: Any) -> None:
        self.root = str(store.root)
        self.process = subprocess.Popen(
            [*EVALUATE, "--model", MODEL, *flags(name, **workload)],
            env=surroundings(store),
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
        # Not the guard, which names it too: the generator forks for each load.
        return [each for each in family if arguments_of(each)[1:] == GENERATOR and each.children()]

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
@pytest.mark.e2e
def test_a_trace_is_sent_line_by_line_at_its_rate_to_a_model_that_may_call_tools(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store", MODEL)
    variant_of(store, "fp16", llama_like(tmp_path / "model"))
    lines: list[dict[str, Any]] = [{"prompt_tokens": 20 + number, "output_tokens": 4 + number} for number in range(5)]
    lines += [{"prompt": "The function returns a list of", "output_tokens": 9}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    workload = {name: value for name, value in WORKLOAD.items() if name not in ("prompt_tokens", "output_tokens")}
    workload |= {"trace": str(tmp_path / "trace.jsonl"), "request_rate_per_s": 8, "quality_limit": 2, "trials": 3}
    arguments = ["--variants", "fp16", "--workload", json.dumps(workload), "--serving", json.dumps(SERVING)]
    said = stage("evaluate", *arguments, variables=environment(store))
    assert said.returncode == 0, said.stderr
    found = Evaluation.read(store.evaluation("fp16"))
    assert found
    assert found.engine.arguments[-3:] == ("--enable-auto-tool-choice", "--tool-call-parser", "llama3_json")
    rounds = read_samples(samples_path(store, "fp16"), found).rounds
    requests = [request for each in rounds for request in each.requests]
    # The first two are those of the ramp.
    assert [each.output_tokens for each in requests[:8]] == [6, 7, 8, 9, 4, 5, 6, 7]
    assert all(abs(each.prompt_tokens - 22 - number) <= 2 for number, each in enumerate(requests[:3]))
    assert {each.rate_per_s for each in found.rounds} == {8.0}
    # Ten arrivals at 8 a second take more than a second, however fast the server is.
    assert all(each.duration_s > 0.5 for each in found.rounds)
