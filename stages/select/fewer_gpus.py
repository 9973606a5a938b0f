"""Whether the winner is served on fewer GPUs than all variants were measured on: what a request costs per GPU-hour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import geometric_mean

from scoring.constraints import MEASURES, Constraints, violations
from scoring.results import Change
from stages.parts.records.evaluation import Capacity, Evaluation, Load, Smaller, measures_of
from stages.parts.records.production import Cost, FewerGpus


def fewer_gpus_of(winner: Evaluation, limits: Constraints) -> FewerGpus | None:
    """Compare the winner with its measurement on fewer GPUs, if there is one."""
    from scoring.cost import cost_change

    smaller = winner.smaller
    if smaller is None:
        return None
    before = _rates(winner.capacity, winner.rounds, smaller.instead_of)
    rates = _rates(smaller.capacity, smaller.rounds, smaller.tensor_parallel_size) if smaller.load else []
    cost = cost_change(before, rates) if rates else None
    return FewerGpus(
        tensor_parallel_size=smaller.tensor_parallel_size,
        requests_per_s=geometric_mean(rates) if rates else None,
        instead_of=smaller.instead_of,
        requests_per_s_before=geometric_mean(before),
        cost=cost,
        against=tuple(_against(winner, smaller, cost, limits)),
        engine=smaller.engine,
    )


def sentences_of(layout: FewerGpus, name: str, cost: Cost | None) -> str:
    """Describe the comparison in one or two sentences. *cost* is that of a million output tokens with as many GPUs as
    all variants were measured on; None without a price."""
    few, usual = _gpus(layout.tensor_parallel_size), _gpus(layout.instead_of)
    if layout.requests_per_s is None or layout.cost is None:
        return f"{name} fits on {few} by calculation, but is served on {usual}: {'; '.join(layout.against)}."
    change = layout.cost
    costs = f"{_less(change.value)} per request{_span(change)}"
    if cost:
        after = cost.value * (1 + change.value)
        costs += f", {after:.3g} instead of {cost.value:.3g} {cost.currency} for a million output tokens"
    sentence = (
        f"{name} on {few}: {layout.requests_per_s:.3g} requests/s per GPU, on {usual} "
        f"{layout.requests_per_s_before:.3g}: {few} {'costs' if layout.tensor_parallel_size == 1 else 'cost'} {costs}."
    )
    if layout.against:
        return (
            f"{sentence} With serving.tensor_parallel_size auto it is served on {usual}: {'; '.join(layout.against)}."
        )
    return f"{sentence} It is served on {few} unless serving.tensor_parallel_size is a number."


def _less(change: float) -> str:
    return f"{abs(change):.0%} {'less' if change < 0 else 'more'}"


def _span(change: Change) -> str:
    if change.low is None or change.high is None:
        return ""
    if change.low < 0 <= change.high:
        return f" ({_less(change.low)} to {_less(change.high)})"
    start, end = sorted(map(abs, (change.low, change.high)))
    return f" ({start:.0%} to {end:.0%})"


def _against(winner: Evaluation, smaller: Smaller, cost: Change | None, limits: Constraints) -> Iterator[str]:
    """Say why the winner is not to be served on fewer GPUs."""
    if smaller.failure:
        yield smaller.failure.splitlines()[0].rstrip(".")
    if smaller.load is None or cost is None:
        return
    capacity, rate = smaller.capacity, smaller.load.rate_per_s
    if capacity and rate and capacity.requests_per_s < rate:
        yield f"it holds the latency targets up to {capacity.requests_per_s:.3g} requests/s, not at {rate:.3g}"
    measures = measures_of(smaller.load, smaller.goodput)
    of_load = limits.model_copy(update=dict.fromkeys(name for name in MEASURES if name not in measures))
    yield from violations(measures, of_load)
    if winner.capacity and winner.capacity.is_lower_bound:
        yield f"every rate held that was tried on {_gpus(smaller.instead_of)}, so these can do more"
    if cost.high is None:
        yield "one start of each does not show how much chance there is in it"
    elif cost.high >= 0:
        yield "the difference in cost may be chance" if cost.value < 0 else "it is not cheaper"


def _rates(capacity: Capacity | None, rounds: Sequence[Load], gpus: int) -> list[float]:
    """List the requests per second and GPU after each start."""
    if capacity:
        answer = capacity.output_tokens_per_s / capacity.requests_per_s
        return [start / answer / gpus for start in capacity.starts]
    return [run.requests_per_s / gpus for run in rounds]


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
