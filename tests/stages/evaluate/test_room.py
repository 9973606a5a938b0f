from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from scoring.units import GIB
from stages.evaluate.block import fitting
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from tests.extras import need
from tests.serving import MODEL, stand_in_variant

need("vllm")


def test_as_many_servers_stand_side_by_side_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    variant = stand_in_variant(ModelStore(tmp_path / "store", MODEL), "fp16")
    huge = variant.model_copy(update={"weights_bytes": 10**15})
    assert fitting([variant, huge], Serving(kv_cache_mib=1)) == 0
    assert fitting([variant], Serving(kv_cache_mib=10**9)) == 0
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6 * GIB, total=8 * GIB))
    large = variant.model_copy(update={"weights_bytes": 2 * GIB})
    served_in = {dtype: Serving(kv_cache_mib=1, dtype=dtype) for dtype in ("bfloat16", "float32")}
    assert fitting([variant] * 5, served_in["bfloat16"]) == 2
    assert fitting([variant, large, variant], served_in["bfloat16"]) == 1
    assert fitting([large], served_in["float32"]) == 0
    assert fitting([large.model_copy(update={"bits": 4})], served_in["float32"]) == 1
