"""Speed and memory of each variant under load, the share of requests within the targets at each rate, and what the plan
predicts beside what was measured, with the error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from scoring.capacity.architecture import NotSizeable
from scoring.metrics import si
from scoring.units import MIB
from stages.parts.base.errors import ConfigError
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import DEFAULT_SLO, Workload
from stages.parts.machine.accelerators import catalogue
from stages.parts.records.evaluation import Capacity, Evaluation, Load, Percentiles
from stages.parts.records.variant import Variant
from stages.parts.vllm.prediction import predict, sized
from stages.report.cells import ABSENT, Cell, Row, Table, Variants, cell, gib, heads, interval, percent, row
from stages.report.run_report import PredictedFigures

LATENCIES: Final = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "itl_ms": "Inter-token latency",
    "e2el_ms": "End to end",
}
ROUNDS_SHOWN: Final = 6
USUAL_S: Final[float] = Workload.model_fields["steady_s"].default


def title(load: Load) -> str:
    rate = f"at {load.rate_per_s:.3g} requests per second" if load.rate_per_s else ""
    return f"Speed and memory {rate or f'with {load.concurrency} requests in flight'}"


def explanation(evaluation: Evaluation) -> str:
    """Say in a few sentences how the server was loaded."""
    load = evaluation.load
    starts = f" over {len(evaluation.capacity.starts)} starts" if evaluation.capacity else ""
    is_short = float(evaluation.workload.get("steady_s", USUAL_S)) < USUAL_S
    short = f", less than the usual {USUAL_S:g} s after each start" if is_short else ""
    duration = f"{load.duration_s:.0f} s of steady load{starts}{short}; the requests before and after do not count."
    if not load.rate_per_s:
        return (
            f"Saturated: as many requests were in flight all the time, so latency follows from throughput. {duration}"
        )
    return (
        "The times of requests that arrive at random, with the same prompts at the same times for every variant. "
        f"{duration} Below each time: the 95% intervals of its percentiles."
    )


def rates_tried(evaluations: Sequence[Evaluation], variants: Variants) -> Table | None:
    """List each rate that was tried in the search for the capacity, and the share of requests that met the targets
    there; None if none was tried."""
    rows = []
    for evaluation in evaluations:
        if (capacity := evaluation.capacity) is None:
            continue
        low, high = capacity.low, capacity.high
        span = (interval(low, high, 0),) if low is not None and high is not None else ()
        tried = " · ".join(
            f"{trial.rate_per_s:.3g}: {'ended early' if trial.share is None else percent(trial.share)}"
            for trial in sorted(capacity.trials, key=lambda trial: (trial.rate_per_s, trial.restart))
        )
        output = cell(f"{capacity.output_tokens_per_s:,.0f} tokens/s", *span)
        name, rate = variants.cell(evaluation.variant), cell(_requests_per_s(capacity))
        rows.append(row(name, rate, output, cell(tried, css="text")))
    titles = heads("Variant", "Capacity", "Output", "Rate in requests/s: share of requests within the targets")
    return Table("rates", titles, tuple(rows)) if rows else None


def _requests_per_s(capacity: Capacity) -> str:
    return f"{'≥ ' if capacity.is_lower_bound else ''}{capacity.requests_per_s:.3g} requests/s"


def measures(evaluations: Sequence[Evaluation], variants: Variants) -> Table:
    """Make one row for each measure of speed and memory, one column for each variant."""

    def each_of(label: Cell, shown: Callable[[Evaluation], Cell]) -> Row:
        return row(label, *map(shown, evaluations))

    rows = []
    for field, label in LATENCIES.items():
        times = [_percentiles(getattr(evaluation.load, field)) for evaluation in evaluations]
        rows.append(row(cell(label, "ms, p50 / p95 / p99"), *times))
    rows.append(each_of(cell("Output tokens/s", "mean, and each round"), _rates))
    targets = next((evaluation.goodput for evaluation in evaluations if evaluation.goodput), None)
    if targets:
        within = f"within {targets.ttft_ms:g} ms to the first token and {targets.tpot_ms:g} ms per token"
        if (targets.ttft_ms, targets.tpot_ms) == (DEFAULT_SLO.ttft_ms, DEFAULT_SLO.tpot_ms):
            within += ", the default targets"
        rows.append(each_of(cell("Capacity", f"95% {within}"), _capacity))
        rows.append(each_of(cell("Goodput", within), _goodput))
    rows.append(each_of(cell("Requests"), lambda run: cell(str(run.load.requests))))
    rows.append(each_of(cell("Weights"), lambda run: cell(f"{si(run.memory.weights_bytes)}B")))
    rows.append(each_of(cell("Peak memory of the server"), _peak))
    rows.append(each_of(cell("KV cache", "tokens"), lambda run: cell(f"{run.memory.kv_cache_tokens:,}")))
    rows.append(each_of(cell("Kernel", "of the quantized layers, from vLLM’s log"), _kernel))
    names = variants.cells(evaluation.variant for evaluation in evaluations)
    return Table("load", (*heads("Measure"), *names), tuple(rows))


def _percentiles(times: Percentiles) -> Cell:
    digits = 1 if times.p99 < 1000 else 0
    text = " / ".join(f"{value:,.{digits}f}" for value in (times.p50, times.p95, times.p99))
    if (ends := times.intervals) is None:
        return cell(text)
    return cell(text, " / ".join(interval(*reach, digits) for reach in (ends.p50, ends.p95, ends.p99)))


def _rates(evaluation: Evaluation) -> Cell:
    rounds = [f"{run.output_tokens_per_s:,.0f}" for run in evaluation.rounds]
    listed = " · ".join(rounds[:ROUNDS_SHOWN]) + (" …" if len(rounds) > ROUNDS_SHOWN else "")
    return cell(f"{evaluation.load.output_tokens_per_s:,.1f}", listed)


def _capacity(evaluation: Evaluation) -> Cell:
    capacity = evaluation.capacity
    return cell(_requests_per_s(capacity), f"{capacity.output_tokens_per_s:,.0f} tokens/s") if capacity else ABSENT


def _goodput(evaluation: Evaluation) -> Cell:
    goodput = evaluation.goodput
    return cell(percent(goodput.share, 1), f"{goodput.output_tokens_per_s:,.1f} tokens/s") if goodput else ABSENT


def _peak(evaluation: Evaluation) -> Cell:
    memory = evaluation.memory
    gpu = [] if memory.peak_gpu_bytes is None else [f"+ {gib(memory.peak_gpu_bytes)} GPU"]
    return cell(gib(memory.peak_resident_bytes), *gpu)


def _kernel(evaluation: Evaluation) -> Cell:
    engine = evaluation.engine
    if not engine.quantization:
        return cell(engine.kernel or "–", code=True)
    return cell(engine.kernel or "not logged", engine.quantization, code=True)


def predictions(
    store: ModelStore, variants: Sequence[Variant], evaluations: Sequence[Evaluation]
) -> tuple[PredictedFigures, ...]:
    """Compute the predictions for the evaluated variants, as far as the model can be sized."""
    base, figures = sized(store), []
    if base is None:
        return ()
    by_name = {variant.variant: variant for variant in variants}
    try:
        accelerators = catalogue()
    except ConfigError:  # in the user's own catalogue; a report is written nevertheless
        accelerators = {}
    for evaluation in evaluations:
        if (variant := by_name.get(evaluation.variant)) is None:
            continue
        try:
            prediction = predict(base, evaluation, variant, accelerators, store.optimized(evaluation.variant))
        except NotSizeable:
            continue
        if prediction:
            figures.append(
                PredictedFigures(
                    variant=evaluation.variant,
                    weights_bytes=prediction.weights_bytes,
                    kv_cache_tokens=prediction.kv_cache_tokens,
                    ttft_ms=prediction.speed.ttft_ms if prediction.speed else None,
                    tpot_ms=prediction.speed.tpot_ms if prediction.speed else None,
                )
            )
    return tuple(figures)


def predicted(
    figures: Sequence[PredictedFigures], evaluations: Sequence[Evaluation], variants: Variants
) -> Table | None:
    """Make one row for each figure, one column for each variant; None without a prediction."""
    by_variant = {prediction.variant: prediction for prediction in figures}
    pairs = [
        (by_variant[evaluation.variant], evaluation) for evaluation in evaluations if evaluation.variant in by_variant
    ]
    if not pairs:
        return None
    tokens, ms = "{:,.0f}".format, "{:,.1f}".format
    cells = {
        cell("Weights"): [_cell(p.weights_bytes, e.memory.weights_bytes, _size) for p, e in pairs],
        cell("KV cache", "tokens"): [_cell(p.kv_cache_tokens, e.memory.kv_cache_tokens, tokens) for p, e in pairs],
    }
    if any(p.tpot_ms for p, _ in pairs):
        cells[cell("TTFT", "mean, ms")] = [_cell(p.ttft_ms, e.load.ttft_ms.mean, ms) for p, e in pairs]
        cells[cell("TPOT", "mean, ms")] = [_cell(p.tpot_ms, e.load.tpot_ms.mean, ms) for p, e in pairs]
    names = variants.cells(evaluation.variant for _, evaluation in pairs)
    rows = tuple(row(label, *figures_of) for label, figures_of in cells.items())
    return Table("predicted", (*heads("Predicted"), *names), rows)


def _cell(predicted_value: float | None, measured: float, shown: Callable[[float], str]) -> Cell:
    if predicted_value is None or not measured:
        return ABSENT
    error = f"{100 * (predicted_value / measured - 1):+.1f}%".replace("-", "−")
    return cell(shown(predicted_value), f"measured {shown(measured)}", f"error {error}")


def _size(size_bytes: float) -> str:
    return gib(int(size_bytes)) if size_bytes >= 1024 * MIB else f"{size_bytes / MIB:,.2f} MiB"
