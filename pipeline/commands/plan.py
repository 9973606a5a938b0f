"""``slipway plan`` and ``render``: say what a model needs and what would run, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.commands import options as common
from pipeline.runs.engine import Printout
from stages.parts.base.errors import check_known

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig

GpuOption = Annotated[str | None, typer.Option(help="GPUs to compare, such as l4,h100. Default: the whole catalogue.")]
LengthOption = Annotated[
    int | None,
    typer.Option("--context", min=1, help="Tokens of prompt and answer to have room for. Default: the model's own."),
]
PeakOption = Annotated[
    int | None, typer.Option(min=1, help="Requests in flight at the peak. Default: the workload's concurrency.")
]
SloOption = Annotated[str | None, typer.Option(help="Targets, such as ttft=1s,tpot=50ms. Default: the workload's.")]
PriceOption = Annotated[
    list[str] | None, typer.Option(metavar="GPU=PRICE", help="Price of one GPU per hour, such as h100=2.50.")
]
AcceleratorsOption = Annotated[
    Path | None,
    typer.Option(envvar="SLIPWAY_ACCELERATORS", help="YAML with GPUs of your own, as in configs/accelerators.yaml."),
]
AllOption = Annotated[bool, typer.Option("--all", help="Show every number of GPUs, not only the best.")]

commands = common.Commands()


@commands.add("plan org/name --gpu l40s,h100 --peak 50 --slo ttft=1s,tpot=50ms")
def plan(
    model: common.AnyModelArgument,
    revision: common.RevisionOption = "main",
    gpu: GpuOption = None,
    length: LengthOption = None,
    peak: PeakOption = None,
    slo: SloOption = None,
    price: PriceOption = None,
    accelerators: AcceleratorsOption = None,
    every: AllOption = False,
    workload: common.WorkloadOption = None,
    candidates: common.CandidatesOption = None,
    *,
    options: common.LocalOptions,
) -> Printout:
    """Say what a model needs on each type of GPU.

    Also says what it costs and how fast it would be. Reads only config.json and the index (or the header) of the
    weights, and downloads none. The cheapest choice that meets the targets comes first. What a run has measured on the
    same type of GPU corrects the predicted times.
    """
    from pipeline.planning import document
    from pipeline.planning.page import page
    from pipeline.planning.refusal import refuse_adapters
    from stages.parts.machine.accelerators import catalogue
    from stages.parts.model.candidates import with_candidates
    from stages.parts.model.description import describe_model
    from stages.parts.model.name import ModelName

    settings = options.load(workload=workload, assignments=common.candidates_set(candidates))
    gpus, described = catalogue(accelerators), describe_model(model, revision)
    refuse_adapters(settings, described)
    described = with_candidates(described, settings.optimize.candidates, ModelName.parse(model).id)
    priced = document.with_prices(document.choose_accelerators(gpus, gpu), price or (), settings, described)
    targets = document.parse_targets(slo) if slo else None
    answer = document.make_plan(
        described, settings, priced, context=length, peak=peak, targets=targets, store=options.of_model(model)
    )
    return Printout(answer, page(answer, every=every))


@commands.add("render workflow | kubectl apply -f -")
def render(
    document: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="workflow: the Argo WorkflowTemplate. config: every setting that applies. events, poll, fleet: what "
            "starts runs on a cluster, with the platform's image.",
        ),
    ],
    profile: common.ProfileOption = None,
    workload: common.WorkloadOption = None,
    *,
    options: common.ConfigOptions,
) -> None:
    """Print manifests or settings, without running anything."""
    import yaml

    from pipeline.cluster.manifests import TRIGGERS, for_triggers
    from pipeline.local.engine import render as workflow

    renderers: dict[str, Callable[[RunConfig], list[dict[str, Any]]]] = {
        "workflow": lambda settings: [workflow(settings)],
        "config": lambda settings: [settings.model_dump(mode="json")],
        **{name: partial(for_triggers, name) for name in TRIGGERS},
    }
    check_known("thing to render", document, renderers)
    documents = renderers[document](options.load(profile=profile, workload=workload))
    yaml.safe_dump_all(documents, sys.stdout, sort_keys=False, allow_unicode=True, width=120)
