"""What the installed vLLM answers about experts, and which of its answers are an emulation."""

from __future__ import annotations

import importlib
import pkgutil
from enum import Enum
from pathlib import Path

import pytest

from stages.parts.machine.hardware import processor
from stages.parts.model.published import PublishedFormat
from stages.parts.vllm.support import _emulation, missing_kernel
from tests.extras import need

need("vllm")

GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201_088,
    "quantization_config": {"quant_method": "mxfp4"},
}


def test_every_backend_that_emulates_experts_is_known_as_such() -> None:
    from vllm.model_executor.layers.fused_moe import oracle

    names = [each.name for each in pkgutil.iter_modules(oracle.__path__, f"{oracle.__name__}.")]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    backends = {value for value in values if isinstance(value, type) and issubclass(value, Enum)}
    emulated = {f"{each.__name__}.EMULATION" for each in backends if "EMULATION" in each.__members__}
    assert "Mxfp4MoeBackend.EMULATION" in emulated
    assert {
        found for each in backends for member in each if (found := _emulation(("mxfp4", member, object)))
    } == emulated


def test_vllm_tells_whether_it_has_a_backend_for_the_experts_of_gpt_oss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(PublishedFormat, "missing_on_cpu", lambda *_, **__: "")
    here = processor()
    assert here is not None
    if here.amx:
        pytest.skip("the processor has AMX, and with it a kernel for these experts")
    missing = missing_kernel(GPT_OSS, lora=False, allow_fallback=False, published=True)
    assert missing.startswith("vLLM has no mxfp4 kernel here for a layer of 32 experts of 2880 × 2880: No MXFP4 MoE")
    assert "Candidate backends" not in missing
