"""Reads the architecture of a model from its config.json, for the families whose sizes are known.

The field names and defaults are those of Transformers' configuration classes, and which layers have a window or a state
follows vLLM's model files. A model of another type is refused, because a guess could be silently wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from scoring.capacity.architecture import (
    Architecture,
    Attention,
    FeedForward,
    LatentAttention,
    Layer,
    NotSizeable,
    StateSpace,
)

Config = Mapping[str, Any]

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value by the type that config.json names."""


@dataclass(frozen=True)
class Family:
    """How config.json describes a layer, where its families differ."""

    layer: Callable[[Reader, int], Layer]
    """Makes the layer with this index."""
    norms: int = 2
    """Norms over the hidden size in each layer."""
    head_norms: bool = False
    """Whether each query and key head is normalized."""
    wide_norms: bool = False
    """Whether all queries, and all keys, are normalized together."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases even if config.json does not say so."""
    window: int | None = None
    """The window in tokens if config.json does not mention it; null there means none."""
    full_every: int = 0
    """One layer in this many has full attention and the others a window, if config.json does not list them; 0: none."""
    windows_last: bool = False
    """Whether windows are off by default, and only the layers from ``max_window_layers`` on have one."""
    tied: bool = False
    """Whether the output head is the embedding unless config.json says otherwise."""


def read_architecture(config: Config) -> Architecture:
    """Read the architecture that a config.json describes; the text model's, if it has parts for images or sound. Raise
    NotSizeable if the family is not known, or a field is missing or has an unusable value; the message names it."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise NotSizeable("text_config is not an object")
    name = str(text.get("model_type", config.get("model_type", "")))
    if name not in FAMILIES:
        raise NotSizeable(f"model type {name or 'unknown'!r}: its layers are not known (known: {', '.join(FAMILIES)})")
    family = FAMILIES[name]
    reader = Reader(text, name, family)
    try:
        layers = tuple(family.layer(reader, index) for index in range(reader.count("num_hidden_layers")))
        return Architecture(
            model_type=name,
            hidden=reader.count("hidden_size"),
            vocabulary=reader.count("vocab_size"),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", family.tied))),
            longest_context=reader.count("max_position_embeddings"),
            layers=layers,
            recurrent_bytes=BYTES.get(str(text.get("mamba_ssm_dtype"))),
        )
    except (TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise NotSizeable(f"a field of config.json of type {name} has an unusable value ({error})") from error


class Reader:
    """Reads the fields of one configuration."""

    def __init__(self, config: Config, model_type: str, family: Family) -> None:
        self.config, self.model_type, self.family = config, model_type, family
        self.hidden = self.count("hidden_size")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise NotSizeable(f"config.json of type {self.model_type} has no usable {name} ({value!r})")
        return value

    def experts(self) -> int:
        """Count the experts of a layer; 0 without the field. Transformers 5 writes another name than publishers did."""
        return next((self.count(name) for name in EXPERTS if self.config.get(name) is not None), 0)

    def mixture(self, width: int, shared: int = 0) -> FeedForward:
        """Read experts of this *width*, and the width that all tokens *shared*."""
        return FeedForward(shared, self.experts(), self.count("num_experts_per_tok"), width)

    def kind(self, index: int) -> str:
        """Read the layer's entry in ``layer_types``; empty if config.json has no such list."""
        kinds = self.config.get("layer_types") or self.config.get("layers_block_type")
        return str(kinds[index]) if kinds else ""

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
        window = self.family.window
        if "sliding_window" in self.config:
            window = self.config["sliding_window"] and self.count("sliding_window")
        if not (window and self.config.get("use_sliding_window", not self.family.windows_last)):
            return None
        if kind := self.kind(index):
            return window if kind == "sliding_attention" else None
        if self.family.windows_last:
            return window if index >= self.count("max_window_layers", 28) else None
        if isinstance(self.config.get("sliding_window_pattern"), str):
            raise NotSizeable("sliding_window_pattern is not a number, and config.json has no layer_types")
        pattern = self.count("sliding_window_pattern", self.family.full_every)
        return None if pattern and (index + 1) % pattern == 0 else window

    def vectors(self, attention: Attention | LatentAttention | None) -> int:
        """Count the norms and biases of a layer, without a state-space part's."""
        total = self.family.norms * self.hidden
        if isinstance(attention, LatentAttention):
            return total + (attention.query_rank or 0) + attention.kv_rank
        if attention and self.family.head_norms:
            total += 2 * attention.head_size
        if attention and self.family.wide_norms:
            total += (attention.heads + attention.kv_heads) * attention.head_size
        if attention and (self.family.qkv_bias or self.config.get("attention_bias")):
            total += (attention.heads + 2 * attention.kv_heads) * attention.head_size
        return total

    def layer(
        self,
        attention: Attention | LatentAttention | None,
        feed_forward: FeedForward,
        state_space: StateSpace | None = None,
        gates: int = 0,
    ) -> Layer:
        """Put a layer together, with a router for its experts that has *gates* more parameters than their weights."""
        router = feed_forward.experts * self.hidden + gates
        return Layer(attention, state_space, feed_forward, self.vectors(attention), router)


def _dense(read: Reader, index: int) -> Layer:
    return read.layer(read.attention(index), FeedForward(read.count("intermediate_size")))


def _mixtral(read: Reader, index: int) -> Layer:
    return read.layer(read.attention(index), read.mixture(read.count("intermediate_size")))


def _qwen_moe(read: Reader, index: int) -> Layer:
    feed_forward, gates = _qwen_experts(read, index)
    return read.layer(read.attention(index), feed_forward, gates=gates)


def _qwen_experts(read: Reader, index: int) -> tuple[FeedForward, int]:
    sparse = index not in (read.config.get("mlp_only_layers") or ())
    if not (sparse and read.experts() and (index + 1) % read.count("decoder_sparse_step", 1) == 0):
        return FeedForward(read.count("intermediate_size")), 0
    shared = read.count("shared_expert_intermediate_size", 0)
    # The shared expert has a gate of its own.
    return read.mixture(read.count("moe_intermediate_size"), shared), read.hidden if shared else 0


def _deepseek(read: Reader, index: int) -> Layer:
    attention = LatentAttention(
        heads=read.count("num_attention_heads"),
        query_rank=read.config.get("q_lora_rank"),
        kv_rank=read.count("kv_lora_rank"),
        rope_size=read.count("qk_rope_head_dim"),
        nope_size=read.count("qk_nope_head_dim"),
        value_size=read.count("v_head_dim"),
    )
    experts = read.experts()
    if not experts or index < read.count("first_k_dense_replace", 0) or index % read.count("moe_layer_freq", 1):
        return read.layer(attention, FeedForward(read.count("intermediate_size")))
    width = read.count("moe_intermediate_size")
    shared = width * read.count("n_shared_experts", 0)
    bias = experts if read.config.get("topk_method") == "noaux_tc" else 0
    return read.layer(attention, read.mixture(width, shared), gates=bias)


def _qwen_next(read: Reader, index: int) -> Layer:
    kind = read.kind(index)
    linear = kind == "linear_attention" if kind else (index + 1) % read.count("full_attention_interval", 4) != 0
    feed_forward, gates = _qwen_experts(read, index)
    if not linear:
        return read.layer(read.attention(index, gated=True), feed_forward, gates=gates)
    return read.layer(None, feed_forward, _gated_delta_net(read), gates)


def _gated_delta_net(read: Reader) -> StateSpace:
    keys, key_size = read.count("linear_num_key_heads"), read.count("linear_key_head_dim")
    values, value_size = read.count("linear_num_value_heads"), read.count("linear_value_head_dim")
    kernel, inner = read.count("linear_conv_kernel_dim"), values * value_size
    channels = inner + 2 * keys * key_size
    return StateSpace(
        form="gated delta net",
        inner=inner,
        groups=keys,
        group_width=2 * key_size,
        kernel=kernel,
        heads=values,
        values_per_head=value_size * key_size,
        projections=((read.hidden, channels + inner), (read.hidden, 2 * values), (inner, read.hidden)),
        vectors=channels * kernel + 2 * values + value_size,
    )


def _granite_hybrid(read: Reader, index: int) -> Layer:
    feed_forward = FeedForward(read.count("shared_intermediate_size"))
    if read.experts():
        feed_forward = read.mixture(read.count("intermediate_size"), feed_forward.width)
    if read.kind(index) == "attention":
        return read.layer(read.attention(index), feed_forward)
    inner = read.count("mamba_expand", 2) * read.hidden
    return read.layer(None, feed_forward, _mamba2(read, inner, gate_norm=True))


def _falcon_hybrid(read: Reader, index: int) -> Layer:
    inner = read.count("mamba_d_ssm", read.count("mamba_expand", 2) * read.hidden)
    state_space = _mamba2(read, inner, gate_norm=bool(read.config.get("mamba_rms_norm")))
    return read.layer(read.attention(index), FeedForward(read.count("intermediate_size")), state_space)


def _mamba2(read: Reader, inner: int, *, gate_norm: bool) -> StateSpace:
    heads, groups, state = read.count("mamba_n_heads"), read.count("mamba_n_groups"), read.count("mamba_d_state")
    kernel, channels = read.count("mamba_d_conv"), inner + 2 * groups * state
    bias = channels if read.config.get("mamba_conv_bias", True) else 0
    return StateSpace(
        form="mamba2",
        inner=inner,
        groups=groups,
        group_width=2 * state,
        kernel=kernel,
        heads=heads,
        values_per_head=read.count("mamba_d_head", inner // heads) * state,
        projections=((read.hidden, inner + channels + heads), (inner, read.hidden)),
        vectors=channels * kernel + bias + 3 * heads + (inner if gate_norm else 0),
    )


def _jamba(read: Reader, index: int) -> Layer:
    feed_forward, experts = FeedForward(read.count("intermediate_size")), read.experts()
    if experts > 1 and index % read.count("expert_layer_period", 2) == read.count("expert_layer_offset", 1):
        feed_forward = FeedForward(0, experts, read.count("num_experts_per_tok", 2), feed_forward.width)
    if index % read.count("attn_layer_period", 8) == read.count("attn_layer_offset", 4):
        return read.layer(read.attention(index), feed_forward)
    return read.layer(None, feed_forward, _mamba(read))


def _mamba(read: Reader) -> StateSpace:
    inner, state = read.count("mamba_expand", 2) * read.hidden, read.count("mamba_d_state", 16)
    kernel, rank = read.count("mamba_d_conv", 4), read.config.get("mamba_dt_rank", "auto")
    rank = math.ceil(read.hidden / 16) if rank == "auto" else read.count("mamba_dt_rank")
    # The step's bias, A, D, the convolution with its bias, and norms of the step, B and C.
    vectors = inner + inner * state + inner + inner * (kernel + 1) + rank + 2 * state
    return StateSpace(
        form="mamba",
        inner=inner,
        groups=0,
        group_width=0,
        kernel=kernel,
        heads=inner,
        values_per_head=state,
        projections=((read.hidden, 2 * inner), (inner, rank + 2 * state), (rank, inner), (inner, read.hidden)),
        vectors=vectors,
    )


FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(_dense),
    "mistral": Family(_dense, window=4096),
    "qwen2": Family(_dense, qkv_bias=True, windows_last=True),
    "qwen3": Family(_dense, head_norms=True, windows_last=True),
    "gemma": Family(_dense, tied=True),
    "gemma2": Family(_dense, norms=4, window=4096, full_every=2, tied=True),
    "gemma3_text": Family(_dense, norms=4, head_norms=True, window=4096, full_every=6, tied=True),
    "phi3": Family(_dense),
    "granite": Family(_dense),
    "smollm3": Family(_dense),
    "olmo2": Family(_dense, wide_norms=True),
    "olmo3": Family(_dense, wide_norms=True, window=4096, full_every=4),
    "exaone4": Family(_dense, head_norms=True, window=4096, full_every=4),
    "mixtral": Family(_mixtral),
    "qwen2_moe": Family(_qwen_moe, qkv_bias=True, windows_last=True),
    "qwen3_moe": Family(_qwen_moe, head_norms=True, windows_last=True),
    "deepseek_v2": Family(_deepseek),
    "deepseek_v3": Family(_deepseek),
    "qwen3_next": Family(_qwen_next, head_norms=True, windows_last=True),
    "qwen3_5_text": Family(_qwen_next, head_norms=True, windows_last=True),
    "qwen3_5_moe_text": Family(_qwen_next, head_norms=True, windows_last=True),
    "granitemoehybrid": Family(_granite_hybrid),
    "falcon_h1": Family(_falcon_hybrid),
    "jamba": Family(_jamba),
}
"""The families by the ``model_type`` of config.json. To add one, write its function and a line here."""
