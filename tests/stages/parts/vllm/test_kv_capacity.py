"""What vLLM logs about its KV cache and for which lengths it starts, against what is predicted from config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from scoring.capacity.families import read_architecture
from scoring.capacity.kv_cache import cache_layout
from stages.parts.base.errors import ServerFailed
from stages.parts.base.serving_settings import Serving
from stages.parts.vllm.arguments import BINDING, ONE_THREAD, core_binding
from stages.parts.vllm.server import ServerSpec, running
from stages.parts.vllm.sizing import cpu_cache_rules
from tests.stages.optimize.tiny import publish

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KV_CACHE_MIB: Final = 8
LONG: Final = 1 << 20
"""Longer than the cache, so that the cache is the limit."""
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": LONG,
}
EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
LINEAR: Final = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,  # the only size of vLLM's kernel on a CPU
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 32,
}
LAYERS: Final = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 2},
    # Windows in five layers and full attention in two: groups of two, one of them padded.
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 300, "sliding_window_pattern": 3},
    "qwen3_moe": EXPERTS,
    "qwen3_next": EXPERTS | LINEAR | LAYERS,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_logs_the_predicted_tokens_and_refuses_one_block_more_than_the_longest_context(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    if family == "llama":
        monkeypatch.setenv(BINDING, "0")  # the others are served as this machine's cores suggest
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    directory = publish(tmp_path / "model", AutoConfig.for_model(family, **SIZES | FAMILIES[family] | tokens))
    model = read_architecture(json.loads((directory / "config.json").read_text()))
    layout = cache_layout(model, cpu_cache_rules(model))
    available = KV_CACHE_MIB << 20
    longest = layout.longest(available)
    assert 0 < longest < LONG

    settings = Serving(kv_cache_mib=KV_CACHE_MIB, max_model_len=longest, enforce_eager=True)
    with running(ServerSpec(directory, family, settings, tmp_path / "starts.log")) as server:
        assert server.startup_log.facts().kv_cache_tokens == layout.tokens(available, longest)
        assert server.max_model_len() == longest
        processes = psutil.Process(server.process.pid).children(recursive=True)
        workers = [each for each in processes if "Worker" in " ".join(each.cmdline())]
        assert len(workers) == (core_binding(settings) != ONE_THREAD)

    longer = settings.model_copy(update={"max_model_len": longest + layout.block_tokens})
    with (
        pytest.raises(ServerFailed, match="is larger than the available KV cache memory"),
        running(ServerSpec(directory, family, longer, tmp_path / "refused.log")),
    ):
        pass
