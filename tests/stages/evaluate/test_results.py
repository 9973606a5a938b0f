from __future__ import annotations

from pathlib import Path

import pytest

from scoring.profile import Profile
from stages.evaluate.results import choice_digest, complete
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.records.evaluation import Schedule
from stages.parts.records.production import RULES
from tests.samples import evaluation
from tests.serving import MODEL, stand_in_variant

WORKLOAD = Workload(name="w", prompt_tokens=8, output_tokens=8, concurrency=1, quality_tasks=("t",))
PROFILE = Profile(name="p")


def test_what_was_settled_by_other_rules_or_another_profile_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ModelStore(tmp_path / "store", MODEL)
    variant = stand_in_variant(store, "fp16")
    found = evaluation(store, variant, quality=0.7, latency_ms=100, throughput=50, weights_bytes=1000)
    schedule = Schedule(
        variants=("fp16",), profile=choice_digest(PROFILE), budget_s=60, spent_s=30, ended="settled", said=""
    )
    settled = {"fp16": found.model_copy(update={"schedule": schedule})}
    assert complete(settled, WORKLOAD, PROFILE)
    assert complete(settled, WORKLOAD, PROFILE.model_copy(update={"name": "q"}))
    assert not complete(settled, WORKLOAD, PROFILE.model_copy(update={"error_rate": 0.01}))
    monkeypatch.setattr("stages.evaluate.results.RULES", RULES + 1)
    assert not complete(settled, WORKLOAD, PROFILE)
