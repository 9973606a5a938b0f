"""``slipway plan``: what a model needs, before anything is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands.options import (
    STORE,
    ConfigOption,
    JsonOption,
    PlatformOption,
    SetOption,
    StoreOption,
    WorkloadOption,
    load_config,
    print_result,
)

ModelArgument = Annotated[
    str, typer.Argument(help="Name on the Hugging Face Hub, or a local directory such as ./my-model.")
]
RevisionOption = Annotated[str, typer.Option(help="Branch, tag or commit.")]
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


def register(app: typer.Typer) -> None:
    app.command("plan", epilog="Example: slipway plan org/name --gpu l40s,h100 --peak 50 --slo ttft=1s,tpot=50ms")(plan)


def plan(
    model: ModelArgument,
    revision: RevisionOption = "main",
    gpu: GpuOption = None,
    length: LengthOption = None,
    peak: PeakOption = None,
    slo: SloOption = None,
    price: PriceOption = None,
    accelerators: AcceleratorsOption = None,
    every: AllOption = False,
    workload: WorkloadOption = None,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Say what a model needs on each type of GPU, what it costs, and how fast it would be; download no weights.

    Reads only config.json and the index (or the header) of the weights. The cheapest choice that meets the targets
    comes first. What a run has measured on the same type of GPU corrects the predicted times.
    """
    from pipeline.planning import document
    from pipeline.planning.page import page
    from stages.parts.machine.accelerators import catalogue
    from stages.parts.model.description import describe_model
    from stages.parts.vllm.prediction import calibrations

    settings = load_config(config, None, workload, platform, assignments)
    known = catalogue(accelerators)
    named, described = document.choose_accelerators(known, gpu), describe_model(model, revision)
    chosen = document.with_prices(named, price or (), settings, described)
    targets = document.parse_targets(slo) if slo else None
    made = document.make_plan(
        described,
        settings,
        chosen,
        context=length,
        peak=peak,
        targets=targets,
        calibrations=calibrations(store, known),
    )
    print_result(made.model_dump(mode="json"), page(made, every=every), as_json)
