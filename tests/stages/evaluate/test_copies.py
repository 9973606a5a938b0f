"""Real vLLM: a copy of fp16 is equivalent to it, and a model with 5 % of its weights set to zero is never loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.program import RUN_VARIABLE, outcomes
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import Evaluation
from tests.extras import need
from tests.serving import DEMO, MODEL, SERVING, environment, stage, variant_of
from tests.stages.evaluate.test_against_fp16 import with_zeros

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
WORKLOAD: dict[str, Any] = {
    "name": "small",
    "budget_minutes": 1,
    "prompt_tokens": 64,
    "output_tokens": 16,
    "concurrency": 2,
    "slo": None,
    "request_rate_per_s": 5,
    "steady_s": 4,
    "quality_tasks": ["demo_continuation", "demo_perplexity"],
    "tasks_path": str(DEMO / "tasks"),
}
# Two blocks on a machine with other work show differences of speed only roughly.
MARGINS = {"speed": 0.9, "memory": 0.01, "quality": 0.1}
PROFILE = {"name": "rough", "margins": MARGINS, "task_loss": 0.3, "error_rate": 0.4}


def test_a_copy_is_equivalent_and_a_damaged_model_is_out_before_any_load(tmp_path: Path) -> None:
    need("vllm")
    store = ModelStore(tmp_path / "store", MODEL)
    variant_of(store, "fp16", DEMO / "model")
    variant_of(store, "copy", DEMO / "model")
    variant_of(store, "damaged", with_zeros(DEMO / "model", tmp_path / "damaged", 0.05))
    limits = {"kl_divergence": {"max": 0.1}}
    given = ["--workload", json.dumps(WORKLOAD), "--serving", json.dumps(SERVING)]
    given += ["--profile", json.dumps(PROFILE | {"constraints": limits})]
    variables = environment(store) | {RUN_VARIABLE: "run-1"}
    said = stage("evaluate", "--variants", "fp16,copy,damaged", *given, variables=variables)
    assert said.returncode == 0, said.stderr
    found = {each.variant: each for each in outcomes(store.run("run-1"))}
    assert found["damaged"].result == "left out"
    assert "kl_divergence" in found["damaged"].reason
    assert "load of damaged" not in said.stderr
    evaluation = Evaluation.read(store.evaluation("copy"))
    assert evaluation
    assert evaluation.schedule
    assert evaluation.schedule.said.startswith("equivalent within the margins")
    assert (evaluation.schedule.ended, len(evaluation.looks)) == ("settled", 2)
