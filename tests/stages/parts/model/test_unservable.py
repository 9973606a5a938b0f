from __future__ import annotations

import json
import subprocess
import sys

import pytest

from stages.parts.base.errors import UnusableModel
from stages.parts.model.unservable import refuse_kind, unknown_layout, unservable

REGISTRY = """
import json
from vllm.model_executor.models import registry
print(json.dumps({name: sorted(getattr(registry, name)) for name in dir(registry) if name.endswith("_MODELS")}))
"""


def refused(architecture: str) -> bool:
    try:
        refuse_kind({"architectures": [architecture]}, ())
    except UnusableModel:
        return True
    return False


def test_every_class_with_which_vllm_writes_text_is_accepted_and_every_other_one_is_refused() -> None:
    ended = subprocess.run([sys.executable, "-c", REGISTRY], capture_output=True, text=True, check=True)
    registry: dict[str, list[str]] = json.loads(ended.stdout.splitlines()[-1])
    writing = {*registry["_TEXT_GENERATION_MODELS"], *registry["_MULTIMODAL_MODELS"]}
    assert [name for name in sorted(writing) if refused(name)] == ["WhisperForConditionalGeneration"]
    others = ("EMBEDDING", "LATE_INTERACTION", "REWARD", "TOKEN_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")
    kinds = {name for group in (*others, "SPECULATIVE_DECODING") for name in registry[f"_{group}_MODELS"]} - writing
    assert [name for name in sorted(kinds) if not refused(name)] == ["Terratorch"]  # satellite images


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": [1]}, {"architectures": "x"}])
def test_a_configuration_without_a_class_is_of_no_kind(config: dict[str, object]) -> None:
    refuse_kind(config, {"model.safetensors"})


def test_a_field_counts_only_with_the_value_of_the_kind() -> None:
    refuse_kind({"is_encoder_decoder": False, "quantization": None}, ())
    refuse_kind({"quantization": {"quant_algo": "FP8"}}, ())


def test_a_repository_without_anything_known_has_no_weights() -> None:
    assert str(unknown_layout({"README.md"}, "x")) == "the repository has no weights: no x"


def test_every_kind_says_what_to_use_instead() -> None:
    assert all(kind.what and kind.instead for kind in (*unservable().layouts, *unservable().kinds))
