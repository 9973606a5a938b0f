from __future__ import annotations

from pathlib import Path

import pytest

from stages.evaluate.results import conditions_of, tasks_digest
from stages.parts.base.errors import ConfigError
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.records.variant import Variant
from tests.extras import need
from tests.serving import MODEL, stand_in_variant

WORKLOAD = Workload(name="w", prompt_tokens=8, output_tokens=8, concurrency=1, quality_tasks=("t",))
need("vllm")


@pytest.fixture
def variant(tmp_path: Path) -> Variant:
    return stand_in_variant(ModelStore(tmp_path / "store", MODEL), "fp16")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    (folder / "data").mkdir(parents=True)
    (folder / "own.yaml").write_text("task: own\n")
    (folder / "data" / "items.jsonl").write_text("{}\n")
    return folder


def test_a_setting_without_effect_on_a_figure_does_not_change_the_key(variant: Variant) -> None:
    here, elsewhere = Serving(), Serving(host="0.0.0.0", port=9000, startup_timeout_s=5)  # noqa: S104
    assert conditions_of(variant, WORKLOAD, here).key == conditions_of(variant, WORKLOAD, elsewhere).key


def test_how_long_is_measured_does_not_change_the_key(variant: Variant) -> None:
    longer = WORKLOAD.model_copy(update={"protocol": "thorough", "budget_minutes": 500.0})
    assert conditions_of(variant, longer, Serving()).key == conditions_of(variant, WORKLOAD, Serving()).key


@pytest.mark.parametrize(
    ("workload", "serving"),
    [
        ({"concurrency": 2}, {}),
        ({"seed": 1}, {}),
        ({"request_rate_per_s": 1.0}, {}),
        ({"divergence_tokens": 64}, {}),
        ({"divergence_documents": 0}, {}),
        ({}, {"enforce_eager": True}),
        ({}, {"kv_cache_mib": 5}),
        ({}, {"text_only": True}),
    ],
)
def test_a_setting_with_an_effect_on_a_figure_changes_the_key(
    variant: Variant, workload: dict[str, int], serving: dict[str, int]
) -> None:
    changed = conditions_of(variant, WORKLOAD.model_copy(update=workload), Serving.model_validate(serving))
    assert changed.key != conditions_of(variant, WORKLOAD, Serving()).key


def test_parsers_change_the_key_and_what_they_are_chosen_by_does_not(variant: Variant) -> None:
    key, named = conditions_of(variant, WORKLOAD, Serving()).key, Serving(tool_parser="hermes", reasoning_parser="none")
    assert conditions_of(variant, WORKLOAD, named).key == key
    assert conditions_of(variant, WORKLOAD, Serving(), ["--reasoning-parser", "qwen3"]).key != key


def test_another_variant_has_another_key(variant: Variant) -> None:
    other = variant.model_copy(update={"digest": "0" * 64})
    assert conditions_of(variant, WORKLOAD, Serving()).key != conditions_of(other, WORKLOAD, Serving()).key


def test_tasks_are_known_by_their_content_and_not_by_where_they_lie(tasks: Path, tmp_path: Path) -> None:
    before = tasks_digest(str(tasks))
    moved = tasks.rename(tmp_path / "moved")
    (moved / "__pycache__").mkdir()
    (moved / "__pycache__" / "loading.pyc").write_bytes(b"left behind")
    assert tasks_digest(str(moved)) == before
    (moved / "data" / "items.jsonl").write_text('{"changed": true}\n')
    assert tasks_digest(str(moved)) != before


def test_without_a_folder_of_tasks_there_is_no_digest_and_a_missing_folder_is_an_error() -> None:
    assert tasks_digest(None) is None
    with pytest.raises(ConfigError, match="'/no/such' is not a folder"):
        tasks_digest("/no/such")


def test_a_trace_is_known_by_its_content_and_not_by_where_it_lies(variant: Variant, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_tokens": 1, "output_tokens": 1}\n')
    workload = Workload(name="w", trace=str(trace), concurrency=1, quality_tasks=("t",))
    before = conditions_of(variant, workload, Serving())
    assert "trace" not in before.workload
    moved = trace.rename(tmp_path / "moved.jsonl")
    workload = workload.model_copy(update={"trace": str(moved)})
    assert conditions_of(variant, workload, Serving()).key == before.key
    moved.write_text('{"prompt_tokens": 2, "output_tokens": 1}\n')
    assert conditions_of(variant, workload, Serving()).key != before.key
    moved.unlink()
    with pytest.raises(ConfigError, match=r"moved.jsonl' is not a file"):
        conditions_of(variant, workload, Serving())


def test_the_sources_of_adapters_do_not_change_the_key(variant: Variant) -> None:
    """Their digests do, see test_measure.py."""
    asked = Serving(adapters={"sql": "org/sql"})
    assert conditions_of(variant, WORKLOAD, asked).key == conditions_of(variant, WORKLOAD, Serving()).key
