"""Adapters on a Hub and in directories: what is read of them, and which fit a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from stages.parts.base.errors import ConfigError, InvalidName, SlipwayError, UnusableModel
from stages.parts.model.adapter import (
    CONFIG,
    RANKS,
    WEIGHTS,
    Adapter,
    Shapes,
    check_adapters,
    describe_adapter,
    max_lora_rank,
    parse_source,
    refuse_misfit,
)
from stages.parts.model.description import describe_model, tensor_shapes
from tests.adapters import files, untrained, write
from tests.extras import need
from tests.hub import HubServer
from tests.hub.models import tiny_model, write_model

BASE: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (512, 64),
    "model.norm.weight": (64,),
    **{f"model.layers.{layer}.self_attn.q_proj.weight": (64, 64) for layer in range(2)},
    **{f"model.layers.{layer}.self_attn.k_proj.weight": (32, 64) for layer in range(2)},
    **{f"model.layers.{layer}.mlp.down_proj.weight": (64, 256) for layer in range(2)},
}


def adapter(matrices: dict[str, Any], **config: Any) -> Adapter:
    shapes = {f"base_model.model.{name}": matrix.shape for name, matrix in matrices.items()}
    return Adapter("org/adapter", {"peft_type": "LORA", "r": 8} | config, shapes)


def misfit(matrices: dict[str, Any], base: Shapes = BASE, **config: Any) -> str:
    """What is said of an adapter for another base."""
    with pytest.raises(UnusableModel) as refusal:
        refuse_misfit(adapter(matrices, **config), base, "org/base")
    return str(refusal.value)


def test_an_adapter_of_any_projection_fits_the_model_it_was_made_for() -> None:
    for module, inputs, outputs in (
        ("self_attn.q_proj", 64, 64),
        ("self_attn.k_proj", 64, 32),
        ("mlp.down_proj", 256, 64),
    ):
        made = untrained(inputs, outputs, module=f"model.layers.{{}}.{module}", layers=2)
        refuse_misfit(adapter(made), BASE, "org/base")


def test_what_differs_from_another_base_is_named_with_the_base_that_the_adapter_names() -> None:
    said = misfit(untrained(128, 128), base_model_name_or_path="org/larger")
    assert said == (
        "the adapter org/adapter was made for another base than org/base: "
        "model.layers.0.self_attn.q_proj has 128 inputs, and 64 in the model; "
        "model.layers.0.self_attn.q_proj has 128 outputs, and 64 in the model; "
        "its adapter_config.json names org/larger"
    )
    assert "names" not in misfit(untrained(128), base_model_name_or_path="org/base")


def test_a_base_with_fewer_layers_has_no_place_for_the_others() -> None:
    said = misfit(untrained(layers=9))
    assert "there is no layer model.layers.2.self_attn.q_proj" in said
    assert said.endswith("; 11 more differ")


def test_a_projection_that_the_model_does_not_have_is_named() -> None:
    assert "there is no layer model.layers.0.attn.c_attn" in misfit(untrained(module="model.layers.{}.attn.c_attn"))


def test_names_may_begin_as_transformers_or_as_the_checkpoint_has_them() -> None:
    nested = {name.replace("model.", "model.language_model.", 1): shape for name, shape in BASE.items()}
    refuse_misfit(adapter(untrained(layers=2)), nested, "org/base")
    assert "there is no layer model.layers.2" in misfit(untrained(layers=3), nested)
    # Of two towers it is not said which one is meant.
    towers = nested | {"model.vision.layers.0.self_attn.q_proj.weight": (64, 64)}
    assert "there is no layer layers.0.self_attn.q_proj" in misfit(
        untrained(module="layers.{}.self_attn.q_proj"), towers
    )


def test_matrices_that_are_stored_as_inputs_and_outputs_fit_turned() -> None:
    gpt2 = {"h.0.attn.c_attn.weight": (64, 192)}
    made = untrained(64, 192, module="transformer.h.{}.attn.c_attn")
    refuse_misfit(adapter(made, fan_in_fan_out=True), gpt2, "org/base")
    assert "has 64 inputs, and 192 in the model" in misfit(made, gpt2)


def test_an_adapter_of_a_tied_head_and_of_embeddings_is_compared_with_the_vocabulary() -> None:
    refuse_misfit(adapter(untrained(64, 512, module="lm_head")), BASE, "org/base")
    assert "lm_head has 600 outputs, and 512 in the model" in misfit(untrained(64, 600, module="lm_head"))
    rows = {"A": np.zeros((8, 512)), "B": np.zeros((64, 8))}
    made = {f"model.embed_tokens.lora_embedding_{which}": matrix for which, matrix in rows.items()}
    refuse_misfit(adapter(made), BASE, "org/base")


def test_tokens_that_were_added_to_the_vocabulary_are_refused() -> None:
    more = {"model.embed_tokens.base_layer.weight": np.zeros((514, 64))}
    assert "model.embed_tokens has 514 tokens, and 512 in the model" in misfit(untrained() | more)
    same = {"model.embed_tokens.base_layer.weight": np.zeros((512, 64))}
    refuse_misfit(adapter(untrained() | same), BASE, "org/base")


def test_packed_weights_show_that_there_is_a_layer_and_not_its_size() -> None:
    packed = {f"model.layers.0.self_attn.q_proj.{part}": (8, 64) for part in ("weight_packed", "weight_scale")}
    refuse_misfit(adapter(untrained(128, 128)), packed, "org/base")
    assert "there is no layer" in misfit(untrained(layers=2), packed)


def test_sources_are_repositories_with_or_without_a_revision_and_directories(tmp_path: Path) -> None:
    name, revision = parse_source("org/adapter@v2")
    assert (name.id, revision) == ("org/adapter", "v2")
    assert parse_source("org/adapter")[1] == "main"
    assert parse_source(f"{tmp_path}/a@b/c")[0].directory == tmp_path / "a@b" / "c"
    with pytest.raises(InvalidName):
        parse_source("not a name")


def test_the_ranks_are_those_that_vllm_takes() -> None:
    need("vllm")
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == RANKS
    assert [max_lora_rank({"r": rank}) for rank in (1, 4, 8, 200, 512, 513, 0, "8")] == [1, 8, 8, 256, 512, 0, 0, 0]
    assert max_lora_rank({"r": 4, "rank_pattern": {"q_proj": 20}}) == 32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({WEIGHTS: None, "adapter_model.bin": b"x"}, "holds its weights only as pickles"),
        ({CONFIG: None}, "has no adapter_config.json, so it is no LoRA adapter"),
        (files(untrained(), peft_type="IA3"), "is of PEFT's type IA3, and vLLM serves LORA alone"),
        (files(untrained(), r=1024), "has the rank 1024, and vLLM takes 1 to 512"),
        (
            {WEIGHTS: save({"base_model.model.lm_head.weight": np.zeros((2, 2), np.float32)})},
            "holds base_model.model.lm_head.weight, which is not of a LoRA and would be left out",
        ),
        (files(untrained(module="lm_head")), "changes lm_head, and vLLM then fails to compute the log-probabilities"),
        ({CONFIG: b"["}, "adapter_config.json is not JSON"),
        ({WEIGHTS: b"x"}, "adapter_model.safetensors is truncated or not a safetensors file"),
    ],
)
def test_what_is_no_adapter_that_can_be_served_is_refused(
    tmp_path: Path, changed: dict[str, bytes | None], message: str
) -> None:
    made = {name: content for name, content in (files(untrained()) | changed).items() if content is not None}
    with pytest.raises(SlipwayError, match=message):
        describe_adapter(str(write_model(tmp_path / "adapter", made)))


@pytest.fixture
def served(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    return hub


def test_on_a_hub_only_headers_are_read(served: HubServer) -> None:
    shards = {
        f"model-0000{place + 1}-of-00002.safetensors": {name: np.zeros(BASE[name], np.float32) for name in names}
        for place, names in enumerate((list(BASE)[:3], list(BASE)[3:]))
    }
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    content: dict[str, bytes | None] = {
        "model.safetensors": None,
        **{name: save(made) for name, made in shards.items()},
    }
    content["model.safetensors.index.json"] = json.dumps(index).encode()
    served.add_repo("org/base", tiny_model(**content))
    served.add_repo("org/adapter", files(untrained(layers=2)) | {"adapter_model.bin": b"not read"})
    served.add_repo("org/larger", files(untrained(128, 128)))
    described = describe_model("org/base", "main")
    assert tensor_shapes(described) == BASE
    assert check_adapters(described, {"support": "org/adapter"})["support"].config["r"] == 8
    with pytest.raises(UnusableModel, match="the adapter org/larger@main was made for another base than org/base"):
        check_adapters(described, {"support": "org/adapter", "other": "org/larger@main"})
    with pytest.raises(ConfigError, match="org/base is the model itself"):
        check_adapters(described, {"org/base": "org/adapter"})
    read = [request for request in served.requests if request.path.endswith(".safetensors")]
    assert read
    assert all(request.range for request in read if request.method == "GET")
    assert not [request for request in served.requests if request.path.endswith(".bin")]


def test_a_directory_s_adapter_is_compared_with_a_directory_s_model(tmp_path: Path) -> None:
    weights = {name: np.zeros(shape, np.float32) for name, shape in BASE.items()}
    base = write_model(tmp_path / "base", tiny_model(**{"model.safetensors": save(weights)}))
    made = write(tmp_path / "adapter", untrained())
    described = describe_model(str(base), "main")
    assert check_adapters(described, {"support": str(made)}).keys() == {"support"}
    with pytest.raises(InvalidName, match="there is no directory"):
        check_adapters(described, {"support": str(tmp_path / "none")})
