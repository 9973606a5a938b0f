"""How many GPUs a server gets and how long its context may be, where the settings leave that open.

fp16 decides, because it is the largest variant and the reference: the others are served with the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from scoring.capacity.accelerator import Accelerator
from scoring.capacity.architecture import Architecture
from scoring.capacity.assumptions import ESTIMATE_ERROR
from scoring.capacity.memory import Fit, Memory, Parallelism, Serving, fit, undivided
from scoring.capacity.weights import Parameters
from scoring.names import VariantName

LEAST_CONTEXT: Final = 4096
"""Rather than serve fewer tokens than these, or than the model's own, a server gets more GPUs."""
CONTEXT_MULTIPLE: Final = 256
"""A context that is shorter than the model's own is rounded down to such a multiple, which a person can read."""


@dataclass(frozen=True)
class Wish:
    """What the settings say, and what the workload needs."""

    tensor_parallel_size: int | None = None
    """None: as few GPUs as fit."""
    context: int | None = None
    """Tokens of prompt and answer together. None: the longest that fits."""
    longest_request: int = 0
    """Tokens of the workload's longest prompt and answer; 0 if they are not known."""
    concurrency: int = 1
    """Requests in flight."""

    def least_context(self, model: Architecture) -> int:
        return self.context or max(self.longest_request, min(LEAST_CONTEXT, model.longest_context))


@dataclass(frozen=True)
class Layout:
    """One server of fp16. It fits if there are no *reasons* against it."""

    tensor_parallel_size: int
    context: int
    """max_model_len."""
    requests: int
    """How many of the workload's longest requests are in the KV cache at once."""
    reasons: tuple[str, ...] = ()
    with_room: bool = True
    """Whether it still fits if more memory is taken than was estimated."""


def contradictions(model: Architecture, wish: Wish) -> Iterator[str]:
    """What can't be on any hardware."""
    own, context = model.longest_context, wish.context
    if context and context > own:
        yield f"max_model_len {context:,}: the model was made for {own:,} tokens"
    if wish.longest_request > min(context or own, own):
        limit = f"max_model_len is {context:,}" if context and context < own else f"the model was made for {own:,}"
        yield f"the workload's requests have up to {wish.longest_request:,} tokens, and {limit}"
    if size := wish.tensor_parallel_size:
        for why in undivided(model, "fp16", Parallelism(size), group_size=1):
            yield f"tensor_parallel_size {size}: {why}"


def choose_layout(
    model: Architecture, parameters: Parameters, accelerator: Accelerator, gpus: int, serving: Serving, wish: Wish
) -> Layout:
    """The fewest GPUs on which fp16 fits with room for the workload's requests in flight, and its longest context.

    Args:
        gpus: at most so many serve one replica.
        serving: its context is not read.

    Returns:
        If nothing fits, what was tried last, with the reasons. If no number of GPUs has room for all requests in
        flight, the largest that fits: the others wait.
    """
    powers = (1 << n for n in range(gpus.bit_length()))
    sizes = [wish.tensor_parallel_size] if wish.tensor_parallel_size else [n for n in powers if n <= gpus]
    tried = [_tried(model, parameters, accelerator, size, serving, wish) for size in sizes]
    fitting = [each for each in tried if not each.reasons]
    if not fitting:
        return min(tried, key=lambda each: (len(each.reasons), -each.tensor_parallel_size))
    best = [each for each in fitting if each.with_room] or fitting
    return next((each for each in best if each.requests >= wish.concurrency), best[-1])


def rounded_context(longest: int, model: Architecture) -> int:
    return longest if longest >= model.longest_context else longest - longest % CONTEXT_MULTIPLE


def left_out(model: Architecture, variant: VariantName, tensor_parallel_size: int, group_size: int) -> tuple[str, ...]:
    """Why vLLM can't divide a variant's weights among so many GPUs. What a single GPU makes of them, the quantizer and
    vLLM say themselves."""
    if tensor_parallel_size == 1:
        return ()
    return tuple(undivided(model, variant, Parallelism(tensor_parallel_size), group_size))


def surely_fits(found: Fit, serving: Serving) -> bool:
    """Whether it fits with ``serving.context`` also if more memory is taken than was estimated."""
    return (
        not found.reasons and found.cache is not None and found.cache.longest(_spare(found, serving)) >= serving.context
    )


def certain_reasons(found: Fit, serving: Serving) -> tuple[str, ...]:
    """Why it does not fit also if less memory is taken than was estimated; empty if it may."""
    if found.cache is None:
        return found.reasons
    room = found.memory.kv_cache + _uncertain(found.memory)
    least = serving.kv_cache_bytes
    may = room >= (least or 1) and found.cache.longest(least or room) >= serving.context
    return () if may else found.reasons


def _tried(
    model: Architecture,
    parameters: Parameters,
    accelerator: Accelerator,
    size: int,
    serving: Serving,
    wish: Wish,
) -> Layout:
    least = wish.least_context(model)
    found = fit(model, parameters, "fp16", accelerator, Parallelism(size), replace(serving, context=least))
    if found.reasons or found.cache is None:
        return Layout(size, least, 0, found.reasons)
    spare = _spare(found, serving)
    longest = found.cache.longest(spare)
    context = wish.context or max(least, rounded_context(longest, model))
    requests = found.cache.sequences(max(spare, 0), wish.longest_request or context)
    return Layout(size, context, requests, with_room=longest >= least)


def _spare(found: Fit, serving: Serving) -> int:
    """Bytes for the KV cache that are left if more memory is taken than was estimated."""
    return found.cache_bytes - (0 if serving.kv_cache_bytes else _uncertain(found.memory))


def _uncertain(memory: Memory) -> int:
    """How many bytes more may be taken than was estimated."""
    return int(ESTIMATE_ERROR.value * (memory.activations + memory.graphs + memory.runtime))
