"""The plan as a person reads it in a terminal."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pipeline.planning.document import PlanDocument
from scoring.capacity.plan import Option, shortlist
from scoring.metrics import si
from scoring.names import recipe_of
from scoring.units import GIB, MIB

FIRST: Final = "★ "
MISSES: Final = "× "


def page(plan: PlanDocument, *, every: bool = False) -> Group:
    """Lay out the summary, the table and the notes; with *every*, for every number of GPUs."""
    options = list(plan.options) if every else shortlist(plan.options)
    return Group(summary(plan), "", _table(plan, options), "", Text("\n".join(_notes(plan, options))))


def summary(plan: PlanDocument) -> str:
    """Write the lines above the table."""
    counts = f"{si(plan.parameters.total)} parameters"
    if plan.parameters.experts:
        counts += f", {si(plan.parameters.active)} active per token"
    weights = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.stored_bytes.items())
    cache = f"{plan.kv_bytes_per_token:,} bytes per token"
    if plan.state_bytes_per_sequence:
        cache += f" and {plan.state_bytes_per_sequence / MIB:.1f} MiB per sequence"
    limits = (("TTFT", plan.targets.ttft_ms), ("TPOT", plan.targets.tpot_ms))
    targets = " and ".join(f"{name} ≤ {value:g} ms" for name, value in limits if value) or "no targets"
    load = f"{plan.prompt_tokens} tokens in, {plan.output_tokens} out, {plan.peak} in flight at the peak, {targets}"
    return (
        f"{plan.model}: {counts}\n"
        f"weights in GiB: {weights}; KV cache: {cache}\n"
        f"workload {plan.workload}: {load}; {plan.context:,} tokens of context"
    )


def _table(plan: PlanDocument, options: list[Option]) -> Table:
    priced = any(option.cost_per_hour for option in plan.options)
    headings = ["Longest\ncontext", "KV cache\ntokens", "At\nonce", "TTFT\nms", "TPOT\nms", "tok/s", "Repli-\ncas"]
    headings += [f"{plan.currency}\nper hour", f"{plan.currency}\n1 M tok"] if priced else []
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("Candidate", no_wrap=True)
    table.add_column("GPUs", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, option in enumerate(option for option in options if option.fits):
        mark = MISSES if not option.meets_targets else FIRST if number == 0 else "  "
        style = {FIRST: "bold", MISSES: "dim"}.get(mark, "")
        table.add_row(mark + option.variant, _gpus(option), *_figures(option)[: len(headings)], style=style)
    return table


def _figures(option: Option) -> list[str]:
    predicted, costs = option.predicted, (option.cost_per_hour, option.cost_per_million_tokens)
    speeds = ["–"] * 5
    if predicted:
        speeds = [f"{predicted.sequences}", f"{predicted.ttft_ms:,.0f}", f"{predicted.tpot_ms:.1f}"]
        speeds += [f"{predicted.output_tokens_per_s:,.0f}", f"{option.replicas}"]
    priced = [f"{cost:,.2f}" if cost is not None else "–" for cost in costs]
    return [f"{option.longest_context:,}", f"{option.kv_cache_tokens:,}", *speeds, *priced]


def _notes(plan: PlanDocument, options: list[Option]) -> list[str]:
    """Write the lines below the table: what a run would take, what does not fit and why, and what was assumed."""
    refused = {run.accelerator for run in plan.automatic if run.refused}
    lines = [*_runs(plan), *_untried(plan)]
    lines += [_memory(plan.options[0])] if plan.options[0].fits else []
    lines += [
        f"{option.variant} on {_gpus(option)} does not fit: {'; '.join(option.reasons)}"
        for option in options
        if not option.fits and option.accelerator not in refused
    ]
    if any(option.fits and not option.meets_targets for option in options):
        lines.append(f"{MISSES}misses a target even with one request at a time")
    if any(recipe_of(option.variant) for option in options):
        lines.append("recipes: by their KV cache and GPUs; what speculation and batch limits change is only measured")
    if not any(option.cost_per_hour for option in plan.options):
        lines.append("without prices (--price h100=2.50), the order is by the total memory of the GPUs")
    lines += [
        f"{calibration.accelerator}: times × {calibration.ttft:.2f} (TTFT) and × {calibration.tpot:.2f} (TPOT), "
        f"as measured in {calibration.evaluations} evaluation(s) of this store"
        for calibration in plan.calibrations
    ]
    lines += [f"{name} took to start, as measured: {start.text}" for name, start in plan.starts.items()]
    if {option.accelerator for option in plan.options} - {calibration.accelerator for calibration in plan.calibrations}:
        figures = (f"{figure.name} {figure.value:g} {figure.unit}".strip() for figure in plan.assumptions)
        lines.append(f"assumed: {'; '.join(figures)}")
    return lines


def _runs(plan: PlanDocument) -> list[str]:
    """Say what a run would take on each type of GPU."""
    lines = []
    for run in plan.automatic:
        if run.refused:
            lines.append(f"a run on {run.accelerator} is refused: {'; '.join(run.notes)}")
            continue
        length = f"{run.max_model_len:,} tokens of context" if run.max_model_len else "the model's own context"
        without = [f"without {name} ({why})" for name, why in run.left_out.items()]
        takes = f"a run takes {run.tensor_parallel_size} × {run.accelerator}"
        if run.accelerator not in {option.accelerator for option in plan.options}:
            takes = f"a run on {run.accelerator} takes no GPU"
        tried = [f"and tries {', '.join(names)}"] if (names := list(filter(recipe_of, run.candidates))) else []
        lines.append("; ".join([f"{takes}, {length}", *tried, *without]))
        lines += run.notes
    return lines


def _untried(plan: PlanDocument) -> list[str]:
    """Say what *auto* tries on which hardware, and why it does not try the others."""
    tried, untried = defaultdict(list), defaultdict(list)
    for run in (each for each in plan.automatic if each.untried and not each.refused):
        tried[run.candidates].append(run.accelerator)
        for name, why in run.untried.items():
            untried[name, why].append(run.accelerator)
    lines = [f"auto tries {', '.join(names)} on {', '.join(places)}" for names, places in tried.items()]
    return lines + [f"{name} is not tried on {', '.join(places)}: {why}" for (name, why), places in untried.items()]


def _memory(option: Option) -> str:
    memory = option.memory
    sizes = {
        "weights": memory.weights_gib,
        "activations": memory.activations_gib,
        "CUDA graphs": memory.cuda_graphs_gib,
        "runtime": memory.runtime_gib,
        "KV cache": memory.kv_cache_gib,
    }
    terms = " + ".join(f"{name} {size:.1f}" for name, size in sizes.items() if size)
    return f"{option.variant} on {_gpus(option)}: {terms} GiB, of {memory.usable_gib:.1f} usable on each GPU"


def _gpus(option: Option) -> str:
    return f"{option.tensor_parallel_size} × {option.accelerator}"
