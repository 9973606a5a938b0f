"""Whether a variant fits on a number of GPUs and what takes their memory; how many GPUs a server gets and how long its
context may be, where the settings leave that open.

The largest variant that fits decides: the others are served with the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from scoring.capacity.accelerator import Accelerator
from scoring.capacity.architecture import Architecture, Attention, StateSpace
from scoring.capacity.assumptions import ASSUMED
from scoring.capacity.kv_cache import CacheLayout, CacheRules, cache_layout
from scoring.capacity.storage import HALF, SIXTEEN_BIT, Storage
from scoring.capacity.weights import loaded_bytes
from scoring.units import GIB

BLOCK_TOKENS: Final = 16
"""vLLM's default; FlashAttention, FlashInfer and Triton take it."""
LATENT_BLOCK_TOKENS: Final = 64
"""The kernels for MLA on Hopper (FlashMLA) and the other GPUs take it."""
LOGITS_COPIES: Final = 2
"""The profile run samples from as many sequences as a batch may have: logits and probabilities in 32 bits."""
VOCABULARY_VALUE_BYTES: Final = 4
MLP_COPIES: Final = 3
"""The gate and up projections and their product."""
LEAST_CONTEXT: Final = 4096
"""A server gets more GPUs rather than a context that is shorter than this and than the model's own."""
CONTEXT_MULTIPLE: Final = 256
"""A context that is shorter than the model's own is rounded down to a multiple of this, which a person can read."""


@dataclass(frozen=True)
class MemorySettings:
    """The settings of a server that its memory depends on."""

    context: int
    """max_model_len: tokens of prompt and answer together."""
    utilization: float = 0.9
    """gpu_memory_utilization."""
    enforce_eager: bool = False
    kv_cache_bytes: int | None = None
    """Size of the KV cache on each GPU; None if it takes the memory that is left."""


@dataclass(frozen=True)
class MemoryUse:
    """What takes the memory of each GPU, in bytes."""

    budget: int
    """gpu_memory_utilization of what the GPU has."""
    weights: int
    activations: int
    graphs: int
    runtime: int

    @property
    def kv_cache(self) -> int:
        """What is left for the KV cache; negative if the rest does not fit."""
        return self.budget - self.weights - self.activations - self.graphs - self.runtime


@dataclass(frozen=True)
class Fit:
    """A variant on a number of GPUs. It fits if there are no *reasons* against it."""

    reasons: tuple[str, ...]
    memory: MemoryUse
    cache: CacheLayout | None
    """None if the layers can't be divided."""
    cache_bytes: int
    """Bytes for the KV cache on each GPU."""

    @property
    def longest_context(self) -> int:
        return self.cache.longest(self.cache_bytes) if self.cache else 0


def fit(model: Architecture, storage: Storage, accelerator: Accelerator, gpus: int, settings: MemorySettings) -> Fit:
    """Whether vLLM would start, and with which KV cache."""
    limits = accelerator.batch_limits()
    passed = (layer.feed_forward for layer in model.counted)
    widest = max(each.width + each.active * each.expert_width for each in passed)
    forward = ASSUMED.forward_copies.value * model.hidden + MLP_COPIES * widest / gpus
    logits = limits.sequences * model.vocabulary * VOCABULARY_VALUE_BYTES * LOGITS_COPIES
    communication = ASSUMED.communication_gib.value if gpus > 1 else 0
    memory = MemoryUse(
        budget=int(accelerator.usable_bytes * settings.utilization),
        weights=sum(loaded_bytes(model, storage, gpus)),
        activations=int(limits.tokens * forward * HALF) + logits,
        graphs=0 if settings.enforce_eager else int(ASSUMED.graphs_gib.value * GIB),
        runtime=int((ASSUMED.runtime_gib.value + communication) * GIB),
    )
    reasons = [*storage.unsupported(accelerator), *undivided(model, storage, gpus)]
    if reasons:
        return Fit(tuple(reasons), memory, None, 0)
    rules = CacheRules(
        block_tokens=LATENT_BLOCK_TOKENS if model.latent else BLOCK_TOKENS,
        tokens_in_flight=2 * limits.tokens,  # asynchronous scheduling prepares one more batch
        tensor_parallel_size=gpus,
    )
    cache = cache_layout(model, rules)
    available = memory.kv_cache if settings.kv_cache_bytes is None else settings.kv_cache_bytes
    if memory.kv_cache < (settings.kv_cache_bytes or 1):
        reasons.append(_too_full(memory, settings))
    elif not cache.sequences(available, settings.context):
        reasons.append(f"room for {cache.longest(available):,} of {settings.context:,} tokens of context")
    return Fit(tuple(reasons), memory, cache, max(0, available))


def _too_full(memory: MemoryUse, settings: MemorySettings) -> str:
    parts = {"weights": memory.weights, "activations": memory.activations, "CUDA graphs": memory.graphs}
    uses = ", ".join(f"{name} {size / GIB:.1f}" for name, size in (parts | {"runtime": memory.runtime}).items() if size)
    cache = f"a KV cache of {settings.kv_cache_bytes / GIB:.1f}" if settings.kv_cache_bytes else "the KV cache"
    return f"{uses} GiB of {memory.budget / GIB:.1f} leave no room for {cache}"


def undivided(model: Architecture, storage: Storage, size: int) -> Iterator[str]:
    """Say what can't be divided among *size* GPUs."""
    for part in dict.fromkeys(layer.attention for layer in model.counted):
        if part and part.heads % size:
            yield f"{part.heads} attention heads are not divisible by {size}"
        if isinstance(part, Attention) and part.kv_heads % size and size % part.kv_heads:
            yield f"{part.kv_heads} KV heads can neither be divided among {size} GPUs nor copied evenly"
    for state in dict.fromkeys(layer.state_space for layer in model.counted):
        if isinstance(state, StateSpace) and not state.divides(size):
            yield f"a state of {state.heads} heads in {state.groups} groups is not divisible by {size}"
    yield from dict.fromkeys(_matrix_reasons(model, storage, size))


def _matrix_reasons(model: Architecture, storage: Storage, size: int) -> Iterator[str]:
    for layer in model.counted:
        for matrix in layer.matrices(model.hidden):
            rows = size if matrix.split == "rows" else 1
            columns = size if matrix.split == "columns" else 1
            if matrix.inputs % rows or matrix.outputs % columns:
                yield f"{matrix.kind}: a width of {matrix.inputs} × {matrix.outputs} is not divisible by {size}"
            else:
                yield from storage.undivided(matrix, matrix.inputs // rows, matrix.outputs // columns)


@dataclass(frozen=True)
class Demand:
    """What the settings prescribe, and what the workload needs."""

    tensor_parallel_size: int | None = None
    """GPUs per replica; None if the fewest that fit are to be found."""
    context: int | None = None
    """Tokens of prompt and answer together. None: the longest that fits."""
    longest_request: int = 0
    """Tokens of the workload's longest prompt and answer; 0 if they are not known."""
    concurrency: int = 1
    """Requests in flight."""


@dataclass(frozen=True)
class Layout:
    """One server of a variant. It fits if there are no *reasons* against it."""

    tensor_parallel_size: int
    context: int
    """max_model_len."""
    requests: int
    """How many of the workload's longest requests are in the KV cache at once."""
    reasons: tuple[str, ...] = ()
    with_room: bool = False
    """Whether it still fits if more memory is taken than was estimated."""
    short_bytes: int | None = 0
    """By how many bytes each GPU is short; None if something else than memory speaks against it."""


def contradictions(model: Architecture, demand: Demand, storage: Storage = SIXTEEN_BIT) -> Iterator[str]:
    """Name the settings that no hardware can meet."""
    longest, context = model.longest_context, demand.context
    if context and context > longest:
        yield f"max_model_len {context:,}: the model was made for {longest:,} tokens"
    if demand.longest_request > min(context or longest, longest):
        short = context and context < longest
        limit = f"max_model_len is {context:,}" if short else f"the model was made for {longest:,}"
        yield f"the workload's requests have up to {demand.longest_request:,} tokens, and {limit}"
    if size := demand.tensor_parallel_size:
        for why in undivided(model, storage, size):
            yield f"tensor_parallel_size {size}: {why}"


def choose_layout(
    model: Architecture, storage: Storage, accelerator: Accelerator, gpus: int, settings: MemorySettings, demand: Demand
) -> Layout:
    """Choose the fewest GPUs, at most *gpus*, on which a variant fits with room for the workload in flight, and the
    longest context; that of *settings* is not read.

    If nothing fits, it is what was tried last, with the reasons. If no number of GPUs has room for all requests in
    flight, it is the largest that fits: the others wait.
    """
    least = demand.context or max(demand.longest_request, min(LEAST_CONTEXT, model.longest_context))
    settings = replace(settings, context=least)

    def layout_on(size: int) -> Layout:
        fitted = fit(model, storage, accelerator, size, settings)
        if fitted.reasons or fitted.cache is None:
            return Layout(size, least, 0, fitted.reasons, short_bytes=_short(fitted, settings))
        spare = _spare(fitted, settings)
        longest = fitted.cache.longest(spare)
        context = demand.context or max(least, rounded_context(longest, model))
        requests = fitted.cache.sequences(max(spare, 0), demand.longest_request or context)
        return Layout(size, context, requests, with_room=longest >= least)

    sizes = [demand.tensor_parallel_size] if demand.tensor_parallel_size else powers_of_two(gpus)
    layouts = [layout_on(size) for size in sizes]
    fitting = [layout for layout in layouts if not layout.reasons]
    if not fitting:
        return min(layouts, key=lambda layout: (len(layout.reasons), -layout.tensor_parallel_size))
    roomy = [layout for layout in fitting if layout.with_room] or fitting
    return next((layout for layout in roomy if layout.requests >= demand.concurrency), roomy[-1])


def powers_of_two(most: int) -> list[int]:
    """List the numbers of GPUs among which a model can usually be divided: 1, 2, 4, … up to *most*."""
    return [1 << n for n in range(max(0, most).bit_length())]


def rounded_context(longest: int, model: Architecture) -> int:
    return longest if longest >= model.longest_context else longest - longest % CONTEXT_MULTIPLE


def left_out(model: Architecture, storage: Storage, tensor_parallel_size: int) -> tuple[str, ...]:
    """Say why vLLM can't divide a variant's weights among that many GPUs. The quantizer and vLLM themselves report what
    a single GPU can't compute."""
    return tuple(undivided(model, storage, tensor_parallel_size)) if tensor_parallel_size > 1 else ()


def surely_fits(fitted: Fit, settings: MemorySettings) -> bool:
    """Whether it still fits with ``settings.context`` if more memory is taken than was estimated."""
    if fitted.reasons or fitted.cache is None:
        return False
    return fitted.cache.longest(_spare(fitted, settings)) >= settings.context


def certain_reasons(fitted: Fit, settings: MemorySettings) -> tuple[str, ...]:
    """Say why it does not fit even if less memory is taken than was estimated; empty if it may fit."""
    if fitted.cache is None:
        return fitted.reasons
    room = fitted.memory.kv_cache + _uncertain(fitted.memory)
    least = settings.kv_cache_bytes
    may = room >= (least or 1) and fitted.cache.longest(least or room) >= settings.context
    return () if may else fitted.reasons


def _spare(fitted: Fit, settings: MemorySettings) -> int:
    """Bytes for the KV cache that are left if more memory is taken than was estimated."""
    return fitted.cache_bytes - (0 if settings.kv_cache_bytes else _uncertain(fitted.memory))


def _short(fitted: Fit, settings: MemorySettings) -> int | None:
    """By how many bytes each GPU is short, if more memory is taken than was estimated; None if it can't be divided."""
    if fitted.cache is None:
        return None
    cache_bytes = settings.kv_cache_bytes or (fitted.cache.blocks(settings.context) + 1) * fitted.cache.block_bytes
    return max(0, cache_bytes - fitted.memory.kv_cache + _uncertain(fitted.memory))


def _uncertain(memory: MemoryUse) -> int:
    """How many bytes more may be taken than was estimated."""
    return int(ASSUMED.estimate_error.value * (memory.activations + memory.graphs + memory.runtime))
