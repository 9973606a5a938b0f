"""Models that see: their language part is quantized, and all weights keep the publisher's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from stages.optimize.base_model import read_base
from stages.optimize.language_part import language_part
from tests.models.servable import publish
from tests.stages.optimize.tiny import acquire, llama, optimize
from tests.stages.optimize.tiny import publish as publish_text

BODIES = {
    "gemma3": "language_model.model.",
    "qwen2_vl": "model.",
    "qwen3_5": "model.language_model.",
}


@pytest.mark.parametrize("kind", BODIES)
def test_the_language_part_is_found_by_the_names_of_its_layers(kind: str, tmp_path: Path) -> None:
    publish(kind, tmp_path / "published")
    base = read_base(acquire(tmp_path / "published", tmp_path / "store"))
    part = language_part(base)
    assert part is not None
    assert part.body == BODIES[kind]
    alone = part.alone(base.tensors)
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"} <= alone.keys()
    assert ("lm_head.weight" in alone) == bool(part.head)
    assert {part.published(name): tensor for name, tensor in alone.items()}.items() <= base.tensors.items()


def test_a_model_of_language_alone_has_no_part(tmp_path: Path) -> None:
    publish_text(tmp_path / "published", llama())
    assert language_part(read_base(acquire(tmp_path / "published", tmp_path / "store"))) is None


@pytest.mark.parametrize(
    ("kind", "method"),
    [("gemma3", "gptq"), pytest.param("qwen3_5", "awq", marks=pytest.mark.slow)],
)
def test_the_language_part_is_quantized_and_the_rest_is_the_publisher_s(
    kind: str, method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    published = tmp_path / "published"
    publish(kind, published)
    store = acquire(published, tmp_path / "store")
    ended = optimize(store, method, settings)
    assert ended.status == 0, ended.stderr
    before = load_file(published / "model.safetensors")
    after = {
        name: each for path in store.optimized(method).glob("*.safetensors") for name, each in load_file(path).items()
    }
    body = BODIES[kind]
    packed = {name.removesuffix("qweight") + "weight" for name in after if name.endswith(".qweight")}
    assert {name for name in packed if not name.startswith(f"{body}layers.")} == set()
    assert f"{body}layers.1.mlp.up_proj.weight" in packed
    kept = {name: each for name, each in before.items() if not name.startswith(body)}
    assert kept
    assert all(after[name].equal(each) for name, each in kept.items())
    assert before.keys() - packed == {name for name in after if name in before}
    config = json.loads((store.optimized(method) / "config.json").read_text())
    stated = config.pop("quantization_config")
    assert (stated["quant_method"], stated["bits"]) == (method, 4)
    assert config == json.loads((published / "config.json").read_text())
    index = json.loads((store.optimized(method) / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
