"""Several variants by one call of the stage: gates, blocks and looks, what is kept, and when one of them fails. By
stand-ins for vLLM and lm-eval, which note what they are asked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from scoring.units import MIB
from stages.parts.base.errors import MeasurementFailed
from stages.parts.base.program import RUN_VARIABLE, outcomes
from stages.parts.base.serving_settings import Speculation
from stages.parts.base.store import ModelStore
from stages.parts.machine.lock import LOCK_VARIABLE, alone
from stages.parts.records.evaluation import Evaluation
from stages.parts.samples.lines import AccuracyItem, read_samples
from stages.parts.vllm.arguments import BINDING
from stages.parts.vllm.sizing import SERVER_BYTES
from tests.adapters import acquired
from tests.extras import need
from tests.samples import outcome, samples_path
from tests.serving import (
    MODEL,
    SERVING,
    Said,
    ended,
    environment,
    one_gpu,
    processes_with,
    stage,
    stand_in_variant,
    wait_until,
    waits_for,
)
from tests.stages.evaluate.program import EVALUATE

LM_EVAL = Path(__file__).with_name("standin")
RUN = "run-1"
WORKLOAD: dict[str, Any] = {
    "name": "small",
    "budget_minutes": 0.001,
    "prompt_tokens": 4,
    "output_tokens": 3,
    "concurrency": 2,
    "slo": None,
    "request_rate_per_s": 5,
    "steady_s": 1,
    "quality_tasks": ["questions"],
    "divergence_documents": 0,
}


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    need("vllm")
    return ModelStore(tmp_path / "store", MODEL)


def evaluate(
    store: ModelStore,
    names: str = "fp16,b",
    serving: dict[str, Any] | None = None,
    variables: dict[str, str] | None = None,
    profile: dict[str, Any] | None = None,
    **workload: Any,
) -> Said:
    """The stage, as part of a run."""
    given = ["--workload", json.dumps(WORKLOAD | workload), "--serving", json.dumps(SERVING | (serving or {}))]
    given += ["--profile", json.dumps({"name": "p"} | (profile or {}))]
    return ended([*EVALUATE, "--model", MODEL, "--variants", names, *given], surroundings(store, variables))


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


def done(store: ModelStore, *kinds: str) -> list[str]:
    """What the stand-ins were asked, such as ``load b 0``: the variant, and the prompts' seed or the items' numbers.

    A server may start beside another or while quality is asked, so their order among each other is not certain.
    """
    lines = [" ".join(line.split()[:3]) for line in journal(store).read_text().splitlines()]
    return [line for line in lines if not kinds or line.split()[0] in kinds]


def results(store: ModelStore) -> dict[str, str]:
    return {each.variant: each.result for each in outcomes(store.run(RUN)) if each.stage == "evaluate"}


def evaluation(store: ModelStore, name: str) -> Evaluation:
    found = Evaluation.read(store.evaluation(name))
    assert found
    return found


def test_two_workloads_do_not_undo_each_others_work(store: ModelStore) -> None:
    for name in ("fp16", "b"):
        stand_in_variant(store, name)
    assert evaluate(store, output_tokens=8).returncode == 0
    first = evaluation(store, "b")
    assert evaluate(store, output_tokens=12).returncode == 0
    moments = done(store)
    assert evaluation(store, "b").key != first.key
    said = evaluate(store, output_tokens=8)
    assert said.returncode == 0, said.stderr
    assert results(store) == {"fp16": "reused", "b": "reused"}
    assert evaluation(store, "b") == first
    assert read_samples(samples_path(store, "b"), first)
    assert done(store) == moments


def test_each_block_starts_every_server_once_in_an_order_that_rotates_with_the_same_prompts(store: ModelStore) -> None:
    for name in ("fp16", "b", "c"):
        stand_in_variant(store, name)
    said = evaluate(store, "b,c,fp16")
    assert said.returncode == 0, said.stderr
    moments = done(store, "start", "load")
    assert sorted(moments[:3]) == sorted(moments[6:9]) == ["start b", "start c", "start fp16"]
    assert moments[3:6] == ["load fp16 0", "load b 0", "load c 0"]
    assert moments[9:] == ["load b 1", "load c 1", "load fp16 1"]
    assert done(store, "quality") == [
        f"quality {name} {items}" for name in ("fp16", "b", "c") for items in ("0-99", "100-999")
    ]
    assert set(json.loads(said.stdout)) == {"fp16", "b", "c"}
    assert results(store) == {"fp16": "done", "b": "done", "c": "done"}
    looks = [line for line in said.stderr.splitlines() if line.startswith("after block ")]
    assert looks[0].endswith("one start of each server does not show how much chance there is in it")
    assert looks[1].endswith("equivalent within the margins; b takes the least")
    found = evaluation(store, "b")
    assert [each.requests for each in found.rounds] == [20] * 2
    assert (found.looks[0], found.agreement) == (0.0, 1.0)
    samples = read_samples(samples_path(store, "b"), found)
    assert [(each.run.restart, each.run.number) for each in samples.rounds] == [(0, 0), (1, 1)]
    assert {each.restart for each in samples.items if isinstance(each, AccuracyItem)} == {0}
    assert found.schedule
    assert (found.schedule.ended, found.schedule.variants) == ("settled", ("b", "c", "fp16"))
    assert found.schedule == evaluation(store, "fp16").schedule
    assert not processes_with(str(store.root))


def test_a_variant_that_fails_a_gate_is_never_loaded_and_its_record_says_why(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    stand_in_variant(store, "wrong")
    said = evaluate(store, "fp16,wrong")
    assert said.returncode == 0, said.stderr
    assert [line for line in done(store) if " wrong" in line] == ["start wrong", "quality wrong 0-99"]
    assert results(store) == {"fp16": "done", "wrong": "left out"}
    reason = next(each.reason for each in outcomes(store.run(RUN)) if each.variant == "wrong")
    assert reason.startswith("failed before its load: loses 99.3% of questions (at least ")
    assert not store.evaluation("wrong").exists()
    journal(store).unlink()
    again = evaluate(store, "fp16,wrong")
    assert again.returncode == 0, again.stderr
    assert done(store) == []
    assert results(store) == {"fp16": "reused", "wrong": "left out"}


def test_a_variant_that_can_serve_little_of_the_load_or_nothing_in_time_is_not_measured_at_it(
    store: ModelStore,
) -> None:
    for name, limit in {"fp16": 40.0, "slow": 2.0, "never": 1e-6}.items():
        stand_in_variant(store, name, limit=limit)
    targets: dict[str, Any] = {
        "request_rate_per_s": None,
        "slo": {"ttft_ms": 100, "tpot_ms": 100},
        "trial_s": 0.5,
        "ramp_s": 0.1,
    }
    said = evaluate(store, "fp16,slow,never", **targets)
    assert said.returncode == 0, said.stderr
    assert results(store) == {"fp16": "done", "slow": "left out", "never": "left out"}
    reasons = {each.variant: each.reason for each in outcomes(store.run(RUN)) if each.stage == "evaluate"}
    assert "it serves only 2 of 28 requests/s within the targets" in reasons["slow"]
    assert "100 ms to the first token and 100 ms per token don't hold" in reasons["never"]
    loads = Counter(line.split()[1] for line in done(store, "load"))
    assert loads["never"] < loads["slow"]  # where requests are alone on the server, lower rates are not tried
    assert evaluate(store, "fp16,slow,never", **targets).returncode == 0
    assert done(store, "start").count("start slow") == 2  # the machine may have been busy


def test_a_variant_whose_gate_is_unclear_is_loaded_and_asked_more_as_the_reference_is(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    stand_in_variant(store, "unsure")
    said = evaluate(store, "fp16,unsure", quality_limit=200)
    assert said.returncode == 0, said.stderr
    for name in ("fp16", "unsure"):
        asked = [line for line in done(store, "quality") if f" {name} " in line]
        assert asked == [f"quality {name} {part}" for part in ("0-99", "100-199", "200-399")]
        assert [each.items for each in evaluation(store, name).quality] == [400]
        assert len([line for line in done(store, "load") if f" {name} " in line]) == 2
    assert results(store) == {"fp16": "done", "unsure": "done"}


def test_two_stores_on_one_machine_take_turns(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_variant(store, "fp16")
    lock = store.root / "machine.lock"
    monkeypatch.setenv(LOCK_VARIABLE, str(lock))
    with ThreadPoolExecutor() as pool:
        with alone("evaluate fp16 of org/other"):
            said = pool.submit(evaluate, store, "fp16")
            wait_until(lambda: waits_for(lock), "the stage waits for its turn")
            assert done(store) == []
        assert said.result().returncode == 0, said.result().stderr
    assert "waiting for evaluate fp16 of org/other" in said.result().stderr
    assert done(store) == ["start fp16", "quality fp16 0-99", "quality fp16 100-999", "load fp16 0"]


@pytest.mark.slow
def test_a_variant_that_comes_later_is_compared_in_a_further_block_and_no_item_is_asked_twice(
    store: ModelStore,
) -> None:
    for name in ("fp16", "b", "c"):
        stand_in_variant(store, name)
    assert evaluate(store, "fp16,b").returncode == 0
    journal(store).unlink()
    said = evaluate(store, "fp16,b,c")
    assert said.returncode == 0, said.stderr
    assert done(store, "quality") == ["quality c 0-99", "quality c 100-999"]
    assert set(done(store, "load")) == {f"load {name} 2" for name in ("fp16", "b", "c")}
    assert [len(evaluation(store, name).rounds) for name in ("fp16", "b", "c")] == [3, 3, 1]
    assert results(store) == dict.fromkeys(("fp16", "b", "c"), "done")


@pytest.mark.slow
def test_what_the_budget_ended_is_used_again_until_a_larger_one_goes_on(store: ModelStore) -> None:
    stand_in_variant(store, "fp16", noise=0.1)
    stand_in_variant(store, "b", noise=0.1)
    assert evaluate(store, budget_minutes=0.01).returncode == 0
    first = evaluation(store, "b")
    assert first.schedule
    assert (first.schedule.ended, len(first.looks), first.looks[-1]) == ("budget", 2, 1.0)
    journal(store).unlink()
    same = evaluate(store, budget_minutes=0.01)
    assert same.returncode == 0, same.stderr
    assert done(store) == []
    assert results(store) == {"fp16": "reused", "b": "reused"}
    more = evaluate(store, budget_minutes=(first.schedule.spent_s + 12) / 60)
    assert more.returncode == 0, more.stderr
    assert done(store, "quality") == []
    assert done(store, "load")[:2] == ["load fp16 2", "load b 2"]
    found = evaluation(store, "b")
    assert len(found.rounds) >= 3
    assert found.rounds[:2] == first.rounds
    assert found.schedule
    assert found.schedule.spent_s > first.schedule.spent_s
    assert results(store) == {"fp16": "done", "b": "done"}


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
def test_a_load_that_fails_in_its_second_block_ends_only_that_variant(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    stand_in_variant(store, "b", fails_at_seed=1)
    said = evaluate(store, "fp16,b")
    assert said.returncode == 0, said.stderr
    assert [line for line in done(store, "start", "load") if " b" in line] == [
        "start b",
        "load b 0",
        "start b",
        "load b 1",
    ]
    assert len(evaluation(store, "fp16").rounds) == 2
    reason = next(each.reason for each in outcomes(store.run(RUN)) if each.variant == "b")
    assert reason == "the load generator failed (1): RuntimeError: lost the server"
    assert results(store) == {"fp16": "done", "b": "failed"}


def test_a_variant_whose_server_is_killed_twice_is_not_left_out_but_for_another_attempt(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    stand_in_variant(store, "b", engine="kill -KILL $$")
    said = evaluate(store, "fp16,b")
    assert said.returncode == 75
    assert "block 1: b is tried once more: vLLM's EngineCore was ended by SIGKILL" in said.stderr
    assert "left out" not in said.stderr
    assert store.evaluation("fp16").exists()
    assert results(store) == {"fp16": "done", "b": "failed"}


def test_a_server_that_is_killed_once_costs_its_block_one_more_start(store: ModelStore) -> None:
    for name in ("fp16", "b"):
        stand_in_variant(store, name, killed_at_seed=1)
    said = evaluate(store, "fp16,b")
    assert said.returncode == 0, said.stderr
    expected = ["start {0}", "load {0} 0", "start {0}", "load {0} 1", "start {0}", "load {0} 1"]
    for name in ("fp16", "b"):
        found = [line for line in done(store, "start", "load") if line.split()[1] == name]
        assert found == [each.format(name) for each in expected]
        assert len(evaluation(store, name).rounds) == 2


def ended_when(store: ModelStore, line: str, *, by: signal.Signals, ready: Callable[[], bool] = lambda: True) -> int:
    """Evaluate two variants, end the stage once it has said *line*, and return its exit status."""
    command = [*EVALUATE, "--model", MODEL, "--variants", "fp16,b"]
    given = ["--workload", json.dumps(WORKLOAD), "--serving", json.dumps(SERVING)]
    with subprocess.Popen([*command, *given], env=surroundings(store), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert any(each.startswith(line) for each in process.stderr)
        wait_until(ready, "what else has to be")
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(by)
        process.communicate(timeout=60)
    wait_until(lambda: not any(each.is_running() for each in family), "the end of every process")
    return process.returncode


def test_interrupted_while_another_server_is_waited_for_it_ends_and_leaves_no_process(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    stand_in_variant(store, "b", never_ready=True)
    log = store.run(RUN) / "logs" / "evaluate-b.vllm.log"

    def loading() -> bool:
        return log.exists() and "still loading" in log.read_text()

    assert ended_when(store, "serving fp16", by=signal.SIGINT, ready=loading) == 130


def test_killed_when_it_has_said_what_a_block_shows_it_goes_on_from_there(store: ModelStore) -> None:
    for name in ("fp16", "b"):
        stand_in_variant(store, name)
    assert ended_when(store, "after block 1", by=signal.SIGKILL) == -signal.SIGKILL
    journal(store).unlink()
    said = evaluate(store)
    assert said.returncode == 0, said.stderr
    assert done(store, "quality") == []
    assert sorted(done(store, "load")) == ["load b 1", "load fp16 1"]
    assert [len(evaluation(store, name).rounds) for name in ("fp16", "b")] == [2, 2]


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
    assert "a quality task failed: ModuleNotFoundError: No module named 'lm_eval.models'" in said.stderr


def test_what_production_alone_has_is_not_measured_and_no_reason_to_measure_again(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    own = {BINDING: "nobind"}
    said = evaluate(store, "fp16", serving={"max_queued_tokens": 2000}, variables=own)
    assert said.returncode == 0, said.stderr
    assert "--max-num-queued-tokens" not in evaluation(store, "fp16").engine.arguments
    changed = {"max_queued_tokens": None, "replicas": 2, "affinity": "none", "request_timeout_s": 9}
    assert evaluate(store, "fp16", serving=changed, variables=own).returncode == 0
    assert results(store) == {"fp16": "reused"}


def test_when_the_reference_fails_nothing_is_compared_with_it(store: ModelStore) -> None:
    stand_in_variant(store, "fp16", refuses="out of kernels")
    stand_in_variant(store, "b")
    said = evaluate(store, "fp16,b")
    assert said.returncode == 30
    assert "out of kernels" in said.stderr
    assert set(done(store)) <= {"start fp16", "start b"}
    assert results(store) == {"fp16": "failed", "b": "failed"}
    reason = next(each.reason for each in outcomes(store.run(RUN)) if each.variant == "b")
    assert reason == "not measured, because the variant to compare with could not be"


def test_a_damaged_variant_is_left_out(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    stand_in_variant(store, "b")
    (store.optimized("b") / "config.json").unlink()
    said = evaluate(store, "fp16,b")
    assert said.returncode == 0, said.stderr
    reason = next(each.reason for each in outcomes(store.run(RUN)) if each.variant == "b")
    assert reason == f"{store.optimized('b')} is damaged: config.json is missing"


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
def test_without_room_the_next_server_starts_after_the_one_before_has_ended(store: ModelStore) -> None:
    for name in ("fp16", "b"):
        stand_in_variant(store, name)
    said = evaluate(store, "fp16,b", serving={"kv_cache_mib": 10**8})
    assert said.returncode == 0, said.stderr
    assert done(store)[:5] == ["start fp16", "quality fp16 0-99", "quality fp16 100-999", "load fp16 0", "start b"]


def test_of_three_servers_two_stand_side_by_side_where_two_fit(store: ModelStore) -> None:
    for name in ("fp16", "b", "c"):
        stand_in_variant(store, name)
    two_fifths_mib = psutil.virtual_memory().available * 2 // 5 // MIB
    said = evaluate(store, "fp16,b,c", serving={"kv_cache_mib": two_fifths_mib - SERVER_BYTES // MIB})
    assert said.returncode == 0, said.stderr
    first = done(store)
    assert first.index("start b") < first.index("load fp16 0") < first.index("start c")


def test_on_several_gpus_servers_run_side_by_side_each_on_its_own(store: ModelStore, tmp_path: Path) -> None:
    for name in ("fp16", "b", "c"):
        stand_in_variant(store, name)
    gpus = one_gpu(tmp_path / "gpu", 2) | {"CUDA_VISIBLE_DEVICES": "0,1"}
    gpus["PYTHONPATH"] = os.pathsep.join([str(LM_EVAL), gpus["PYTHONPATH"]])
    said = evaluate(store, "fp16,b,c", variables=gpus)
    assert said.returncode == 0, said.stderr
    starts = [line.split()[1:] for line in journal(store).read_text().splitlines() if line.startswith("start")]
    assert sorted(starts[:2]) == [["b", "1"], ["fp16", "0"]]
    assert starts[2] == ["c", "0"]
    assert sorted(starts[3:5]) == [["b", "0"], ["c", "1"]]
    assert evaluation(store, "b").hardware.gpus == ("Stand-in, 1024 MiB",)
    drift = evaluation(store, "b").drift
    assert drift
    assert len(drift.probes()) == 4


@pytest.mark.slow
def test_a_trace_is_asked_for_round_by_round_and_another_one_is_another_evaluation(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    (store.root / "trace.jsonl").write_text('{"prompt_tokens": 4}\n')
    workload: dict[str, Any] = {"trace": str(store.root / "trace.jsonl"), "prompt_tokens": None, "output_tokens": None}
    said = evaluate(store, "fp16", **workload)
    assert said.returncode == 2
    assert "line 1: not of the form" in said.stderr
    assert "start fp16" not in done(store)


def test_each_adapter_is_asked_the_quality_tasks_as_tasks_of_its_own(store: ModelStore) -> None:
    for name in ("fp16", "b"):
        stand_in_variant(store, name)
    digest = acquired(store, "sql-1").digest
    said = evaluate(store, serving={"adapters": {"sql-1": "org/sql-1"}})
    assert said.returncode == 0, said.stderr
    with_adapter = evaluation(store, "b")
    assert with_adapter.adapters == {"sql-1": digest}
    assert [(score.task, score.items) for score in with_adapter.quality] == [
        ("questions", 1000),
        ("questions@sql-1", 1000),
    ]
    items = read_samples(samples_path(store, "b"), with_adapter).items
    assert {item.task for item in items} == {"questions", "questions@sql-1"}
    assert done(store, "quality").count("quality sql 0-99") == 2
    module = f'{{"name": "sql-1", "path": "{store.adapter("sql-1")}"}}'
    served = f"--enable-lora --max-loras 1 --max-lora-rank 8 --lora-target-modules q_proj --lora-modules {module} "
    assert served in " ".join(with_adapter.engine.arguments)
    # Of another adapter of that name, nothing that was measured holds.
    acquired(store, "sql-1", lora_alpha=99)
    assert evaluate(store, serving={"adapters": {"sql-1": "org/sql-1"}}).returncode == 0
    assert evaluation(store, "b").key != with_adapter.key


def test_a_recipe_makes_a_candidate_of_its_own_whose_answers_are_asked_once(store: ModelStore) -> None:
    for name in ("fp16", "b"):
        stand_in_variant(store, name)
    recipes = {"ngram": {"speculation": {"method": "ngram"}}, "kv-fp8": {"kv_cache_dtype": "fp8"}}
    said = evaluate(store, "fp16,b,b+ngram,b+kv-fp8", {"recipes": recipes})
    assert said.returncode == 0, said.stderr
    plain, guessing, eight_bit = (evaluation(store, f"b{recipe}") for recipe in ("", "+ngram", "+kv-fp8"))
    assert len({each.variant_digest for each in (plain, guessing, eight_bit)}) == 1
    assert len({each.key for each in (plain, guessing, eight_bit)}) == 3
    assert (plain.recipe, guessing.recipe and guessing.recipe.changes) == (
        None,
        {"speculation": Speculation(method="ngram")},
    )
    # Speculation changes no answer; keys and values in 8 bit may.
    assert guessing.quality == plain.quality
    asked = {line.split()[1] for line in done(store, "quality")}
    assert asked == {"fp16", "b", "b+kv-fp8"}
    assert {line.split()[1] for line in done(store, "load")} == {"fp16", "b", "b+ngram", "b+kv-fp8"}
    arguments = guessing.engine.arguments
    guesses = json.loads(arguments[arguments.index("--speculative-config") + 1])
    assert guesses == {"method": "ngram", "num_speculative_tokens": 4}
    assert "--speculative-config" not in plain.engine.arguments
    assert evaluate(store, "fp16,b,b+ngram,b+kv-fp8", {"recipes": recipes}).returncode == 0
    assert set(results(store).values()) == {"reused"}


def test_a_candidate_of_an_unknown_recipe_is_refused(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    said = evaluate(store, "fp16,b+ngram")
    assert said.returncode == 2
    assert "b+ngram: there is no such recipe" in said.stderr


def test_an_adapter_that_was_not_acquired_is_named(store: ModelStore) -> None:
    stand_in_variant(store, "fp16")
    said = evaluate(store, "fp16", serving={"adapters": {"sql": "org/sql"}})
    assert said.returncode == 14
    assert "adapters/sql is damaged: acquired.json is missing" in said.stderr
