"""What the commands share: their options, reading the configuration, printing the result."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from stages.parts.base.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig

StoreOption = Annotated[
    Path, typer.Option("--store", envvar="SLIPWAY_STORE", help="Folder of models, variants, releases and runs.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", envvar="SLIPWAY_CONFIG", help="YAML with any part of configs/defaults.yaml.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="One setting, e.g. serving.max_model_len=4096.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option(envvar="SLIPWAY_PROFILE", help="Scoring profile: a name in configs/profiles, or a YAML file."),
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(envvar="SLIPWAY_WORKLOAD", help="What is measured: a name in configs/workloads, or a YAML file."),
]
BudgetOption = Annotated[
    float | None, typer.Option(help="Minutes for measuring all variants of a model: workload.budget_minutes.")
]
AllowIncompleteOption = Annotated[
    bool, typer.Option("--allow-incomplete", help="Go on if a variant could not be made or measured.")
]
PlatformOption = Annotated[
    str | None, typer.Option(envvar="SLIPWAY_PLATFORM", help="Where it runs: a name in configs/platforms.")
]
RunArgument = Annotated[str, typer.Argument(metavar="[RUN]", help="A run's id, or its beginning.")]
STORE: Final = Path(".slipway")


class WorkflowEngine(StrEnum):
    LOCAL = "local"
    ARGO = "argo"


EngineOption = Annotated[
    WorkflowEngine | None,
    typer.Option(
        envvar="SLIPWAY_ENGINE", help="local: this machine (default). argo: Argo Workflows on a Kubernetes cluster."
    ),
]
ContextOption = Annotated[
    str | None,
    typer.Option("--context", help="Context of the kubeconfig, with --engine argo. Default: the current one."),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", envvar="SLIPWAY_NAMESPACE", help="Namespace of the runs, with --engine argo."),
]


def load_config(
    file: Path | None, profile: str | None, workload: str | None, platform: str | None, assignments: list[str] | None
) -> RunConfig:
    from pipeline.settings.config import load

    if file is not None and not file.is_file():
        raise ConfigError(f"there is no file {file}", hint="--config takes a YAML file")
    chosen = {"profile": profile, "workload": workload, "platform": platform}
    return load(file, chosen=chosen, assignments=assignments or [])


def print_result(document: Any, text: Any, as_json: bool) -> None:
    """Print the result to stdout: JSON for programs, or *text* (a string or anything that rich can draw). In a pod, it
    becomes the output ``PRINTED`` too, for whoever runs the command from elsewhere."""
    from stages.parts.base.program import PRINTED, write_output

    if as_json:
        said = json.dumps(document, indent=2) + "\n"
        sys.stdout.write(said)
    else:
        from rich.console import Console

        # A pipe has no width, and the default of 80 columns would cut tables.
        terminal = sys.stdout.isatty()
        console = Console(width=None if terminal else 200, highlight=False, soft_wrap=not terminal, record=True)
        console.print(text)
        said = console.export_text()
    write_output(PRINTED, said)
