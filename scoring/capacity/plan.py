"""What each variant needs on each type of GPU, and which choice is the cheapest that meets the targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import BaseModel, ConfigDict

from scoring.capacity.accelerator import Accelerator
from scoring.capacity.architecture import Architecture
from scoring.capacity.memory import Fit, Parallelism, Serving, fit, unsupported
from scoring.capacity.speed import Calibration, Requests, Server, Speed
from scoring.capacity.weights import Parameters
from scoring.cost import per_million
from scoring.names import VariantName
from scoring.units import GIB

PIPELINES: Final = (2, 4)
"""Pipeline stages, each of a whole node, that are tried if one node is too small."""


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Targets(Record):
    """The highest mean times in ms that users accept; None: any."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met_by(self, speed: Speed) -> bool:
        ttft, tpot = self.ttft_ms or math.inf, self.tpot_ms or math.inf
        return speed.ttft_ms <= ttft and speed.tpot_ms <= tpot


class GpuMemory(Record):
    """What takes the memory of the fullest GPU, in GiB."""

    usable_gib: float
    weights_gib: float
    activations_gib: float
    cuda_graphs_gib: float
    runtime_gib: float
    kv_cache_gib: float


class Predicted(Record):
    """One replica with as many sequences at once as the targets and the KV cache allow."""

    sequences: int
    ttft_ms: float
    tpot_ms: float
    requests_per_s: float
    output_tokens_per_s: float
    """Goodput if the targets are met: every request meets them."""


class Option(Record):
    """A variant on a number of GPUs of one type."""

    variant: VariantName
    accelerator: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    fits: bool
    reasons: tuple[str, ...]
    """Why it does not fit."""
    memory: GpuMemory
    longest_context: int
    """Tokens of the longest max_model_len that starts; at most the model's own."""
    kv_cache_tokens: int
    """As vLLM logs it, for the context asked for."""
    cached_sequences: int
    """How many requests of the longest kind are in the cache at once."""
    meets_targets: bool
    predicted: Predicted | None
    """None if it does not fit."""
    replicas: int | None
    """For the peak; None if it does not fit."""
    cost_per_hour: float | None
    """Price of all replicas; None without a price per GPU."""
    cost_per_million_tokens: float | None
    """Cost of a million output tokens at the peak."""

    @property
    def gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class Question:
    """What is to be planned."""

    model: Architecture
    parameters: Parameters
    variants: Sequence[VariantName]
    accelerators: Mapping[str, Accelerator]
    serving: Serving
    requests: Requests
    longest_request: int
    """Tokens of prompt and answer of the longest request."""
    peak: int
    """Requests in flight at the peak."""
    targets: Targets = field(default_factory=Targets)
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    """Calibrations by the name of the accelerator."""


def options(question: Question) -> list[Option]:
    """Every variant on every number of GPUs of every type: the cheapest that meets the targets first.

    Then come those that miss the targets, and those that do not fit. Without prices, the total memory of the GPUs
    stands in for the cost.
    """
    found = [
        option
        for variant in question.variants
        for name in question.accelerators
        for option in _layouts(question, variant, name)
    ]
    return sorted(found, key=lambda option: _order(question, option))


def shortlist(found: Sequence[Option]) -> list[Option]:
    """The first option of each variant on each type of GPU; if none fits, that with most GPUs."""
    best: dict[tuple[str, str], Option] = {}
    for option in found:
        key = option.variant, option.accelerator
        if key not in best or not (best[key].fits or option.fits or option.gpus <= best[key].gpus):
            best[key] = option
    return [option for option in found if best[option.variant, option.accelerator] is option]


def _layouts(question: Question, variant: VariantName, name: str) -> Iterator[Option]:
    accelerator = question.accelerators[name]
    if any(unsupported(variant, accelerator)):
        yield _option(question, variant, name, Parallelism())
        return
    sizes = [1 << n for n in range(accelerator.gpus_per_node.bit_length()) if 1 << n <= accelerator.gpus_per_node]
    found = [_option(question, variant, name, Parallelism(size)) for size in sizes]
    yield from found
    if not any(option.fits for option in found):
        for stages in PIPELINES:
            yield _option(question, variant, name, Parallelism(sizes[-1], stages))


def _option(question: Question, variant: VariantName, name: str, parallelism: Parallelism) -> Option:
    accelerator, model = question.accelerators[name], question.model
    found = fit(model, question.parameters, variant, accelerator, parallelism, question.serving)
    cached = found.cache.sequences(found.cache_bytes, question.longest_request) if found.cache else 0
    calibration = question.calibrations.get(name, Calibration())
    server = Server(
        model, question.parameters, variant, accelerator, parallelism, question.serving.group_size, calibration
    )
    limit = min(cached, accelerator.batch_limits().sequences)
    speed = None if found.reasons or not limit else _most(server, question, limit)
    replicas = math.ceil(question.peak / speed.sequences) if speed else None
    hourly, million = _cost(server, question, replicas)
    return Option(
        variant=variant,
        accelerator=name,
        tensor_parallel_size=parallelism.tensor,
        pipeline_parallel_size=parallelism.pipeline,
        fits=not found.reasons,
        reasons=found.reasons,
        memory=_gpu_memory(found),
        longest_context=found.longest_context,
        kv_cache_tokens=0
        if found.reasons or not found.cache
        else found.cache.tokens(found.cache_bytes, question.serving.context),
        cached_sequences=cached,
        meets_targets=speed is not None and question.targets.met_by(speed),
        predicted=Predicted(**vars(speed)) if speed else None,
        replicas=replicas,
        cost_per_hour=hourly,
        cost_per_million_tokens=million,
    )


def _most(server: Server, question: Question, limit: int) -> Speed:
    """The speed with the most sequences that meet the targets; with a single one if none does."""
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if question.targets.met_by(server.speed(middle, question.requests)):
            low = middle
        else:
            high = middle - 1
    return server.speed(low, question.requests)


def _cost(server: Server, question: Question, replicas: int | None) -> tuple[float | None, float | None]:
    """The price of all replicas per hour, and that of a million output tokens while the peak lasts."""
    price = server.accelerator.price_per_hour
    if price is None or replicas is None:
        return None, None
    hourly = price * server.parallelism.gpus * replicas
    each = server.speed(math.ceil(question.peak / replicas), question.requests)
    cost = per_million(hourly, each.output_tokens_per_s * replicas)
    return hourly, cost.value if cost else None


def _gpu_memory(found: Fit) -> GpuMemory:
    memory = found.memory
    return GpuMemory(
        usable_gib=memory.budget / GIB,
        weights_gib=memory.weights / GIB,
        activations_gib=memory.activations / GIB,
        cuda_graphs_gib=memory.graphs / GIB,
        runtime_gib=memory.runtime / GIB,
        kv_cache_gib=found.cache_bytes / GIB,
    )


def _order(question: Question, option: Option) -> tuple[bool, bool, bool, float, float, int]:
    memory = question.accelerators[option.accelerator].memory_gib * option.gpus * (option.replicas or 1)
    cost = option.cost_per_hour
    tokens = option.predicted.output_tokens_per_s if option.predicted else 0.0
    return (
        not option.fits,
        not option.meets_targets,
        cost is None,
        memory if cost is None else cost,
        -tokens,
        option.gpus,
    )
