"""All drills of the demo's model, served by the real vLLM behind the real Envoy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.store import ModelStore
from stages.parts.records.drills import Drill, drilled
from stages.rollout.drills import BY_NAME
from tests.serving import DEMO, MODEL, ROLLOUT, SERVING, environment, publish, stage, variant_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
QUEUED_TOKENS = 2048
"""As the release was not measured, it has no limit of its own."""
WORKLOAD = {"prompt_tokens": 64, "output_tokens": 32, "concurrency": 4, "slo": "{ttft_ms: 500, tpot_ms: 100}"}
PEAK_PER_S = "4"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ModelStore]:
    made = ModelStore(tmp_path / "store", MODEL)
    publish(made, 1, variant_of(made, "fp16", DEMO / "model"))
    serving = json.dumps(SERVING | {"max_queued_tokens": QUEUED_TOKENS})
    served = stage("serve", "--serving", serving, "--rollout", json.dumps(ROLLOUT), variables=environment(made))
    assert served.returncode == 0, served.stderr
    yield made
    stage("serve", "--stop", variables=environment(made))


def test_the_demos_endpoint_withstands_what_a_production_review_asks(store: ModelStore) -> None:
    settings = [text for name, value in WORKLOAD.items() for text in ("--set", f"workload.{name}={value}")]
    command = [sys.executable, "-m", "pipeline", "drill", "all", MODEL, "--short", "--peak", PEAK_PER_S, "--json"]
    said = subprocess.run(
        [*command, *settings], env=environment(store), capture_output=True, text=True, check=False, timeout=900
    )
    document: dict[str, Any] = json.loads(said.stdout)
    print(said.stderr, said.stdout)
    seen = {each["drill"]: Drill.model_validate(each) for each in document["drills"]}
    assert {name: drill.failures for name, drill in seen.items() if drill.failures} == {}
    assert said.returncode == 0, said.stderr
    assert list(seen) == [name for name in BY_NAME if name not in ("scale", "rollback")]
    assert set(document["not_possible"]) == {"scale", "rollback"}, "one machine, one release"
    assert {name: drill.seconds for name, drill in seen.items() if drill.seconds > 60} == {}
    assert seen["kv-full"].figures["cache_used"] >= 0.95 or seen["kv-full"].figures["preemptions"] > 0
    cold = seen["cold"].figures
    parts = ("process_s", "imports_s", "weights_s", "compilation_s", "engine_s", "first_answer_s")
    assert sum(cold[part] for part in parts) == pytest.approx(cold["total_s"], abs=1)
    assert cold["imports_s"] > cold["weights_s"], "of a model of 8 MiB"
    (release,) = {drill.release for drill in seen.values()}
    assert {each.drill for each in drilled(store, release)} == set(seen)
