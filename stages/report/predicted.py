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
from stages.report.run_report import Predicted


def predictions(
    store: ModelStore, variants: Sequence[Variant], evaluations: Sequence[Evaluation]
) -> tuple[Predicted, ...]:
    """The predictions for the evaluated variants, as far as the model can be sized."""
    base, found = sized(store), []
    if base is None:
        return ()
    made = {variant.variant: variant for variant in variants}
    try:
        known = catalogue()
    except ConfigError:  # in the user's own catalogue; a report is written nevertheless
        known = {}
    for evaluation in evaluations:
        try:
            each = predict(base, evaluation, made[evaluation.variant], known) if evaluation.variant in made else None
        except NotSizeable:
            continue
        if each:
            found.append(
                Predicted(
                    variant=evaluation.variant,
                    weights_bytes=each.weights_bytes,
                    kv_cache_tokens=each.kv_cache_tokens,
                    ttft_ms=each.speed.ttft_ms if each.speed else None,
                    tpot_ms=each.speed.tpot_ms if each.speed else None,
                )
            )
    return tuple(found)


def predicted(found: Sequence[Predicted], evaluations: Sequence[Evaluation], variants: Variants) -> Table | None:
    """One row for each figure, one column for each variant; None without a prediction."""
    by_variant = {each.variant: each for each in found}
    pairs = [
        (by_variant[evaluation.variant], evaluation) for evaluation in evaluations if evaluation.variant in by_variant
    ]
    if not pairs:
        return None
    rows = [
        row(cell("Weights"), *(_cell(p.weights_bytes, e.memory.weights_bytes, _size) for p, e in pairs)),
        row(
            cell("KV cache", "tokens"),
            *(_cell(p.kv_cache_tokens, e.memory.kv_cache_tokens, "{:,.0f}".format) for p, e in pairs),
        ),
    ]
    if any(p.tpot_ms for p, _ in pairs):
        rows += [
            row(cell("TTFT", "mean, ms"), *(_cell(p.ttft_ms, e.load.ttft_ms.mean, "{:,.1f}".format) for p, e in pairs)),
            row(cell("TPOT", "mean, ms"), *(_cell(p.tpot_ms, e.load.tpot_ms.mean, "{:,.1f}".format) for p, e in pairs)),
        ]
    names = variants.cells(each.variant for _, each in pairs)
    return Table("predicted", (*heads("Predicted"), *names), tuple(rows))


def _cell(predicted_value: float | None, measured: float, shown: Callable[[float], str]) -> Cell:
    if predicted_value is None or not measured:
        return ABSENT
    error = f"{100 * (predicted_value / measured - 1):+.1f}%".replace("-", "−")
    return cell(shown(predicted_value), f"measured {shown(measured)}", f"error {error}")


def _size(size_bytes: float) -> str:
    return gib(int(size_bytes)) if size_bytes >= 1024 * MIB else f"{size_bytes / MIB:,.2f} MiB"
