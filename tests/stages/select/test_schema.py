from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import jsonschema
import pytest

from scoring.profile import Profile
from stages.parts.base.store import ModelStore
from stages.parts.records.production import Candidate, Price, Production
from stages.select.selection import select
from tests.samples import measured_store, outcome
from tests.stages.select.production_schema import PATH, schema, text

RUN = "run-1"
VARIANTS = ["fp16", "awq", "gptq"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    return measured_store(tmp_path)


def validator() -> jsonschema.Draft202012Validator:
    committed = json.loads(PATH.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(committed)
    return jsonschema.Draft202012Validator(committed)


def test_the_committed_schema_matches_the_record():
    assert PATH.read_text(encoding="utf-8") == text(), f"python -m tests.stages.select.production_schema > {PATH.name}"


def test_every_field_of_a_candidate_with_a_docstring_is_described():
    fields = schema()["$defs"]["Candidate"]["properties"]
    documented = set(re.findall(r'^    (\w+): .*\n    """', inspect.getsource(Candidate), re.MULTILINE))
    assert {name for name, field in fields.items() if field.get("description")} == documented
    assert len(documented) > 5
    assert set(fields) == set(Production.model_fields["candidates"].annotation.__args__[0].model_fields)


@pytest.mark.parametrize("price", [None, Price(per_hour=2.5)])
@pytest.mark.parametrize("failed", [(), ("awq",), ("awq", "gptq")])
def test_a_published_decision_is_valid(store, price, failed):
    for name in failed:
        outcome(store, RUN, "evaluate", name, "failed", why="vLLM did not start")
    _, decision, _ = select(store, Profile(name="own"), VARIANTS, price=price)
    for path in (store.production_metrics, store.releases / decision.release / store.production_metrics.name):
        validator().validate(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "wrong", [{"winner": None}, {"candidates": [{"variant": "awq"}]}, {"surprise": 1}, {"schema_version": 1}]
)
def test_another_document_is_not_valid(store, wrong):
    select(store, Profile(name="balanced"), VARIANTS)
    document = json.loads(store.production_metrics.read_text(encoding="utf-8"))
    assert list(validator().iter_errors(document)) == []
    assert list(validator().iter_errors(document | wrong)) != []
