from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from scoring.units import GIB
from stages.evaluate.block import fit_together
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from tests.extras import need
from tests.serving import MODEL, stand_in_variant

need("vllm")


def test_small_servers_stand_side_by_side_and_huge_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    variant = stand_in_variant(ModelStore(tmp_path / "store", MODEL), "fp16")
    huge = variant.model_copy(update={"weights_bytes": 10**15})
    assert fit_together([variant], Serving(kv_cache_mib=1))
    assert not fit_together([variant, huge], Serving(kv_cache_mib=1))
    assert not fit_together([variant], Serving(kv_cache_mib=10**9))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6 * GIB))
    large = variant.model_copy(update={"weights_bytes": 2 * GIB})
    served_in = {dtype: Serving(kv_cache_mib=1, dtype=dtype) for dtype in ("bfloat16", "float32")}
    assert fit_together([large], served_in["bfloat16"])
    assert not fit_together([large], served_in["float32"])
    assert fit_together([large.model_copy(update={"bits": 4})], served_in["float32"])
