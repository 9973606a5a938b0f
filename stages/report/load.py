"""Speed and memory of each variant under load, as a table and over the number of requests in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from scoring.metrics import si
from stages.parts.records.evaluation import Evaluation, Load, Percentiles
from stages.report import plots
from stages.report.cells import ABSENT, Cell, Row, Table, Variants, cell, gib, heads, percent, row

LATENCIES: Final = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "itl_ms": "Inter-token latency",
    "e2el_ms": "End to end",
}
ROUNDS_SHOWN: Final = 6
FALLBACKS_SHOWN: Final = 4


@dataclass(frozen=True)
class Speed:
    concurrency: int
    plots: tuple[tuple[str, Markup], ...]
    """Title and plot; none without a sweep over concurrencies."""
    variants: tuple[Cell, ...]
    table: Table
    fallbacks: tuple[tuple[str, str], ...]
    """Variant, and the slower paths that vLLM logged for it."""


def speed(evaluations: Sequence[Evaluation], variants: Variants) -> Speed:
    swept = any(each.sweep for each in evaluations)
    names = variants.cells(each.variant for each in evaluations)
    fields = ("ttft_ms", "e2el_ms") if swept else ()
    return Speed(
        concurrency=evaluations[0].load.concurrency,
        plots=tuple((LATENCIES[field], _over_concurrency(evaluations, field, variants)) for field in fields),
        variants=names,
        table=Table("load", (*heads("Measure"), *names), tuple(_rows(evaluations))),
        fallbacks=tuple(
            (each.variant, "; ".join(each.engine.fallbacks[:FALLBACKS_SHOWN]))
            for each in evaluations
            if each.engine.fallbacks
        ),
    )


def _over_concurrency(evaluations: Sequence[Evaluation], field: str, variants: Variants) -> Markup:
    """p50 and p95 of a latency at every concurrency that was measured."""
    lines = []
    for each in evaluations:
        points = sorted([*each.sweep, each.load], key=lambda load: load.concurrency)
        times: list[Percentiles] = [getattr(point, field) for point in points]
        lines.append(
            plots.Line(
                variant=each.variant,
                style=variants.styles[each.variant],
                at=tuple(float(point.concurrency) for point in points),
                p50=tuple(each.p50 for each in times),
                p95=tuple(each.p95 for each in times),
            )
        )
    title = LATENCIES[field]
    return plots.lines(f"load-{field.replace('_', '-')}", title, f"{title}, ms", lines)


def _rows(evaluations: Sequence[Evaluation]) -> list[Row]:
    def each_of(label: Cell, shown: Callable[[Evaluation], Cell]) -> Row:
        return row(label, *(shown(each) for each in evaluations))

    rows = [
        row(cell(label, "ms, p50 / p95 / p99"), *(_percentiles(getattr(each.load, field)) for each in evaluations))
        for field, label in LATENCIES.items()
    ]
    for at in sorted({point.concurrency for each in evaluations for point in each.sweep}):
        swept = [next((point for point in each.sweep if point.concurrency == at), None) for each in evaluations]
        label = cell(f"{at} in flight", "first token, then end to end: ms, p50 / p95")
        rows.append(row(label, *(_swept(point) if point else ABSENT for point in swept)))
    rows.append(each_of(cell("Output tokens/s", "mean, and each round"), _rates))
    targets = next((each.goodput for each in evaluations if each.goodput), None)
    if targets:
        within = f"within {targets.ttft_ms:g} ms to the first token and {targets.tpot_ms:g} ms per token"
        rows.append(each_of(cell("Goodput", within), _goodput))
    rows.append(each_of(cell("Requests"), lambda each: cell(str(each.load.requests))))
    rows.append(each_of(cell("Weights"), lambda each: cell(f"{si(each.memory.weights_bytes)}B")))
    rows.append(each_of(cell("Peak memory of the server"), _peak))
    rows.append(each_of(cell("KV cache", "tokens"), lambda each: cell(f"{each.memory.kv_cache_tokens:,}")))
    rows.append(each_of(cell("Kernel", "of the quantized layers, from vLLM’s log"), _kernel))
    return rows


def _percentiles(times: Percentiles) -> Cell:
    digits = 1 if times.p99 < 1000 else 0
    return cell(" / ".join(f"{value:,.{digits}f}" for value in (times.p50, times.p95, times.p99)))


def _swept(load: Load) -> Cell:
    return Cell(tuple(f"{times.p50:,.0f} / {times.p95:,.0f}" for times in (load.ttft_ms, load.e2el_ms)))


def _rates(evaluation: Evaluation) -> Cell:
    rounds = [f"{each.output_tokens_per_s:,.0f}" for each in evaluation.rounds]
    listed = " · ".join(rounds[:ROUNDS_SHOWN]) + (" …" if len(rounds) > ROUNDS_SHOWN else "")
    return cell(f"{evaluation.load.output_tokens_per_s:,.1f}", listed)


def _goodput(evaluation: Evaluation) -> Cell:
    found = evaluation.goodput
    return cell(percent(found.share, 1), f"{found.output_tokens_per_s:,.1f} tokens/s") if found else ABSENT


def _peak(evaluation: Evaluation) -> Cell:
    memory = evaluation.memory
    gpu = [] if memory.peak_gpu_bytes is None else [f"+ {gib(memory.peak_gpu_bytes)} GPU"]
    return cell(gib(memory.peak_resident_bytes), *gpu)


def _kernel(evaluation: Evaluation) -> Cell:
    engine = evaluation.engine
    if not engine.quantization:
        return cell(engine.kernel or "–", code=True)
    return cell(engine.kernel or "not logged", engine.quantization, code=True)
