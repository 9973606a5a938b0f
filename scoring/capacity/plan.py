"""What each variant needs on each type of GPU, and which choice is the cheapest that meets the targets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scoring.capacity.accelerator import Accelerator
from scoring.capacity.architecture import Architecture
from scoring.capacity.kv_cache import largest
from scoring.capacity.memory import MemorySettings, fit, powers_of_two
from scoring.capacity.speed import PredictedSpeed, Requests, Roofline, SpeedCalibration
from scoring.capacity.storage import Storage
from scoring.closed import PlanRecord
from scoring.cost import per_million
from scoring.names import variant_of
from scoring.units import GIB


class Targets(PlanRecord):
    """The highest mean times in ms that users accept; None: any."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met_by(self, speed: PredictedSpeed) -> bool:
        ttft, tpot = self.ttft_ms or math.inf, self.tpot_ms or math.inf
        return speed.ttft_ms <= ttft and speed.tpot_ms <= tpot


class GpuMemory(PlanRecord):
    """What takes the memory of each GPU, in GiB."""

    usable_gib: float
    weights_gib: float
    activations_gib: float
    cuda_graphs_gib: float
    runtime_gib: float
    kv_cache_gib: float


class Option(PlanRecord):
    """A candidate on a number of GPUs of one type."""

    variant: str
    """Its name, which for a variant with a recipe has both."""
    accelerator: str
    tensor_parallel_size: int
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
    predicted: PredictedSpeed | None
    """With as many sequences as the targets and the KV cache allow; None if it does not fit."""
    replicas: int | None
    """For the peak; None if it does not fit."""
    cost_per_hour: float | None
    """Price of all replicas; None without a price per GPU."""
    cost_per_million_tokens: float | None
    """Cost of a million output tokens at the peak."""


@dataclass(frozen=True)
class PlannedRecipe:
    """What a recipe changes of what is planned."""

    kv_value_bytes: int | None = None
    """None: what ``PlanRequest.model`` says."""
    tensor_parallel_size: int | None = None
    """None: any."""


@dataclass(frozen=True)
class PlanRequest:
    """A model, the formats and GPUs to try, and the load they must carry."""

    model: Architecture
    formats: Mapping[str, Storage]
    """How each variant stores its weights, by its name."""
    accelerators: Mapping[str, Accelerator]
    settings: MemorySettings
    requests: Requests
    longest_request: int
    """Tokens of prompt and answer of the longest request."""
    peak: int
    """Requests in flight at the peak."""
    targets: Targets = field(default_factory=Targets)
    calibrations: Mapping[str, SpeedCalibration] = field(default_factory=dict)
    """Calibrations by the name of the accelerator."""
    recipes: Mapping[str, PlannedRecipe] = field(default_factory=dict)
    """Of the candidates that are variants with recipes, by the candidates' names."""
    untried: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Variants that are not tried on an accelerator, by its name."""


def options(request: PlanRequest) -> list[Option]:
    """Every candidate on every number of GPUs of every type: the cheapest that meets the targets first.

    Then come those that miss the targets, and those that do not fit. Without prices, the total memory of the GPUs
    stands in for the cost.
    """
    pairs = itertools.product((*request.formats, *request.recipes), request.accelerators)
    tried = ((each, name) for each, name in pairs if variant_of(each) not in request.untried.get(name, ()))
    every = (option for candidate, name in tried for option in _layouts(request, candidate, name))
    return sorted(every, key=lambda option: _order(request, option))


def shortlist(ordered: Sequence[Option]) -> list[Option]:
    """Keep the first option of each variant on each type of GPU; if none fits, that with most GPUs."""
    best: dict[tuple[str, str], Option] = {}
    for option in ordered:
        key = option.variant, option.accelerator
        fits = key in best and (best[key].fits or option.fits)
        if key not in best or (not fits and option.tensor_parallel_size > best[key].tensor_parallel_size):
            best[key] = option
    return [option for option in ordered if best[option.variant, option.accelerator] is option]


def _layouts(request: PlanRequest, variant: str, name: str) -> Iterator[Option]:
    accelerator = request.accelerators[name]
    if any(request.formats[variant_of(variant)].unsupported(accelerator)):
        yield _option(request, variant, name, 1)
        return
    sizes = powers_of_two(accelerator.gpus_per_node)
    if size := request.recipes.get(variant, PlannedRecipe()).tensor_parallel_size:
        sizes = [size] if size <= accelerator.gpus_per_node else []
    for size in sizes:
        yield _option(request, variant, name, size)


def _option(request: PlanRequest, variant: str, name: str, gpus: int) -> Option:
    accelerator, model = request.accelerators[name], request.model
    storage = request.formats[variant_of(variant)]
    if value_bytes := request.recipes.get(variant, PlannedRecipe()).kv_value_bytes:
        model = replace(model, kv_value_bytes=value_bytes)
    fitted = fit(model, storage, accelerator, gpus, request.settings)
    cached = fitted.cache.sequences(fitted.cache_bytes, request.longest_request) if fitted.cache else 0
    calibration = request.calibrations.get(name, SpeedCalibration())
    roofline = Roofline(model, storage, accelerator, gpus, calibration)
    limit = min(cached, accelerator.batch_limits().sequences)
    speed = None
    if not fitted.reasons and limit:
        # The most sequences that meet the targets; a single one if none does.
        met = largest(1, limit, lambda count: request.targets.met_by(roofline.speed(count, request.requests)))
        speed = roofline.speed(met, request.requests)
    memory = fitted.memory
    replicas = math.ceil(request.peak / speed.sequences) if speed else None
    hourly, million = _cost(roofline, request, replicas)
    return Option(
        variant=variant,
        accelerator=name,
        tensor_parallel_size=gpus,
        fits=not fitted.reasons,
        reasons=fitted.reasons,
        memory=GpuMemory(
            usable_gib=memory.budget / GIB,
            weights_gib=memory.weights / GIB,
            activations_gib=memory.activations / GIB,
            cuda_graphs_gib=memory.graphs / GIB,
            runtime_gib=memory.runtime / GIB,
            kv_cache_gib=fitted.cache_bytes / GIB,
        ),
        longest_context=fitted.longest_context,
        kv_cache_tokens=0
        if fitted.reasons or not fitted.cache
        else fitted.cache.tokens(fitted.cache_bytes, request.settings.context),
        cached_sequences=cached,
        meets_targets=speed is not None and request.targets.met_by(speed),
        predicted=speed,
        replicas=replicas,
        cost_per_hour=hourly,
        cost_per_million_tokens=million,
    )


def _cost(roofline: Roofline, request: PlanRequest, replicas: int | None) -> tuple[float | None, float | None]:
    """Compute the price of all replicas per hour, and that of a million output tokens while the peak lasts."""
    price = roofline.accelerator.price_per_hour
    if price is None or replicas is None:
        return None, None
    hourly = price * roofline.gpus * replicas
    speed = roofline.speed(math.ceil(request.peak / replicas), request.requests)
    return hourly, per_million(hourly, speed.output_tokens_per_s * replicas)


def _order(request: PlanRequest, option: Option) -> tuple[bool, bool, bool, float, float, int]:
    memory = request.accelerators[option.accelerator].memory_gib * option.tensor_parallel_size * (option.replicas or 1)
    cost = option.cost_per_hour
    tokens = option.predicted.output_tokens_per_s if option.predicted else 0.0
    return (
        not option.fits,
        not option.meets_targets,
        cost is None,
        memory if cost is None else cost,
        -tokens,
        option.tensor_parallel_size,
    )
