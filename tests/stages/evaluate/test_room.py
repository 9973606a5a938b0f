from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from stages.evaluate.room import no_room
from stages.parts.base.settings import Serving
from stages.parts.base.store import ModelStore
from tests.serving import MODEL, stand_in_variant

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="the evaluate extra is not installed")


def test_small_servers_stand_side_by_side_and_huge_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    variant = stand_in_variant(ModelStore(tmp_path / "store", MODEL), "fp16")
    huge = variant.model_copy(update={"weights_bytes": 10**15})
    assert no_room([variant], Serving(kv_cache_mib=1)) == ""
    assert "GiB are free" in no_room([variant, huge], Serving(kv_cache_mib=1))
    assert "GiB are free" in no_room([variant], Serving(kv_cache_mib=10**9))
