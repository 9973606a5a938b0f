"""Predictions of stored evaluations: beside what was measured in the report, and as the calibration of plans."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from stages.parts.base.store import ModelStore
from stages.parts.machine.accelerators import catalogue
from stages.parts.records.evaluation import ColdStart, Evaluation, cold_starts
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.vllm.prediction import Prediction, calibrations, predict, sized
from stages.report.page import collect, contents, render
from tests.samples import measured_store
from tests.serving import DEMO

MIB = 1 << 20
CPU = ("--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 * MIB))
GPU = ("--dtype", "float16", "--max-model-len", "1024", "--gpu-memory-utilization", "0.9")
H200 = "NVIDIA H200, 143771 MiB"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """A store with the demo's model, measured by run-1."""
    monkeypatch.setenv("SLIPWAY_RUN", "run-1")
    made = measured_store(tmp_path)
    (made.base / "model.safetensors").unlink()
    shutil.copytree(DEMO / "model", made.base, dirs_exist_ok=True)
    return made


def measured(store: ModelStore, arguments: Sequence[str], gpus: Sequence[str] = ()) -> tuple[Evaluation, Variant]:
    """The evaluation of fp16 as if it had been measured by a server with these arguments, on these GPUs."""
    path = store.evaluation("fp16")
    evaluation, variant = Evaluation.read(path), Variant.read(store.optimized("fp16") / VARIANT)
    assert evaluation is not None
    assert variant is not None
    changed = evaluation.model_copy(
        update={
            "engine": evaluation.engine.model_copy(update={"arguments": tuple(arguments)}),
            "hardware": evaluation.hardware.model_copy(update={"gpus": tuple(gpus)}),
        }
    )
    changed.write(path)
    return changed, variant


def predicted(store: ModelStore, arguments: Sequence[str], gpus: Sequence[str] = ()) -> tuple[Evaluation, Prediction]:
    evaluation, variant = measured(store, arguments, gpus)
    base = sized(store)
    assert base is not None
    found = predict(base, evaluation, variant, catalogue(), store.optimized(variant.variant))
    assert found is not None
    return evaluation, found


def test_on_a_cpu_the_weights_and_the_kv_cache_are_predicted(store: ModelStore) -> None:
    _, found = predicted(store, CPU)
    # The embedding is the output head; four layers of two KV heads of 64 values.
    assert found.weights_bytes == sum(path.stat().st_size for path in store.base.glob("*.safetensors")) - headers(store)
    assert found.kv_cache_tokens == 64 * MIB // (4 * 2 * 2 * 64 * 2)
    assert found.speed is None


def headers(store: ModelStore) -> int:
    files = store.base.glob("*.safetensors")
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files)


def test_on_a_known_gpu_the_times_are_predicted_and_calibrate_plans(store: ModelStore) -> None:
    evaluation, found = predicted(store, GPU, [H200])
    assert found.accelerator == "h200"
    assert found.kv_cache_tokens is not None
    assert found.kv_cache_tokens > 10**7
    assert found.speed.sequences == evaluation.load.concurrency
    (name, calibration), *others = calibrations(store.root, catalogue()).items()
    assert (name, others, calibration.evaluations) == ("h200", [], 1)
    assert calibration.tpot == pytest.approx(evaluation.load.tpot_ms.mean / found.speed.tpot_ms)
    assert calibration.ttft == pytest.approx(evaluation.load.ttft_ms.mean / found.speed.ttft_ms)


def test_an_unknown_gpu_and_a_cpu_calibrate_nothing(store: ModelStore) -> None:
    _, found = predicted(store, GPU, ["NVIDIA Own, 1 MiB"])
    assert (found.kv_cache_tokens, found.speed) == (None, None)
    assert calibrations(store.root, catalogue()) == {}
    measured(store, CPU)
    assert calibrations(store.root, catalogue()) == {}


def test_the_starts_that_were_measured_are_known_to_plans(store: ModelStore) -> None:
    evaluation, _ = measured(store, CPU)
    start = ColdStart(imports_s=20, weights_s=1, compilation_s=0, engine_s=3, first_answer_s=1)
    timed = evaluation.engine.model_copy(update={"start": start})
    evaluation.model_copy(update={"engine": timed}).write(store.evaluation("fp16"))
    store.evaluation("awq").write_text("{")
    assert cold_starts(store) == {"fp16": start}, "gptq's record has none"
    assert cold_starts(ModelStore(store.root, "org/other")) == cold_starts(None) == {}


def test_a_damaged_evaluation_and_a_model_of_an_unknown_type_are_left_out(store: ModelStore) -> None:
    measured(store, GPU, [H200])
    store.evaluation("awq").write_text("{")
    assert calibrations(store.root, catalogue())["h200"].evaluations == 1
    config = store.base / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "rwkv7"'))
    assert sized(store) is None
    assert calibrations(store.root, catalogue()) == {}
    assert collect(store, "run-1", "Succeeded").predictions == ()


def test_the_report_sets_predicted_beside_measured_with_the_error(store: ModelStore) -> None:
    measured(store, CPU)
    report = collect(store, "run-1", "Succeeded")
    (fp16,) = [each for each in report.predictions if each.variant == "fp16"]
    assert (fp16.kv_cache_tokens, fp16.tpot_ms) == (32_768, None)
    table = contents(report)["predicted"]
    assert [head.lines[0] for head in table.heads] == ["Variant", "Weights", "KV cache"]
    cache = table.rows[0].cells[2]
    assert cache.lines == ("32,768",)
    assert cache.small == ("measured 4,096", "error +700.0%")
    assert "Predicted beside measured" in render(report)


def test_a_mistake_in_the_users_catalogue_costs_no_report(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(store, CPU)
    monkeypatch.setenv("SLIPWAY_ACCELERATORS", str(tmp_path / "none.yaml"))
    assert collect(store, "run-1", "Succeeded").predictions[0].kv_cache_tokens == 32_768


def test_the_report_of_a_gpu_has_the_times_too(store: ModelStore) -> None:
    measured(store, GPU, [H200])
    table = contents(collect(store, "run-1", "Succeeded"))["predicted"]
    assert [head.lines[0] for head in table.heads] == ["Variant", "Weights", "KV cache", "TTFT", "TPOT"]
    assert table.rows[0].cells[4].small[0] == "measured 10.0"
