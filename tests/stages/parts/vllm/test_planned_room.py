"""Whether a variant in a directory fits on the GPUs that it is to be served on, for published models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scoring.capacity.families import read_architecture
from scoring.capacity.weights import stored_bytes
from stages.parts.base.errors import ConfigError
from stages.parts.base.formats import storage_of
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.records.variant import VARIANT
from stages.parts.vllm import gpu_room as room
from stages.parts.vllm.gpu_room import check_room
from tests.samples import base, variant
from tests.stages.parts.vllm.test_automatic import CPU, PUBLISHED, on

Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """The directory of a variant of a published model, on a machine with so many of these GPUs; none: without."""

    def make(name: str, gpu: str = "h100", gpus: int = 4, model: str = "llama-3.1-70b") -> Path:
        monkeypatch.setattr(room, "place_here", lambda: on(gpu, gpus) if gpus else CPU)
        monkeypatch.setattr(room, "query_gpus", lambda _: [])
        store = ModelStore(tmp_path / f"{gpu}-{gpus}-{model}", "org/name")
        record, config = variant(store, name, base(store)), PUBLISHED[model]["config"]
        architecture = read_architecture(config)
        size = stored_bytes(architecture, storage_of(name, 128))
        record.model_copy(update={"weights_bytes": size}).write(store.optimized(name) / VARIANT)
        (store.optimized(name) / "config.json").write_text(json.dumps(config))
        return store.optimized(name)

    return make


def serving(size: int = 4, **changes: Any) -> Serving:
    return Serving(tensor_parallel_size=size, max_model_len=8192, **changes)


def test_a_model_whose_cache_cannot_be_calculated_is_only_refused_for_its_weights(made: Made) -> None:
    directory = made("fp16", model="jamba-v0.1")
    config = PUBLISHED["jamba-v0.1"]["config"] | {"attn_layer_period": 100, "attn_layer_offset": 99}
    (directory / "config.json").write_text(json.dumps(config))
    check_room(directory, serving(1))


def test_a_start_that_surely_fails_is_refused_with_the_number_of_gpus_that_is_enough(made: Made) -> None:
    directory = made("fp16")
    with pytest.raises(ConfigError, match=r"on 1 GPU\(s\): weights 131.4, .* GiB of 71.3 leave no room") as refused:
        check_room(directory, serving(1))
    assert refused.value.hint == "set serving.tensor_parallel_size=4"
    check_room(directory, serving(4))
    with pytest.raises(ConfigError) as refused:
        check_room(made("fp16", gpus=1), serving(1))
    assert refused.value.hint.startswith("the 1 GPU(s) here are too few")


def test_what_may_fit_if_less_is_taken_than_was_estimated_is_left_to_vllm(made: Made) -> None:
    directory = made("fp16", gpu="l4", gpus=1, model="llama-3.1-8b")
    lengths = [length for length in range(1024, 131_072, 1024) if not _refused(directory, length)]
    assert 21_248 < max(lengths) < 32_768  # auto leaves as much more free as it takes less here


def _refused(directory: Path, length: int) -> bool:
    try:
        check_room(directory, Serving(max_model_len=length))
    except ConfigError:
        return True
    return False
