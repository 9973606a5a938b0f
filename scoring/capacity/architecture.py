"""The shape of a decoder-only language model: what each layer computes with and what it keeps per sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["attention", "mlp", "experts", "state space"]


class NotSizeable(ValueError):
    """The model has a part whose size can't be calculated; the message names it."""


@dataclass(frozen=True)
class Matrix:
    """Weights of a linear layer that are multiplied with each token: ``count`` matrices of *outputs* × *inputs*."""

    kind: Kind
    inputs: int
    outputs: int
    split: Literal["columns", "rows", "none"]
    """How tensor parallelism divides it: by outputs, by inputs, or not at all (each GPU has all of it)."""
    count: int = 1
    """The experts of a layer are that many equal matrices."""
    tensors: int = 1
    """How many tensors a checkpoint stores it as: 3 for queries, keys and values, 2 for the gate and up projections."""
    quantizable: bool = True
    """Whether vLLM has a quantized form of this layer."""

    @property
    def parameters(self) -> int:
        return self.count * self.inputs * self.outputs


@dataclass(frozen=True)
class Attention:
    """Multi-head, grouped-query or multi-query attention with separate keys and values."""

    heads: int
    kv_heads: int
    head_size: int
    window: int | None = None
    """Tokens that a sliding window reaches back; None: all."""
    chunked: bool = False
    """Whether the window begins at a multiple of its length, and does not slide."""
    gated: bool = False
    """Whether the query projection also makes a gate for the output, as wide as the queries."""
    projections: Literal[0, 1, 2] = 2
    """Projections for keys and values: 1 if the keys are the values too; 0 if an earlier layer's cache is read."""

    def values_per_token(self, tensor_parallel_size: int) -> int:
        """Count the values of one token that this layer caches on one GPU: a key and a value for each of its KV heads,
        at least one; none if it reads an earlier layer's."""
        return 2 * max(1, self.kv_heads // tensor_parallel_size) * self.head_size if self.projections else 0

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        queries = self.heads * self.head_size
        fused = queries * (2 if self.gated else 1) + self.projections * self.kv_heads * self.head_size
        return (
            Matrix("attention", hidden, fused, "columns", tensors=1 + self.projections),
            Matrix("attention", queries, hidden, "rows"),
        )


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA): one compressed vector per token for all heads (DeepSeek-V2, section 2.1)."""

    heads: int
    query_rank: int | None
    kv_rank: int
    rope_size: int
    nope_size: int
    value_size: int
    window: None = None
    chunked: Literal[False] = False

    def values_per_token(self, tensor_parallel_size: int) -> int:
        """Count the cached values of one token: the latent vector and the rotary key, complete on each GPU."""
        del tensor_parallel_size
        return self.kv_rank + self.rope_size

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        queries = self.heads * (self.nope_size + self.rope_size)
        down = (Matrix("attention", hidden, self.query_rank, "none"),) if self.query_rank else ()
        return (
            *down,
            Matrix("attention", self.query_rank or hidden, queries, "columns"),
            Matrix("attention", hidden, self.kv_rank + self.rope_size, "none"),
            Matrix("attention", self.kv_rank, self.heads * (self.nope_size + self.value_size), "columns"),
            Matrix("attention", self.heads * self.value_size, hidden, "rows"),
        )


@dataclass(frozen=True)
class StateSpace:
    """A state-space or linear-attention layer, whose state has the same size for any length of the sequence."""

    form: Literal["mamba", "mamba2", "gated delta net", "short convolution"]
    inner: int
    """Channels of the convolution apart from the groups."""
    kernel: int
    """Taps of the convolution; the state keeps one input fewer."""
    projections: tuple[tuple[int, int], ...]
    """Inputs and outputs of each linear layer."""
    vectors: int
    """Further parameters: convolution, norms and biases."""
    groups: int = 0
    group_width: int = 0
    """Channels of the convolution per group: B and C of Mamba-2, queries and keys of linear attention."""
    heads: int = 0
    values_per_head: int = 0
    """Values of the recurrent state per head."""

    def state_bytes(self, tensor_parallel_size: int, convolution_bytes: int, recurrent_bytes: int) -> int:
        """Bytes of one sequence's state on one GPU, as vLLM's ``MambaStateShapeCalculator`` shapes it: a value takes
        *convolution_bytes* in the state of the convolution and *recurrent_bytes* in the recurrent state."""
        groups = self.groups
        if self.form == "mamba2" and groups % tensor_parallel_size:
            groups = tensor_parallel_size  # each GPU has a copy of the only group
        channels = (self.inner + groups * self.group_width) // tensor_parallel_size
        recurrent = self.heads // tensor_parallel_size * self.values_per_head
        return channels * (self.kernel - 1) * convolution_bytes + recurrent * recurrent_bytes

    def divides(self, tensor_parallel_size: int) -> bool:
        groups = self.groups % tensor_parallel_size == 0 or (self.form == "mamba2" and self.groups == 1)
        return groups and not (self.heads % tensor_parallel_size or self.inner % tensor_parallel_size)

    def matrices(self) -> tuple[Matrix, ...]:
        quantizable = self.form != "mamba"  # vLLM has no quantized form of the first Mamba
        return tuple(
            Matrix("state space", inputs, outputs, "columns", quantizable=quantizable)
            for inputs, outputs in self.projections
        )


@dataclass(frozen=True)
class FeedForward:
    """An MLP, a mixture of experts, or both; each has an up and a down projection, and most have a gate."""

    width: int = 0
    """Width of the MLP that every token passes, shared experts included; 0: none."""
    experts: int = 0
    active: int = 0
    """Experts that one token passes."""
    expert_width: int = 0
    gated: bool = True
    expert_inputs: int | None = None
    """Values of a token that the experts get; None: its hidden state."""

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        matrices: list[Matrix] = []
        tensors = 2 if self.gated else 1
        if self.width:
            matrices += [
                Matrix("mlp", hidden, tensors * self.width, "columns", tensors=tensors),
                Matrix("mlp", self.width, hidden, "rows"),
            ]
        if self.experts:
            inputs = self.expert_inputs or hidden
            matrices += [
                Matrix("experts", inputs, tensors * self.expert_width, "columns", self.experts, tensors=tensors),
                Matrix("experts", self.expert_width, inputs, "rows", self.experts),
            ]
        return tuple(matrices)


@dataclass(frozen=True)
class Layer:
    """A decoder layer. A few models have attention and a state-space part side by side in one layer, and others one
    part alone."""

    attention: Attention | LatentAttention | None
    state_space: StateSpace | None
    feed_forward: FeedForward
    vectors: int
    """Norms and biases."""
    router: int = 0
    """Parameters that choose the experts."""

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        attention = self.attention.matrices(hidden) if self.attention else ()
        state_space = self.state_space.matrices() if self.state_space else ()
        return attention + state_space + self.feed_forward.matrices(hidden)


@dataclass(frozen=True)
class Architecture:
    """A model's layers and vocabulary."""

    model_type: str
    hidden: int
    vocabulary: int
    tied: bool
    """Whether the output head is the embedding."""
    longest_context: int
    """Tokens of prompt and answer together that the model was made for."""
    layers: tuple[Layer, ...]
    recurrent_bytes: int | None = None
    """Bytes of a value in the recurrent state if the model prescribes them; None: as the model's own type."""
    tables: int = 0
    """Parameters of further embeddings, of which a token looks up a row."""
    outside: int = 0
    """Parameters that are in no layer, besides embeddings and output head: the last norm, and projections."""
    other: int = 0
    """Parameters in the checkpoint that config.json does not describe: for images or sound, or for speculation."""
    kv_value_bytes: int | None = None
    """Bytes of a stored key or value; None: as of those that are computed."""

    @cached_property
    def counted(self) -> Mapping[Layer, int]:
        """The different layers, and how many there are of each."""
        return Counter(self.layers)

    @property
    def latent(self) -> bool:
        """Whether it has latent attention, for which vLLM has kernels of their own."""
        return any(isinstance(layer.attention, LatentAttention) for layer in self.counted)

    def kv_bytes(self, tokens: int, tensor_parallel_size: int = 1) -> int:
        """Bytes of one sequence's keys and values on one GPU, as they are stored: windows keep at most their length."""
        return (self.kv_value_bytes or 2) * sum(
            count * min(tokens, part.window or tokens) * part.values_per_token(tensor_parallel_size)
            for layer, count in self.counted.items()
            if (part := layer.attention)
        )

    def state_bytes(self, tensor_parallel_size: int = 1, recurrent_bytes: int = 2) -> int:
        """Bytes of one sequence's state on one GPU, in 16 bits but for the recurrent one."""
        return sum(
            count * layer.state_space.state_bytes(tensor_parallel_size, 2, recurrent_bytes)
            for layer, count in self.counted.items()
            if layer.state_space
        )
