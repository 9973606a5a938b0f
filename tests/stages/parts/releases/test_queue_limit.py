"""How many prompt tokens may wait at a server of a release: what was measured of it, unless settings say otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.releases.pinned import pinned
from stages.parts.releases.release import METRICS
from stages.parts.vllm.arguments import engine_arguments
from tests.samples import engine

RELEASE = "0001-fp16-0123456789ab"
SLO = {"ttft_ms": 2500, "tpot_ms": 100}


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path, "org/name")


def limit(store: ModelStore, asked: AskedServing | None = None, context: int | None = 1024, **measured: Any) -> Any:
    """The release's setting, after it was measured to read 4,000 tokens per second unless *measured* says otherwise."""
    folder = store.releases / RELEASE
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["--max-model-len", str(context)] if context else []
    run = engine(None).model_dump(mode="json") | {"arguments": arguments}
    told = {"engine": run, "prompt_tokens_per_s": 4000.4, "workload": {"slo": SLO}} | measured
    (folder / METRICS).write_text(json.dumps(told))
    return pinned(store, asked or AskedServing(), RELEASE).max_queued_tokens


def test_so_many_may_wait_as_are_read_within_the_target_and_at_least_the_longest_prompt(store: ModelStore) -> None:
    assert limit(store) == 10_000
    assert limit(store, context=16_384) == 16_384
    assert limit(store, AskedServing(max_model_len=32_768)) == 32_768
    (store.releases / RELEASE / "config.json").write_text('{"text_config": {"max_position_embeddings": 40960}}')
    assert limit(store, context=None) == 40_960


@pytest.mark.parametrize("measured", [{"workload": {"slo": None}}, {"prompt_tokens_per_s": None}, {"workload": {}}])
def test_without_a_target_or_a_measurement_there_is_no_limit(store: ModelStore, measured: dict[str, Any]) -> None:
    assert limit(store, **measured) is None
    assert limit(store, context=None) is None


def test_what_a_user_says_of_the_queue_holds(store: ModelStore) -> None:
    assert limit(store, AskedServing(max_queued_tokens=None)) is None
    assert limit(store, AskedServing(max_queued_tokens=77)) == 77
    for own in (("--max-num-queued-reqs", "8"), ("--max_num_queued_tokens=9",)):
        assert limit(store, AskedServing(extra_arguments=own)) is None


def test_a_server_is_told_its_limit_on_one_machine_and_on_a_cluster(store: ModelStore) -> None:
    limit(store)
    settings = pinned(store, AskedServing(), RELEASE)
    for on_gpu in (True, False):
        arguments = engine_arguments(settings, store.releases / RELEASE, on_gpu=on_gpu)
        assert arguments[arguments.index("--max-num-queued-tokens") + 1] == "10000"


def test_a_release_is_served_by_the_recipe_that_it_was_measured_with(store: ModelStore) -> None:
    limit(store, recipe={"kv_cache_dtype": "fp8", "max_num_seqs": 16})
    for asked in (AskedServing(), AskedServing(max_num_seqs=64)):
        arguments = engine_arguments(pinned(store, asked, RELEASE), store.releases / RELEASE, on_gpu=True)
        assert arguments[arguments.index("--kv-cache-dtype") + 1] == "fp8"
        assert arguments[arguments.index("--max-num-seqs") + 1] == "16"
