"""Reads the fields of a config.json, and puts layers together from them, as a family describes its layers.

Fields that a config.json lacks have the defaults of Transformers' configuration classes, which ``defaults.json`` lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from scoring.capacity.architecture import Attention, FeedForward, LatentAttention, Layer, NotSizeable, StateSpace

Config = Mapping[str, Any]

LARGEST: Final = 1 << 40
"""No count in a config.json comes near it."""
MOST_LAYERS: Final = 10_000
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN: Final = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"
"""How ``layer_types`` calls attention with a window that slides, and one that begins at multiples of its length."""

EARLIER_KINDS: Final = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "*": "full_attention",
    "M": "linear_attention",
    "E": "moe",
    "-": "mlp",
}
"""Kinds of layers as publishers wrote them, and as Transformers 5 does."""


@dataclass(frozen=True)
class Family:
    """How config.json describes a layer, where its families differ."""

    layer: Callable[[Reader, int], Layer]
    """Makes the layer with this index."""
    norms: int = 2
    """Norms over the hidden size in each layer."""
    biased_norms: bool = False
    """Whether these norms, and the last one, have biases."""
    head_norms: bool = False
    """Whether each query and key head is normalized."""
    wide_norms: bool = False
    """Whether all queries, and all keys, are normalized together."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases even if config.json does not say so."""
    bias_fields: tuple[str, str, str] = ("attention_bias", "attention_bias", "mlp_bias")
    """Fields that say whether biases are on queries, keys and values, on the output of attention, and in the MLP."""
    head_bias_field: str = "lm_head_bias"
    """The field that says whether the output head has a bias."""
    full_every: int = 0
    """One layer in this many has full attention and the others a window, if config.json does not list them; 0: none."""
    balanced: bool = False
    """Whether routers have a bias for each expert, which balances their load."""
    gated: bool = True
    """Whether the MLP and the experts have a gate."""
    activation: int = 0
    """Parameters that shape the MLP's activation."""
    tables: Callable[[Reader], int] = lambda _: 0
    """Counts the parameters of further embeddings."""
    outside: Callable[[Reader], int] = lambda _: 0
    """Counts the parameters outside of layers, embeddings, output head and last norm."""


@cache
def defaults() -> Mapping[str, Config]:
    """Read the defaults of Transformers' configuration classes, by ``model_type``."""
    fields: dict[str, Config] = json.loads((Path(__file__).parent / "defaults.json").read_text(encoding="utf-8"))
    return fields


class Reader:
    """Reads the fields of one configuration."""

    def __init__(self, config: Config, model_type: str, family: Family) -> None:
        self.given, self.model_type, self.family = config, model_type, family
        self.config = {**defaults().get(model_type, {}), **config}
        self.hidden = self.count("hidden_size")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LARGEST:
            raise NotSizeable(f"config.json of type {self.model_type} has no usable {name} ({value!r})")
        return value

    def first(self, names: tuple[str, ...]) -> int:
        """Count what has one of several *names*; 0 without any. Transformers 5 writes another name than publishers did,
        hence a default is the last choice."""
        for fields in (self.given, self.config):
            for name in names:
                if fields.get(name) is not None:
                    return self.count(name)
        return 0

    def experts(self) -> int:
        """Count the experts of a layer; 0 without the field."""
        return self.first(EXPERTS)

    def mixture(self, width: int, shared: int = 0, inputs: int | None = None, active: int | None = None) -> FeedForward:
        """Read experts of this *width*, the width that all tokens *shared*, the experts' *inputs*, and how many a token
        passes unless *active* says so."""
        active = self.first(EXPERTS_PER_TOKEN) if active is None else active
        return FeedForward(shared, self.experts(), active, width, gated=self.family.gated, expert_inputs=inputs)

    def dense(self, field: str = "intermediate_size") -> FeedForward:
        """Read an MLP whose width has this *field*."""
        return FeedForward(self.count(field), gated=self.family.gated)

    def kinds(self) -> Sequence[str]:
        """List the kinds of the layers; empty if config.json does not."""
        fields = ("layer_types", "layers_block_type", "hybrid_override_pattern")
        return next((kinds for kinds in map(self.config.get, fields) if kinds), ())

    def layers(self) -> int:
        if (layers := self.count("num_hidden_layers", len(self.kinds()) or None)) > MOST_LAYERS:
            raise NotSizeable(f"config.json of type {self.model_type} has {layers} layers")
        return layers

    def kind(self, index: int) -> str:
        """Read the layer's kind by Transformers 5's name; empty if config.json does not list them."""
        kinds = self.kinds()
        return EARLIER_KINDS.get(str(kinds[index]), str(kinds[index])) if kinds else ""

    def attention(self, index: int, *, gated: bool = False) -> Attention:
        heads = self.count("num_attention_heads")
        return Attention(
            heads=heads,
            kv_heads=self.count("num_key_value_heads", heads),
            head_size=self.count("head_dim", self.hidden // heads),
            window=self.window(index),
            gated=gated,
        )

    def window(self, index: int) -> int | None:
        """Read the layer's sliding window in tokens; None if it has none."""
        window = self.config.get("sliding_window") and self.count("sliding_window")
        if not (window and self.config.get("use_sliding_window", True)):
            return None
        if kind := self.kind(index):
            return window if kind == SLIDING else None
        if "max_window_layers" in self.config and "use_sliding_window" in self.config:
            return window if index >= self.count("max_window_layers") else None
        if isinstance(self.config.get("sliding_window_pattern"), str):
            raise NotSizeable("sliding_window_pattern is not a number, and config.json has no layer_types")
        pattern = self.count("sliding_window_pattern", self.family.full_every)
        return None if pattern and (index + 1) % pattern == 0 else window

    def vectors(self, attention: Attention | LatentAttention | None, feed_forward: FeedForward) -> int:
        """Count the norms and biases of a layer, without a state-space part's."""
        qkv_bias, output_bias, mlp_bias = (bool(self.config.get(name)) for name in self.family.bias_fields)
        total = self.family.norms * self.norm
        if mlp_bias and feed_forward.width:
            total += (2 if feed_forward.gated else 1) * feed_forward.width + self.hidden
        if attention and output_bias:
            total += self.hidden
        if isinstance(attention, LatentAttention):
            ranks = (attention.query_rank or 0) + attention.kv_rank
            return total + ranks + (ranks + attention.rope_size if qkv_bias else 0)
        return total + (self._attention_vectors(attention, qkv_bias) if attention else 0)

    def _attention_vectors(self, attention: Attention, qkv_bias: bool) -> int:
        queries, keys = attention.heads * attention.head_size, attention.kv_heads * attention.head_size
        total = 0
        if self.family.head_norms:
            total += (2 if attention.projections else 1) * attention.head_size
        if self.family.wide_norms:
            total += queries + keys
        if self.family.qkv_bias or qkv_bias:
            total += queries * (2 if attention.gated else 1) + attention.projections * keys
        return total

    @property
    def norm(self) -> int:
        """Parameters of a norm over the hidden size."""
        return self.hidden * (2 if self.family.biased_norms else 1)

    def outside(self) -> int:
        """Count the parameters that are in no layer, embedding or output head, but for that one's bias."""
        bias = self.count("vocab_size") if self.config.get(self.family.head_bias_field) else 0
        return self.norm + bias + self.family.outside(self)

    def layer(
        self,
        attention: Attention | LatentAttention | None,
        feed_forward: FeedForward,
        state_space: StateSpace | None = None,
        gates: int = 0,
        vectors: int = 0,
    ) -> Layer:
        """Put a layer together, with a router for its experts that has *gates* more parameters than their weights and
        balance, and *vectors* besides the usual norms and biases."""
        router = feed_forward.experts * (self.hidden + (1 if self.family.balanced else 0)) + gates
        return Layer(attention, state_space, feed_forward, self.vectors(attention, feed_forward) + vectors, router)
