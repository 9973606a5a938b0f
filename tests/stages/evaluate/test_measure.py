"""Several variants by one call of the stage: in turns, over restarts, and when one of them fails. By stand-ins for vLLM
and lm-eval, which note what they are asked."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.parts.base.errors import MeasurementFailed
from stages.parts.base.program import RUN_VARIABLE, outcomes
from stages.parts.base.store import ModelStore
from stages.parts.machine.lock import LOCK_VARIABLE, alone
from stages.parts.records.evaluation import Evaluation
from stages.parts.samples.lines import read_samples
from tests.samples import outcome, samples_path
from tests.serving import (
    MODEL,
    SERVING,
    Said,
    environment,
    processes_with,
    stage,
    stand_in_variant,
    wait_until,
    waits_for,
)

LM_EVAL = Path(__file__).with_name("standin")
RUN = "run-1"
WORKLOAD: dict[str, Any] = {
    "name": "small",
    "protocol": "quick",
    "interleave": True,
    "prompt_tokens": 4,
    "output_tokens": 3,
    "concurrency": 2,
    "requests": 2,
    "rounds": 1,
    "quality_tasks": ["questions"],
    "divergence_documents": 0,
}


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    if not importlib.util.find_spec("vllm"):
        pytest.skip("the evaluate extra is not installed")
    return ModelStore(tmp_path / "store", MODEL)


def evaluate(
    store: ModelStore,
    names: str = "a,b,c",
    serving: dict[str, Any] | None = None,
    variables: dict[str, str] | None = None,
    **workload: Any,
) -> Said:
    """The stage, as part of a run."""
    given = ["--workload", json.dumps(WORKLOAD | workload), "--serving", json.dumps(SERVING | (serving or {}))]
    return stage("evaluate", "--variants", names, *given, variables=surroundings(store, variables))


def surroundings(store: ModelStore, more: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of the stage, with stand-ins for vLLM and lm-eval."""
    own = {RUN_VARIABLE: RUN, "CUDA_VISIBLE_DEVICES": ""} | (more or {})
    variables = environment(store, stand_in=True, **own)
    variables["STANDIN_JOURNAL"] = str(journal(store))
    variables["PYTHONPATH"] = os.pathsep.join([str(LM_EVAL), variables["PYTHONPATH"]])
    journal(store).touch()
    return variables


def journal(store: ModelStore) -> Path:
    return store.root / "journal"


def done(store: ModelStore) -> list[str]:
    """What the stand-ins were asked, such as ``load a 0``: the variant and the prompts' seed."""
    return [" ".join(line.split()[:3]) for line in journal(store).read_text().splitlines()]


def evaluation(store: ModelStore, name: str) -> Evaluation:
    found = Evaluation.read(store.evaluation(name))
    assert found
    return found


def test_servers_side_by_side_take_turns_and_each_round_has_the_same_prompts_for_all(store: ModelStore) -> None:
    for name in "abc":
        stand_in_variant(store, name)
    said = evaluate(store, rounds=2)
    assert said.returncode == 0, said.stderr
    assert done(store) == [
        *("start a", "start b", "start c"),
        *("load a 0", "load b 0", "load c 0"),
        *("load c 1", "load b 1", "load a 1"),
        *("quality a", "quality b", "quality c"),
    ]
    assert set(json.loads(said.stdout)) == {"a", "b", "c"}
    assert {each.variant: each.result for each in outcomes(store.run(RUN))} == {"a": "done", "b": "done", "c": "done"}
    found = evaluation(store, "b")
    assert found.interleaved_with == ("a", "c")
    assert [each.requests for each in found.rounds] == [2, 2]
    assert found.memory.peak_gpu_bytes is None
    assert not processes_with(str(store.root))


def test_two_stores_on_one_machine_take_turns(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_variant(store, "a")
    lock = store.root / "machine.lock"
    monkeypatch.setenv(LOCK_VARIABLE, str(lock))
    with ThreadPoolExecutor() as pool:
        with alone("evaluate fp16 of org/other"):
            said = pool.submit(evaluate, store, "a")
            wait_until(lambda: waits_for(lock), "the stage waits for its turn")
            assert done(store) == []
        assert said.result().returncode == 0, said.result().stderr
    assert "waiting for evaluate fp16 of org/other" in said.result().stderr
    assert done(store) == ["start a", "load a 0", "quality a"]


@pytest.mark.slow
def test_a_second_call_measures_only_missing_variants(store: ModelStore) -> None:
    for name in "abc":
        stand_in_variant(store, name)
    assert evaluate(store).returncode == 0
    kept = store.evaluation("a").read_bytes()
    store.evaluation("b").unlink()
    journal(store).unlink()
    said = evaluate(store)
    assert said.returncode == 0, said.stderr
    assert done(store) == ["start b", "load b 0", "quality b"]
    assert store.evaluation("a").read_bytes() == kept
    results = {each.variant: each.result for each in outcomes(store.run(RUN))}
    assert results == {"a": "reused", "b": "done", "c": "reused"}


@pytest.mark.slow
def test_every_restart_repeats_all_measurements_and_quality_is_their_mean(store: ModelStore) -> None:
    for name in "ab":
        stand_in_variant(store, name)
    said = evaluate(store, "a,b", rounds=2, restarts=2, sweep=[3], slo={"ttft_ms": 100, "tpot_ms": 10})
    assert said.returncode == 0, said.stderr
    assert done(store) == [
        *("start a", "start b", "load a 0", "load b 0", "load b 1", "load a 1"),
        *("load a 4", "load b 4", "quality a", "quality b"),
        *("start a", "start b", "load a 2", "load b 2", "load b 3", "load a 3", "quality a", "quality b"),
    ]
    found = evaluation(store, "a")
    assert len(found.rounds) == 4
    assert [(each.concurrency, each.requests) for each in found.sweep] == [(3, 24)]
    assert found.quality[0].value == pytest.approx((0.75 + 0.5) / 2)
    assert found.goodput
    assert found.goodput.share == 1
    samples = read_samples(samples_path(store, "a"), found)
    assert [(each.run.restart, each.run.number) for each in samples.rounds] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert [each.run.number for each in samples.sweep] == [3]
    assert [(each.restart, each.correct) for each in samples.accuracy if each.doc_id == 2] == [(0, 1.0), (1, 0.0)]


@pytest.mark.slow
def test_a_server_that_does_not_start_is_left_out_and_the_others_go_on(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    stand_in_variant(store, "b", refuses="out of kernels")
    stand_in_variant(store, "c")
    said = evaluate(store, "fp16,b,c")
    assert said.returncode == 0, said.stderr
    assert "b is left out: vLLM started but" in said.stderr
    assert set(json.loads(said.stdout)) == {"fp16", "c"}
    found = {each.variant: each for each in outcomes(store.run(RUN))}
    assert {name: each.result for name, each in found.items()} == {"fp16": "done", "b": "failed", "c": "done"}
    assert "out of kernels" in found["b"].reason
    assert not store.evaluation("b").exists()


@pytest.mark.slow
def test_a_load_that_fails_in_its_second_round_ends_only_that_variant(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    stand_in_variant(store, "b", fails_at_seed=1)
    said = evaluate(store, "fp16,b", rounds=2, restarts=2)
    assert said.returncode == 0, said.stderr
    assert [line for line in done(store) if line.split()[1] == "b"] == ["start b", "load b 0", "load b 1"]
    assert len(evaluation(store, "fp16").rounds) == 4
    reason = next(each.reason for each in outcomes(store.run(RUN)) if each.variant == "b")
    assert reason == "the load generator failed (1): RuntimeError: lost the server"
    assert not store.evaluation("b").exists()


def test_a_variant_whose_server_is_killed_is_not_left_out_but_tried_again(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    stand_in_variant(store, "b", engine="kill -KILL $$")
    said = evaluate(store, "fp16,b")
    assert said.returncode == 75
    assert "ended by SIGKILL" in said.stderr
    assert "left out" not in said.stderr
    assert store.evaluation("fp16").exists()
    results = {each.variant: each.result for each in outcomes(store.run(RUN))}
    assert results == {"fp16": "done", "b": "failed"}


def test_interrupted_while_only_the_next_server_is_waited_for_it_ends_and_leaves_no_process(store: ModelStore) -> None:
    stand_in_variant(store, "a")
    stand_in_variant(store, "b", never_ready=True)
    command = [sys.executable, "-m", "stages.evaluate", "--model", MODEL, "--variants", "a,b"]
    given = ["--workload", json.dumps(WORKLOAD | {"interleave": False}), "--serving", json.dumps(SERVING)]
    next_log = store.run(RUN) / "logs" / "evaluate-b.vllm.log"
    with subprocess.Popen([*command, *given], env=surroundings(store), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            if line.startswith("quality of a"):
                break
        wait_until(lambda: next_log.exists() and "still loading" in next_log.read_text(), "the next server")
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    wait_until(lambda: not any(each.is_running() for each in family), "the end of every process")


def test_a_client_that_cannot_be_imported_fails_the_measurement_with_its_own_words(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    incomplete = store.root / "incomplete"
    shutil.copytree(LM_EVAL, incomplete)
    shutil.rmtree(incomplete / "lm_eval" / "models")
    variables = surroundings(store)
    variables["PYTHONPATH"] = os.pathsep.join([str(incomplete), variables["PYTHONPATH"]])
    given = ["--workload", json.dumps(WORKLOAD), "--serving", json.dumps(SERVING)]
    said = stage("evaluate", "--variants", "fp16", *given, variables=variables)
    assert said.returncode == MeasurementFailed.exit_code, said.stderr
    assert "lm-eval failed: ModuleNotFoundError: No module named 'lm_eval.models'" in said.stderr


def test_when_the_reference_fails_the_stage_does_once_the_others_are_measured(store: ModelStore) -> None:
    stand_in_variant(store, "fp16", refuses="out of kernels")
    stand_in_variant(store, "b")
    said = evaluate(store, "fp16,b")
    assert said.returncode == 30
    assert "out of kernels" in said.stderr
    assert store.evaluation("b").exists()
    results = {each.variant: each.result for each in outcomes(store.run(RUN))}
    assert results == {"fp16": "failed", "b": "done"}


def test_a_damaged_variant_is_left_out(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    stand_in_variant(store, "b")
    (store.optimized("b") / "config.json").unlink()
    said = evaluate(store, "fp16,b")
    assert said.returncode == 0, said.stderr
    reason = next(each.reason for each in outcomes(store.run(RUN)) if each.variant == "b")
    assert reason == "the b variant is damaged: config.json is missing"


def test_a_variant_that_this_run_failed_to_make_is_not_measured_in_an_older_state(store: ModelStore) -> None:
    for name in ("fp16", "b", "c"):
        stand_in_variant(store, name)
    outcome(store, RUN, "optimize", "fp16", "done")
    outcome(store, RUN, "optimize", "b", "failed")
    said = evaluate(store, "fp16,b,c")
    assert said.returncode == 0, said.stderr
    assert "not made by this run, so not measured: b, c" in said.stderr
    assert {each.variant for each in outcomes(store.run(RUN)) if each.stage == "evaluate"} == {"fp16"}


@pytest.mark.slow
def test_without_room_side_by_side_the_variants_are_measured_one_after_the_other(store: ModelStore) -> None:
    for name in "ab":
        stand_in_variant(store, name)
    said = evaluate(store, "a,b", serving={"kv_cache_mib": 10**8}, restarts=2)
    assert said.returncode == 0, said.stderr
    assert "cannot run side by side (they need about" in said.stderr
    # Side by side or not, what comes first changes from start to start.
    assert [line for line in done(store) if line.startswith(("start", "quality"))] == [
        *("start a", "quality a", "start b", "quality b", "start b", "quality b", "start a", "quality a")
    ]
    assert evaluation(store, "a").interleaved_with == ()


def test_after_a_drift_the_load_is_measured_again_on_new_servers_and_a_message_says_so(store: ModelStore) -> None:
    for name in "ab":
        stand_in_variant(store, name)
    said = evaluate(store, "a,b", drift_limit=1e-9)  # no two probes agree as closely
    assert said.returncode == 0, said.stderr
    load = ["start a", "start b", "load a 0", "load b 0"]
    assert done(store) == [*load, *load, "quality a", "quality b"]
    assert said.stderr.count("note: the machine's speed changed by") == 2
    assert "measuring the load once more" in said.stderr
    found = evaluation(store, "a")
    assert len(found.rounds) == 1
    assert found.drift
    assert found.drift.measured_again == 1
    assert found.drift.largest_change > 0
    (one,) = read_samples(samples_path(store, "a"), found).rounds
    assert len(one.requests) == 2


def test_where_a_gpu_serves_the_processors_drift_is_recorded_and_nothing_more(store: ModelStore) -> None:
    stand_in_variant(store, "a")
    driver = store.root / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB'\n")
    driver.chmod(0o755)
    path = os.pathsep.join([str(driver.parent), os.environ["PATH"]])
    said = evaluate(store, "a", variables={"PATH": path, "CUDA_VISIBLE_DEVICES": "0"}, drift_limit=1e-9)
    assert said.returncode == 0, said.stderr
    assert done(store) == ["start a", "load a 0", "quality a"]
    found = evaluation(store, "a")
    assert found.hardware.gpus == ("NVIDIA H100, 81559 MiB",)
    assert found.drift
    assert found.drift.largest_change > 0
    assert found.drift.measured_again == 0


@pytest.mark.slow
def test_a_trace_is_asked_for_round_by_round_and_another_one_is_another_evaluation(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    (store.root / "trace.jsonl").write_text('{"prompt_tokens": 4}\n')
    workload: dict[str, Any] = {"trace": str(store.root / "trace.jsonl"), "prompt_tokens": None, "output_tokens": None}
    said = evaluate(store, "fp16", **workload)
    assert said.returncode == 2
    assert "line 1: not of the form" in said.stderr
    assert "start fp16" not in done(store)
