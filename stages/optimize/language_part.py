"""The language part of a model that sees or hears, as a model of its own, which GPTQModel quantizes like any other.

GPTQModel's classes for whole models need their image processors, and name weights as Transformers does in memory. vLLM
finds them by the publisher's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stages.optimize.base_model import BLOCK_WEIGHT, Base
from stages.optimize.shards import read_weights, write_tensors
from stages.parts.base.files import place_tree, write_json
from stages.parts.base.store import Record
from stages.parts.model.checkpoint import CONFIG, OTHER_PARTS, SINGLE
from stages.parts.model.safetensors import Tensor
from stages.parts.records.acquired import WEIGHTS

BODY: Final = "model."
HEAD: Final = "lm_head."
SAME_LAYERS: Final = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Types of language models that are no models of their own in Transformers, by the type that computes the same of text:
there all three positions of a token in a picture are its position in the text."""


class LanguagePart(Record):
    """How the published names of its tensors begin, where those of a model of its own begin with BODY and HEAD."""

    body: str
    """Such as ``model.language_model.``"""
    head: str
    """Such as ``language_model.lm_head.``; empty if the head is the embedding."""

    def published(self, name: str) -> str:
        if self.head and name.startswith(HEAD):
            return self.head + name.removeprefix(HEAD)
        return self.body + name.removeprefix(BODY) if name.startswith(BODY) else name

    def alone(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Choose the part's tensors, by their names in a model of its own."""
        pairs = ((self.body, BODY), (self.head, HEAD)) if self.head else ((self.body, BODY),)
        return {
            own + name.removeprefix(beginning): tensor
            for beginning, own in pairs
            for name, tensor in tensors.items()
            if name.startswith(beginning)
        }


def language_part(base: Base) -> LanguagePart | None:
    """Find the part of the model that the decoder is in; None if that is the whole model."""
    if not any(isinstance(base.config.get(part), dict) for part in OTHER_PARTS) or not base.linear_weights:
        return None
    blocks = BLOCK_WEIGHT.match(next(iter(base.linear_weights)))
    body = f"{blocks[1]}.".removesuffix("layers.") if blocks else ""
    heads = (name.removesuffix("weight") for name in base.tensors if name.endswith(f"{HEAD}weight"))
    return LanguagePart(body=body, head=next(heads, ""))


def write_language_part(part: LanguagePart, base: Path, target: Path) -> None:
    """Write the part of the model in the directory *base* as a model of its own. Raises: ValueError: Transformers has
    no model of its own for its type."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    whole = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    config: dict[str, Any] = whole.get_text_config(decoder=True).to_dict()
    model_type = SAME_LAYERS.get(config["model_type"], config["model_type"])
    if model_type not in CLASSES:
        raise ValueError(f"Transformers has no model of its own for the language part, {model_type}")
    target.mkdir()
    named = {"model_type": model_type, "architectures": [CLASSES[model_type]], "tie_word_embeddings": not part.head}
    write_json(target / CONFIG, config | named)
    write_tensors(target / SINGLE, part.alone(read_weights(base)), {})
    names = (path.name for path in base.iterdir() if path.is_file() and "processor" not in path.name)
    place_tree(base, target, (name for name in names if name != CONFIG and not name.endswith(WEIGHTS)))
