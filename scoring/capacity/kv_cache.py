"""How many tokens vLLM's KV cache holds, and the longest context for which it starts.

vLLM (0.32; ``vllm/v1/core/kv_cache_utils.py``) divides the memory for the cache into blocks that all layers of a
*group* share. Layers of one kind make one group. In a model with several kinds the groups have equally many layers, so
that a block has the same size for each group, and one pool of blocks serves all of them; where a token of one kind has
fewer bytes, a block has more tokens of it. A sequence takes blocks of each group: for all of its tokens in full
attention, for a window and the tokens in flight with windows, and a fixed number in state-space layers. Layers that
read the cache of an earlier one take none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from scoring.capacity.architecture import Architecture, NotSizeable

PADDED_GROUPS: Final = 1.5
"""Groups have the size of the kind with most layers if it has less than this many times those of the smallest."""
STATE_BLOCKS: Final = {"mamba": 2, "mamba2": 3, "gated delta net": 2, "short convolution": 2}
"""Blocks of state per sequence with prefix caching, vLLM's default: the current state and the last at the end of a
block; Mamba-2 keeps one more during a prefill."""


@dataclass(frozen=True)
class CacheRules:
    """What decides the cache besides the model."""

    block_tokens: int
    """Tokens of a block before a hybrid model enlarges it."""
    tokens_in_flight: int
    """Tokens that may be computed and not yet settled: the batch's limit times the batches at a time."""
    tensor_parallel_size: int = 1
    value_bytes: int = 2
    recurrent_bytes: int | None = None
    """Bytes of a value in a recurrent state. None: as the model says, or else as ``value_bytes``."""


@dataclass(frozen=True)
class _Kind:
    """What decides whether layers can be in one group."""

    window: int | None = None
    chunked: bool = False
    state_blocks: int = 0
    """0: attention."""
    block_tokens: int = 0
    """Tokens of a block; 0 for a state."""


@dataclass(frozen=True)
class CacheLayout:
    """The groups of one model's layers, as vLLM makes them."""

    block_tokens: int
    block_bytes: int
    """Bytes of one block in the memory of each GPU."""
    groups: tuple[_Kind, ...]
    tokens_in_flight: int
    longest_context: int

    def blocks(self, tokens: int) -> int:
        """Count the blocks that a sequence of that many tokens takes at most, from all groups together."""
        return sum(self._blocks(group, tokens) for group in self.groups)

    def _blocks(self, group: _Kind, tokens: int) -> int:
        if group.state_blocks:
            return group.state_blocks
        if group.window is None:
            return _divided_up(tokens, group.block_tokens)
        if group.chunked:
            return _divided_up(min(group.window + self.tokens_in_flight, tokens), group.block_tokens)
        # A window may begin in the middle of a block, hence one more.
        return _divided_up(min(group.window - 1 + self.tokens_in_flight, tokens), group.block_tokens) + 1

    def capacity_blocks(self, available_bytes: int) -> int:
        return max(0, available_bytes) // self.block_bytes

    def tokens(self, available_bytes: int, max_model_len: int) -> int:
        """Compute the KV cache's size in tokens as vLLM logs it: what sequences of *max_model_len* tokens can fill."""
        # The same two steps in floating point as vLLM's get_kv_cache_capacity, because it rounds down at the end.
        sequences = self.capacity_blocks(available_bytes) / self.blocks(max_model_len)
        return int(sequences * max_model_len)

    def sequences(self, available_bytes: int, tokens: int) -> int:
        """Count the sequences of that many tokens that the cache holds at once; vLLM keeps one block for itself."""
        return max(0, self.capacity_blocks(available_bytes) - 1) // self.blocks(tokens)

    def longest(self, available_bytes: int) -> int:
        """Find the longest max_model_len for which vLLM starts; 0 if there is none, at most the model's own."""
        return largest(0, self.longest_context, lambda tokens: self.sequences(available_bytes, tokens) > 0)


def largest(low: int, high: int, meets: Callable[[int], bool]) -> int:
    """Find the largest number up to *high* that *meets* a limit, as all smaller ones do; *low* if none does."""
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda value: not meets(value))


def cache_layout(model: Architecture, rules: CacheRules) -> CacheLayout:
    """Compute the groups and blocks of a model's cache. Raise NotSizeable if layers of one kind, or of a model with
    states, need different numbers of bytes per token, or none of them has attention."""
    size = rules.tensor_parallel_size
    attentions = {layer.attention for layer in model.counted if layer.attention}
    widths = {part.values_per_token(size) for part in attentions} - {0}
    states = [layer.state_space for layer in model.counted if layer.state_space]
    unlike = len(widths) > 1 and (bool(states) or len({part.window for part in attentions}) != len(widths))
    if unlike or not widths:
        obstacle = "different KV widths" if widths else "no attention in any layer"
        raise NotSizeable(f"type {model.model_type} with {obstacle}")
    token_bytes = max(widths) * (model.kv_value_bytes or rules.value_bytes)
    block_tokens = rules.block_tokens
    recurrent_bytes = rules.recurrent_bytes or model.recurrent_bytes or rules.value_bytes
    if states:
        state_bytes = max(state.state_bytes(size, rules.value_bytes, recurrent_bytes) for state in states)
        # A block of attention must not be smaller than a state, which is then padded to it.
        aligned = max(block_tokens, 128) if model.latent else block_tokens
        block_tokens = max(block_tokens, aligned * _divided_up(state_bytes, aligned * token_bytes))
    # A block of narrower layers has a multiple of the tokens, or else is padded.
    tokens = {width: block_tokens * (max(widths) // width if max(widths) % width == 0 else 1) for width in widths}
    kinds = _kinds(model, size, tokens)
    groups = _groups(kinds)
    widest = max(_divided_up(layers, groups[kind]) for kind, layers in kinds.items())
    return CacheLayout(
        block_tokens=block_tokens,
        block_bytes=widest * block_tokens * token_bytes,
        groups=tuple(groups.elements()),
        tokens_in_flight=rules.tokens_in_flight,
        longest_context=model.longest_context,
    )


def _kinds(model: Architecture, size: int, tokens: Mapping[int, int]) -> Counter[_Kind]:
    """Count the layers of each kind, in the order of the first; a parallel hybrid layer is of two. *tokens* are those
    of a block by the values that a token has on one of *size* GPUs."""
    kinds: Counter[_Kind] = Counter()
    for layer, count in model.counted.items():
        if layer.attention and (width := layer.attention.values_per_token(size)):
            kinds[_Kind(layer.attention.window, layer.attention.chunked, block_tokens=tokens[width])] += count
        if layer.state_space:
            kinds[_Kind(state_blocks=STATE_BLOCKS[layer.state_space.form])] += count
    return kinds


def _groups(kinds: Counter[_Kind]) -> Counter[_Kind]:
    """Count the groups of each kind, like vLLM's ``_get_kv_cache_groups_uniform_page_size``."""
    fewest, most = min(kinds.values()), max(kinds.values())
    size = most if most < fewest * PADDED_GROUPS else fewest
    return Counter({kind: _divided_up(layers, size) for kind, layers in kinds.items()})


def _divided_up(value: int, divisor: int) -> int:
    return -(-value // divisor)
