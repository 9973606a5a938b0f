"""What the plan predicts beside what was measured, with the error."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scoring.capacity.architecture import NotSizeable
from scoring.units import MIB
from stages.parts.base.errors import ConfigError
from stages.parts.base.store import ModelStore
from stages.parts.machine.accelerators import catalogue
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.variant import Variant
from stages.parts.vllm.prediction import predict, sized
from stages.report.cells import ABSENT, Cell, Table, Variants, cell, gib, heads, row
from stages.report.run_report import PredictedFigures


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
