"""The bytes that a plan predicts of each variant, against the files that optimize writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scoring.capacity.families import read_architecture
from scoring.capacity.weights import stored_bytes
from stages.parts.base.formats import storage_of
from stages.parts.model.safetensors import read_header
from tests.stages.optimize.tiny import acquire, optimize


@pytest.mark.parametrize("method", ["fp16", "int8", "gptq", pytest.param("awq", marks=pytest.mark.slow)])
@pytest.mark.parametrize("group_size", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_a_variant_has_the_predicted_bytes(
    method: str, group_size: int, tiny: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    store = acquire(tiny, tmp_path / "store")
    ended = optimize(store, method, settings | {"group_size": group_size})
    assert ended.status == 0, ended.error
    model = read_architecture(json.loads((tiny / "config.json").read_text()))
    headers = map(read_header, store.optimized(method).glob("*.safetensors"))
    written = sum(tensor.end - tensor.start for header in headers for tensor in header.values())
    assert stored_bytes(model, storage_of(method, group_size)) == written
