"""Speed and memory of each variant under load, the share of requests within the targets at each rate, and what the plan
predicts beside what was measured, with the error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from scoring.capacity.architecture import NotSizeable
from scoring.metrics import si
from scoring.units import MIB
from stages.parts.base.errors import ConfigError
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import DEFAULT_SLO, Workload
from stages.parts.machine.accelerators import catalogue
from stages.parts.records.evaluation import Capacity, ColdStart, Evaluation, Goodput, Load, Percentiles, grouped
from stages.parts.records.variant import Variant
from stages.parts.vllm.prediction import predict, sized
from stages.report.cells import ABSENT, Cell, Fact, Table, Variants, cell, count, gib, heads, interval, percent, row
from stages.report.run_report import PredictedFigures

LATENCIES: Final = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "itl_ms": "Inter-token latency",
    "e2el_ms": "End to end",
}
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
        f"{duration} Below the times: the 95% interval of their 95th percentile."
    )


def rates_tried(evaluations: Sequence[Evaluation], variants: Variants) -> Table | None:
    """List each rate that was tried in the search for the capacity, and the share of requests that met the targets
    there; None if none was tried."""
    searched = [(each.variant, each.capacity) for each in evaluations if each.capacity]
    if not searched:
        return None
    rows = []
    for name, capacity in searched:
        low, high = capacity.low, capacity.high
        span = (interval(low, high, 0),) if low is not None and high is not None else ()
        tried = " · ".join(
            f"{trial.rate_per_s:.3g}: {'ended early' if trial.share is None else percent(trial.share)}"
            for trial in sorted(capacity.trials, key=lambda trial: (trial.rate_per_s, trial.restart))
        )
        rate = cell(f"{'≥ ' if capacity.is_lower_bound else ''}{capacity.requests_per_s:.3g} requests/s")
        output = cell(f"{capacity.output_tokens_per_s:,.0f} tokens/s", *span)
        rows.append(row(variants.cell(name), rate, output, cell(tried, css="text")))
    title = cell("Capacity", "95% of requests", *_within(searched[0][1]), css="wrapped")
    shares = cell("Rate in requests/s: share of requests within the targets", css="text")
    return Table("rates", (*heads("Variant"), title, *heads("Output"), shares), tuple(rows))


def times(evaluations: Sequence[Evaluation], variants: Variants) -> Table:
    """Make one row for each variant, with the percentiles of its latencies."""
    titles = [cell(title, "ms, p50 / p95 / p99") for title in LATENCIES.values()]
    rows = [
        row(variants.cell(each.variant), *(_percentiles(getattr(each.load, field)) for field in LATENCIES))
        for each in evaluations
    ]
    return Table("times", (*heads("Variant"), *titles), tuple(rows))


def measures(evaluations: Sequence[Evaluation], variants: Variants) -> Table:
    """Make one row for each variant, with its rates and its memory."""
    targets = next((evaluation.goodput for evaluation in evaluations if evaluation.goodput), None)
    goodput = [cell("Goodput", *_within(targets), css="wrapped")] if targets else []
    titles = (*heads("Variant"), cell("Output tokens/s", "mean, and all rounds"), *goodput, *heads("Weights"))
    titles += (*heads("Peak memory"), cell("KV cache", "tokens"), cell("Kernel", "of the quantized layers"))
    rows = []
    for evaluation in evaluations:
        memory, engine = evaluation.memory, evaluation.engine
        good = [_goodput(evaluation.goodput)] if targets else []
        gpu = [] if memory.peak_gpu_bytes is None else [f"+ {gib(memory.peak_gpu_bytes)} GPU"]
        peak = cell(gib(memory.peak_resident_bytes), *gpu)
        weights, tokens = cell(f"{si(memory.weights_bytes)}B"), cell(f"{memory.kv_cache_tokens:,}")
        kernel = engine.kernel or ("not logged" if engine.quantization else "–")
        quantized = cell(kernel, *filter(None, [engine.quantization]), code=True)
        rows.append(row(variants.cell(evaluation.variant), _rates(evaluation), *good, weights, peak, tokens, quantized))
    return Table("load", titles, tuple(rows))


def cold_starts(evaluations: Sequence[Evaluation], variants: Variants) -> list[Table]:
    """Make one row for each variant, with the parts of its server's first start; no table without any."""
    titles = [name[:-2].replace("_", " ").capitalize() for name in ColdStart.model_fields]
    rows = [
        row(variants.cell(each.variant), *(cell(f"{seconds:.1f} s") for _, seconds in each.engine.start))
        for each in evaluations
        if each.engine.start
    ]
    return [Table("starts", heads("Cold start", *titles), tuple(rows))] if rows else []


def _within(targets: Goodput | Capacity) -> tuple[str, ...]:
    is_default = (targets.ttft_ms, targets.tpot_ms) == (DEFAULT_SLO.ttft_ms, DEFAULT_SLO.tpot_ms)
    within = f"within {targets.ttft_ms:g} ms to the first token and {targets.tpot_ms:g} ms per token"
    return (within, "the default targets") if is_default else (within,)


def _percentiles(times: Percentiles) -> Cell:
    digits = 1 if times.p99 < 1000 else 0
    text = " / ".join(f"{value:,.{digits}f}" for value in (times.p50, times.p95, times.p99))
    return cell(text, *([f"p95 {interval(*times.intervals.p95, digits)}"] if times.intervals else []))


def _rates(evaluation: Evaluation) -> Cell:
    rates = [run.output_tokens_per_s for run in evaluation.rounds]
    reach = [f"{interval(min(rates), max(rates), 0)} in {count(len(rates), 'round')}"] if rates else []
    return cell(f"{evaluation.load.output_tokens_per_s:,.1f}", *reach, count(evaluation.load.requests, "request"))


def _goodput(goodput: Goodput | None) -> Cell:
    return cell(percent(goodput.share, 1), f"{goodput.output_tokens_per_s:,.1f} tokens/s") if goodput else ABSENT


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
        name, variant = evaluation.variant, by_name.get(evaluation.variant)
        with contextlib.suppress(NotSizeable):
            if variant and (prediction := predict(base, evaluation, variant, accelerators, store.optimized(name))):
                figures.append(
                    PredictedFigures(
                        variant=name,
                        weights_bytes=prediction.weights_bytes,
                        kv_cache_tokens=prediction.kv_cache_tokens,
                        ttft_ms=prediction.speed.ttft_ms if prediction.speed else None,
                        tpot_ms=prediction.speed.tpot_ms if prediction.speed else None,
                    )
                )
    return tuple(figures)


def fallbacks(evaluations: Sequence[Evaluation]) -> list[Fact]:
    """List what vLLM said of slower paths, and the variants that it said it of."""
    lines = {evaluation.variant: "; ".join(evaluation.engine.fallbacks[:4]) for evaluation in evaluations}
    return [Fact(", ".join(names), text) for text, names in grouped(lines).items() if text]


def predicted(
    figures: Sequence[PredictedFigures], evaluations: Sequence[Evaluation], variants: Variants
) -> Table | None:
    """Make one row for each variant, one column for each figure; None without a prediction."""
    by_variant = {prediction.variant: prediction for prediction in figures}
    pairs = [(by_variant[each.variant], each) for each in evaluations if each.variant in by_variant]
    if not pairs:
        return None
    tokens, ms = "{:,.0f}".format, "{:,.1f}".format
    timed = any(prediction.tpot_ms for prediction, _ in pairs)
    titles = [*heads("Variant", "Weights"), cell("KV cache", "tokens")]
    titles += [cell("TTFT", "mean, ms"), cell("TPOT", "mean, ms")] if timed else []
    rows = []
    for prediction, evaluation in pairs:
        memory, load = evaluation.memory, evaluation.load
        cells = [_cell(prediction.weights_bytes, memory.weights_bytes, _size)]
        cells += [_cell(prediction.kv_cache_tokens, memory.kv_cache_tokens, tokens)]
        if timed:
            cells += [
                _cell(prediction.ttft_ms, load.ttft_ms.mean, ms),
                _cell(prediction.tpot_ms, load.tpot_ms.mean, ms),
            ]
        rows.append(row(variants.cell(evaluation.variant), *cells))
    return Table("predicted", tuple(titles), tuple(rows))


def _cell(predicted_value: float | None, measured: float, shown: Callable[[float], str]) -> Cell:
    if predicted_value is None or not measured:
        return ABSENT
    error = f"{100 * (predicted_value / measured - 1):+.1f}%".replace("-", "−")
    return cell(shown(predicted_value), f"measured {shown(measured)}", f"error {error}")


def _size(size_bytes: float) -> str:
    return gib(int(size_bytes)) if size_bytes >= 1024 * MIB else f"{size_bytes / MIB:,.2f} MiB"
