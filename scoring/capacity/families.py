"""Reads the architecture of a model from its config.json, for the families whose sizes are known.

The field names and defaults are those of Transformers' configuration classes, and which layers have a window or a state
follows vLLM's model files. A model of another type is refused, because a guess could be silently wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from scoring.capacity.architecture import (
    Architecture,
    Attention,
    FeedForward,
    LatentAttention,
    Layer,
    NotSizeable,
    StateSpace,
)
from scoring.capacity.reader import CHUNKED, Config, Family, Reader

BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value by the type that config.json names."""
STATE_TYPES: Final = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
"""Fields that name the type of a recurrent state."""


def read_architecture(config: Config) -> Architecture:
    """Read the architecture that a config.json describes; the text model's, if it has parts for images or sound. Raise
    NotSizeable if the family is not known, or a field is missing or has an unusable value; the message names it."""
    whole = str(config.get("model_type", ""))
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise NotSizeable("text_config is not an object")
    name = str(text.get("model_type", whole))
    name = name if name in FAMILIES else f"{name}_text"  # published before images had a configuration of their own
    if name not in FAMILIES:
        named = text.get("model_type", whole) or "unknown"
        raise NotSizeable(f"model type {named!r}: its layers are not known (known: {', '.join(FAMILIES)})")
    family = FAMILIES[name]
    reader = Reader(text, name, family)
    # What encloses the text model decides, because both embedding and head are its own.
    tied = [each["tie_word_embeddings"] for each in (config, reader.config) if "tie_word_embeddings" in each]
    try:
        layers = tuple(family.layer(reader, index) for index in range(reader.layers()))
        return Architecture(
            model_type=name,
            hidden=reader.hidden,
            vocabulary=reader.count("vocab_size"),
            tied=bool(tied and tied[0]),
            longest_context=reader.count("max_position_embeddings"),
            layers=layers,
            recurrent_bytes=next((BYTES[kind] for kind in map(reader.config.get, STATE_TYPES) if kind in BYTES), None),
            tables=family.tables(reader),
            outside=reader.outside(),
        )
    except (TypeError, AttributeError, IndexError, KeyError, ZeroDivisionError) as error:
        raise NotSizeable(f"a field of config.json of type {name} has an unusable value ({error})") from error


QUERIES_ONLY: Final = ("attention_bias", "", "")
EVERYWHERE: Final = ("use_bias", "use_bias", "use_bias")
"""Fields that say where biases are: only on queries, keys and values, or on all of a layer's projections."""
STATE: Final = (
    "mamba_n_heads",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_conv_bias",
    "mamba_proj_bias",
)
NEMOTRON_STATE: Final = ("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias")
"""Fields with the heads, groups, state and kernel of Mamba-2, and whether convolution and projections have biases."""


def _dense(read: Reader, index: int) -> Layer:
    return read.layer(read.attention(index), read.dense(), vectors=read.family.activation)


def _mixtral(read: Reader, index: int) -> Layer:
    shared = read.count("shared_intermediate_size", 0)
    return read.layer(read.attention(index), read.mixture(read.count("intermediate_size"), shared))


def _gpt_oss(read: Reader, index: int) -> Layer:
    attention, experts = read.attention(index), read.mixture(read.count("intermediate_size"))
    # The router and each projection of an expert have biases, and each head has a sink.
    biases = experts.experts * (2 * experts.expert_width + read.hidden)
    return read.layer(attention, experts, gates=experts.experts, vectors=attention.heads + biases)


def _llama4(read: Reader, index: int) -> Layer:
    attention = read.attention(index)
    rotated, interval = read.config.get("no_rope_layers"), read.count("no_rope_layer_interval", 4)
    local = bool(rotated[index]) if rotated else (index + 1) % interval != 0
    if read.kind(index) in ("", CHUNKED) and local and read.config.get("attention_chunk_size"):
        attention = replace(attention, window=read.count("attention_chunk_size"), chunked=True)
    sparse = read.config.get("moe_layers")
    if index in sparse if sparse is not None else (index + 1) % read.count("interleave_moe_layer_step", 1) == 0:
        width = read.count("intermediate_size")
        return read.layer(attention, read.mixture(width, width))
    return read.layer(attention, read.dense("intermediate_size_mlp"))


def _cohere(read: Reader, index: int) -> Layer:
    attention = read.attention(index)
    norms = attention.heads + attention.kv_heads if read.config.get("use_qk_norm") else 0
    return read.layer(attention, read.dense(), vectors=norms * attention.head_size)


def _ernie_moe(read: Reader, index: int) -> Layer:
    attention, last = read.attention(index), read.config.get("moe_layer_end_index", -1)
    sparse = read.count("moe_layer_start_index") <= index and (last < 0 or index <= last)
    if not sparse or (index + 1) % read.count("moe_layer_interval", 1):
        return read.layer(attention, read.dense())
    width = read.count("moe_intermediate_size")
    return read.layer(attention, read.mixture(width, width * read.count("moe_num_shared_experts", 0)))


def _glm_moe(read: Reader, index: int) -> Layer:
    attention = read.attention(index)
    norms = 2 * attention.head_size if read.config.get("use_qk_norm") else 0
    return read.layer(attention, _deepseek_experts(read, index), vectors=norms)


def _hunyuan_moe(read: Reader, index: int) -> Layer:
    width, active = read.count("intermediate_size"), read.config.get("moe_topk")
    experts = read.mixture(width, width, active=active[index] if isinstance(active, list) else None)
    return read.layer(read.attention(index), experts)


def _qwen_moe(read: Reader, index: int) -> Layer:
    feed_forward, gates = _qwen_experts(read, index)
    return read.layer(read.attention(index), feed_forward, gates=gates)


def _qwen_experts(read: Reader, index: int) -> tuple[FeedForward, int]:
    sparse = index not in (read.config.get("mlp_only_layers") or ())
    if not (sparse and read.experts() and (index + 1) % read.count("decoder_sparse_step", 1) == 0):
        return read.dense(), 0
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
    return read.layer(attention, _deepseek_experts(read, index))


def _deepseek_experts(read: Reader, index: int) -> FeedForward:
    sparse = index >= read.count("first_k_dense_replace", 0) and index % read.count("moe_layer_freq", 1) == 0
    if listed := read.config.get("mlp_layer_types"):
        sparse = listed[index] == "sparse"
    if not (read.experts() and sparse):
        return read.dense()
    width = read.count("moe_intermediate_size")
    return read.mixture(width, width * read.count("n_shared_experts", 0))


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
    if read.kind(index) == "full_attention":
        return read.layer(read.attention(index), feed_forward)
    inner = read.count("mamba_expand", 2) * read.hidden
    return read.layer(None, feed_forward, _mamba2(read, inner, STATE, gate_norm=True))


def _falcon_hybrid(read: Reader, index: int) -> Layer:
    inner = read.count("mamba_d_ssm", read.count("mamba_expand", 2) * read.hidden)
    state_space = _mamba2(read, inner, STATE, gate_norm=bool(read.config.get("mamba_rms_norm")))
    return read.layer(read.attention(index), FeedForward(read.count("intermediate_size")), state_space)


def _mamba2(read: Reader, inner: int, fields: tuple[str, ...], *, gate_norm: bool) -> StateSpace:
    heads, groups, state, kernel = map(read.count, fields[:4])
    convolution_bias, projection_bias = map(read.config.get, fields[4:])
    channels = inner + 2 * groups * state
    vectors = channels * (kernel + bool(convolution_bias)) + 3 * heads + (inner if gate_norm else 0)
    if projection_bias:
        vectors += inner + channels + heads + read.hidden
    return StateSpace(
        form="mamba2",
        inner=inner,
        groups=groups,
        group_width=2 * state,
        kernel=kernel,
        heads=heads,
        values_per_head=inner // heads * state,
        projections=((read.hidden, inner + channels + heads), (inner, read.hidden)),
        vectors=vectors,
    )


def _nemotron_hybrid(read: Reader, index: int) -> Layer:
    nothing = FeedForward()
    match read.kind(index):
        case "mlp":
            return read.layer(None, read.dense())
        case "full_attention":
            return read.layer(read.attention(index), nothing)
        case "moe":
            shared, latent = read.count("moe_shared_expert_intermediate_size"), read.count("moe_latent_size", 0)
            experts = read.mixture(read.count("moe_intermediate_size"), shared, latent or None)
            biases = latent + read.hidden if latent and read.config.get("mlp_bias") else 0
            return read.layer(None, experts, vectors=2 * latent * read.hidden + biases)
    inner = read.count("mamba_num_heads") * read.count("mamba_head_dim")
    return read.layer(None, nothing, _mamba2(read, inner, NEMOTRON_STATE, gate_norm=True))


def _lfm2(read: Reader, index: int) -> Layer:
    width = read.first(("block_ff_dim", "intermediate_size"))
    if read.config.get("block_auto_adjust_ff_dim"):
        width = 2 * width // 3
        if (factor := read.config.get("block_ffn_dim_multiplier")) is not None:
            multiple = read.count("block_multiple_of")
            width = math.ceil(int(factor * width) / multiple) * multiple
    return _convolved(read, index, FeedForward(width))


def _lfm2_moe(read: Reader, index: int) -> Layer:
    if index < read.count("num_dense_layers"):
        return _convolved(read, index, read.dense())
    return _convolved(read, index, read.mixture(read.count("moe_intermediate_size")))


def _convolved(read: Reader, index: int, feed_forward: FeedForward) -> Layer:
    """Make a layer with attention, or with a short convolution in its place."""
    attending = read.config.get("full_attn_idxs")
    kind = read.kind(index)
    if kind == "full_attention" or (not kind and (attending is None or index in attending)):
        return read.layer(read.attention(index), feed_forward)
    kernel, hidden = read.count("conv_L_cache"), read.hidden
    convolution = StateSpace(
        form="short convolution",
        inner=hidden,
        kernel=kernel,
        projections=((hidden, 3 * hidden), (hidden, hidden)),
        vectors=hidden * (kernel + (5 if read.config.get("conv_bias") else 0)),
    )
    return read.layer(None, feed_forward, convolution)


def _gemma3n(read: Reader, index: int) -> Layer:
    attention = _sharing(read, index, read.attention(index))
    widths, hidden = read.config.get("intermediate_size"), read.hidden
    feed_forward = FeedForward(widths[index]) if isinstance(widths, list) else read.dense()
    inputs, low_rank = read.count("altup_num_inputs"), read.count("laurel_rank")
    # AltUp's router, coefficients, norm and scale; the low-rank residual and its norm; the input of this layer alone.
    predictions = inputs * hidden + inputs**2 + inputs**3 + 2 * hidden
    own = 2 * low_rank * hidden + hidden + 2 * read.count("hidden_size_per_layer_input") * hidden + hidden
    return read.layer(attention, feed_forward, vectors=predictions + own)


def _gemma4(read: Reader, index: int) -> Layer:
    attention, hidden = read.attention(index), read.hidden
    if attention.window is None:
        attention = _wider(read, index, attention)
    attention = _sharing(read, index, attention)
    feed_forward, norms = read.dense(), 0
    if attention.projections == 0 and read.config.get("use_double_wide_mlp"):
        feed_forward = replace(feed_forward, width=2 * feed_forward.width)
    if read.config.get("enable_moe_block"):
        feed_forward = read.mixture(read.count("moe_intermediate_size"), feed_forward.width)
        # Three more norms, and a scale for the router's input and for each expert.
        norms = 4 * hidden + feed_forward.experts
    inputs = read.count("hidden_size_per_layer_input", 0)
    own = 2 * inputs * hidden + hidden if inputs else 0
    return read.layer(attention, feed_forward, vectors=norms + own + 1)


def _wider(read: Reader, index: int, attention: Attention) -> Attention:
    """Give full attention the heads that it has in Gemma 4, where they are wider and fewer than with a window."""
    same, listed = bool(read.config.get("attention_k_eq_v")), read.config.get("per_layer_config")
    if listed is None:
        own = {"head_dim": read.count("global_head_dim", 512)}
        if same:
            own["num_key_value_heads"] = read.count("num_global_key_value_heads", attention.kv_heads)
    else:  # as Transformers 5 writes it, with the indices as texts
        own = {int(layer): fields for layer, fields in listed.items()}.get(index, {})
    heads, size = own.get("num_key_value_heads", attention.kv_heads), own.get("head_dim", attention.head_size)
    return replace(attention, kv_heads=heads, head_size=size, projections=1 if same else 2)


def _sharing(read: Reader, index: int, attention: Attention) -> Attention:
    """Let the last layers read the keys and values of earlier ones."""
    first = read.layers() - read.count("num_kv_shared_layers", 0)
    return replace(attention, projections=0) if index >= first else attention


def _inputs_per_layer(read: Reader) -> int:
    """Count the parameters of the embedding that gives each layer an input of its own."""
    width = read.layers() * read.count("hidden_size_per_layer_input", 0)
    return width * read.count("vocab_size_per_layer_input") if width else 0


def _projected_inputs(read: Reader) -> int:
    """Count the parameters that make each layer's own input from the hidden state, and Gemma 3n's between streams."""
    inputs = read.count("hidden_size_per_layer_input", 0)
    streams = max(0, read.count("altup_num_inputs", 1) - 1)
    return inputs * (read.layers() * read.hidden + 1) + 2 * streams * read.hidden**2


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
    vectors = inner * (2 + state + kernel + bool(read.config.get("mamba_conv_bias", True))) + rank + 2 * state
    return StateSpace(
        form="mamba",
        inner=inner,
        kernel=kernel,
        heads=inner,
        values_per_head=state,
        projections=((read.hidden, 2 * inner), (inner, rank + 2 * state), (rank, inner), (inner, read.hidden)),
        vectors=vectors,
    )


FAMILIES: Final[dict[str, Family]] = {
    **dict.fromkeys(("llama", "mistral", "ministral3"), Family(_dense)),
    **dict.fromkeys(("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"), Family(_dense, qkv_bias=True)),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), Family(_dense, head_norms=True)),
    "gemma": Family(_dense),
    "gemma2": Family(_dense, norms=4, full_every=2),
    "gemma3_text": Family(_dense, norms=4, head_norms=True, full_every=6),
    "gemma3n_text": Family(
        _gemma3n, norms=4, head_norms=True, full_every=5, tables=_inputs_per_layer, outside=_projected_inputs
    ),
    "gemma4_text": Family(
        _gemma4, norms=4, head_norms=True, full_every=6, tables=_inputs_per_layer, outside=_projected_inputs
    ),
    **dict.fromkeys(("phi3", "granite", "smollm3"), Family(_dense)),
    "seed_oss": Family(_dense, bias_fields=("attention_bias", "attention_out_bias", "mlp_bias")),
    "olmo2": Family(_dense, wide_norms=True),
    "olmo3": Family(_dense, wide_norms=True, full_every=4),
    "exaone4": Family(_dense, head_norms=True, full_every=4),
    "glm": Family(_dense, bias_fields=QUERIES_ONLY),
    "glm4": Family(_dense, norms=4, bias_fields=QUERIES_ONLY),
    "cohere": Family(_cohere, norms=1),
    "cohere2": Family(_cohere, norms=1, full_every=4),
    "starcoder2": Family(_dense, biased_norms=True, gated=False, bias_fields=EVERYWHERE),
    "nemotron": Family(_dense, biased_norms=True, gated=False),
    "arcee": Family(_dense, gated=False),
    "apertus": Family(_dense, head_norms=True, gated=False, activation=4),
    "ernie4_5": Family(_dense, bias_fields=EVERYWHERE),
    "hunyuan_v1_dense": Family(_dense, head_norms=True),
    "mixtral": Family(_mixtral),
    "phimoe": Family(_mixtral, biased_norms=True),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), Family(_mixtral)),
    "olmoe": Family(_mixtral, wide_norms=True),
    "minimax_m2": Family(_mixtral, wide_norms=True, balanced=True),
    "gpt_oss": Family(_gpt_oss, full_every=2),
    "llama4_text": Family(_llama4),
    "qwen2_moe": Family(_qwen_moe, bias_fields=("qkv_bias", "", "")),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text"), Family(_qwen_moe, head_norms=True)),
    "deepseek_v2": Family(_deepseek),
    "deepseek_v3": Family(_deepseek, balanced=True),
    "glm4_moe": Family(_glm_moe, balanced=True, bias_fields=QUERIES_ONLY),
    "glm4_moe_lite": Family(_deepseek, balanced=True),
    "ernie4_5_moe": Family(_ernie_moe, balanced=True, bias_fields=EVERYWHERE, head_bias_field="use_bias"),
    "hunyuan_v1_moe": Family(_hunyuan_moe, head_norms=True),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), Family(_qwen_next, head_norms=True)),
    "granitemoehybrid": Family(_granite_hybrid),
    "falcon_h1": Family(_falcon_hybrid),
    "nemotron_h": Family(_nemotron_hybrid, norms=1, gated=False, balanced=True, bias_fields=("", "", "mlp_bias")),
    "jamba": Family(_jamba),
    "lfm2": Family(_lfm2, head_norms=True),
    "lfm2_moe": Family(_lfm2_moe, head_norms=True, balanced=True),
}
"""The families by the ``model_type`` of config.json. To add one, write its function and a line here; its defaults are
written by ``python -m tests.scoring.transformers_defaults``."""
