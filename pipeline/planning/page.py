"""The plan as a person reads it in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pipeline.planning.document import Plan
from scoring.capacity.plan import Option, shortlist
from scoring.metrics import si
from scoring.units import GIB, MIB

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

FIRST: Final = "★ "
MISSES: Final = "× "


def summary(plan: Plan) -> str:
    """The lines above the table."""
    counts = f"{si(plan.parameters.total)} parameters"
    if plan.parameters.experts:
        counts += f", {si(plan.parameters.active)} active per token"
    weights = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.stored_bytes.items())
    cache = f"{plan.kv_bytes_per_token:,} bytes per token"
    if plan.state_bytes_per_sequence:
        cache += f" and {plan.state_bytes_per_sequence / MIB:.1f} MiB per sequence"
    given = (("TTFT", plan.targets.ttft_ms), ("TPOT", plan.targets.tpot_ms))
    targets = " and ".join(f"{name} ≤ {value:g} ms" for name, value in given if value) or "no targets"
    asked = f"{plan.prompt_tokens} tokens in, {plan.output_tokens} out, {plan.peak} in flight at the peak, {targets}"
    return (
        f"{plan.model}: {counts}\n"
        f"weights in GiB: {weights}; KV cache: {cache}\n"
        f"workload {plan.workload}: {asked}; {plan.context:,} tokens of context"
    )


def plan_table(plan: Plan, *, every: bool = False) -> Table:
    """One row for each variant and type of GPU; with *every*, one for each number of GPUs."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("Variant", no_wrap=True)
    table.add_column("GPUs", no_wrap=True)
    for heading in ("Longest\ncontext", "KV cache\ntokens", "At\nonce", "TTFT\nms", "TPOT\nms", "tok/s", "Repli-\ncas"):
        table.add_column(heading, justify="right", no_wrap=True)
    priced = any(option.cost_per_hour for option in plan.options)
    for heading in (f"{plan.currency}\nper hour", f"{plan.currency}\n1 M tok") if priced else ():
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [option for option in (plan.options if every else shortlist(plan.options)) if option.fits]
    for number, option in enumerate(rows):
        mark = MISSES if not option.meets_targets else FIRST if number == 0 else "  "
        style = {FIRST: "bold", MISSES: "dim"}.get(mark, "")
        table.add_row(mark + option.variant, _gpus(option), *_figures(option, priced), style=style)
    return table


def automatic(plan: Plan) -> list[str]:
    """What a run would take on each type of GPU."""
    lines = []
    for each in plan.automatic:
        if each.refused:
            lines.append(f"a run on {each.accelerator} is refused: {'; '.join(each.notes)}")
            continue
        length = f"{each.max_model_len:,} tokens of context" if each.max_model_len else "the model's own context"
        rest = [f"without {name} ({why})" for name, why in each.left_out.items()]
        lines.append("; ".join([f"a run takes {each.tensor_parallel_size} × {each.accelerator}, {length}", *rest]))
        lines += each.notes
    return lines


def notes(plan: Plan, *, every: bool = False) -> list[str]:
    """The lines below the table: what does not fit and why, and what was assumed."""
    shown = plan.options if every else shortlist(plan.options)
    lines = automatic(plan)
    lines += [_memory(plan.options[0])] if plan.options[0].fits else []
    refused = {run.accelerator for run in plan.automatic if run.refused}
    lines += [
        f"{option.variant} on {_gpus(option)} does not fit: {'; '.join(option.reasons)}"
        for option in shown
        if not option.fits and option.accelerator not in refused
    ]
    if any(each.fits and not each.meets_targets for each in shown):
        lines.append(f"{MISSES}misses a target even with one request at a time")
    if not any(option.cost_per_hour for option in plan.options):
        lines.append("without prices (--price h100=2.50), the order is by the total memory of the GPUs")
    measured = {calibration.accelerator for calibration in plan.calibrations}
    lines += [
        f"{calibration.accelerator}: times × {calibration.ttft:.2f} (TTFT) and × {calibration.tpot:.2f} (TPOT), "
        f"as measured in {calibration.evaluations} evaluation(s) of this store"
        for calibration in plan.calibrations
    ]
    if any(option.accelerator not in measured for option in plan.options):
        lines.append(
            "assumed: "
            + "; ".join(
                f"{assumption.name} {assumption.value:g} {assumption.unit}".strip() for assumption in plan.assumptions
            )
        )
    return lines


def _memory(option: Option) -> str:
    memory = option.memory
    parts = (
        ("weights", memory.weights_gib),
        ("activations", memory.activations_gib),
        ("CUDA graphs", memory.cuda_graphs_gib),
        ("runtime", memory.runtime_gib),
        ("KV cache", memory.kv_cache_gib),
    )
    taken = " + ".join(f"{name} {size:.1f}" for name, size in parts if size)
    return f"{option.variant} on {_gpus(option)}: {taken} GiB, of {memory.usable_gib:.1f} usable on each GPU"


def _gpus(option: Option) -> str:
    return f"{option.gpus} × {option.accelerator}"


def _figures(option: Option, priced: bool) -> list[str]:
    predicted = option.predicted
    cells = [f"{option.longest_context:,}", f"{option.kv_cache_tokens:,}"]
    if predicted is None:
        return [*cells, *["–"] * (7 if priced else 5)]
    cells += [f"{predicted.sequences}", f"{predicted.ttft_ms:,.0f}", f"{predicted.tpot_ms:.1f}"]
    cells += [f"{predicted.output_tokens_per_s:,.0f}", f"{option.replicas}"]
    costs = (option.cost_per_hour, option.cost_per_million_tokens)
    return cells + ([f"{cost:,.2f}" if cost is not None else "–" for cost in costs] if priced else [])


def page(plan: Plan, *, every: bool = False) -> Group:
    """The summary, the table and the notes; with *every*, every number of GPUs."""
    from rich.console import Group

    return Group(summary(plan), "", plan_table(plan, every=every), "", "\n".join(notes(plan, every=every)))
