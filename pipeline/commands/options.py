"""The options that commands share, reading the settings, and printing the result.

Options that belong together are a group: a frozen dataclass whose fields are options. A command that has a parameter of
such a type has all its options, once ``add`` has added the command to the command line:

    def stop(name: RunArgument = "latest", *, where: Where) -> None: ...
    add(app, stop, "stop latest")
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer
from typer.core import TyperGroup

from stages.parts.base.errors import ConfigError

if TYPE_CHECKING:
    from typer.core import TyperOption

    from pipeline.argo.engine import ArgoEngine
    from pipeline.runs.engine import PipelineEngine
    from pipeline.settings.config import RunConfig
    from stages.parts.base.store import ModelStore
    from stages.parts.cluster.api import Cluster

RUN_PREFIX: Final = "slipway-"
"""The beginning of the names of runs on a cluster; ids of runs on this machine begin with a date."""
STORE: Final = Path(".slipway")

ModelArgument = Annotated[str, typer.Argument(help="A model that a run has published.")]
AnyModelArgument = Annotated[
    str, typer.Argument(help="Name on the Hugging Face Hub, or a local directory such as ./my-model.")
]
RunArgument = Annotated[str, typer.Argument(metavar="[RUN]", help="A run's id, or its beginning.")]
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
RevisionOption = Annotated[str, typer.Option(help="Branch, tag or commit.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(envvar="SLIPWAY_PROFILE", help="Scoring profile: a name in configs/profiles, or a YAML file."),
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(envvar="SLIPWAY_WORKLOAD", help="Load to measure with: a name in configs/workloads, or a YAML file."),
]
AllowIncompleteOption = Annotated[
    bool, typer.Option("--allow-incomplete", help="Go on if a variant could not be made or measured.")
]
FollowOption = Annotated[bool, typer.Option(help="On a cluster: wait until the run ends.")]
ContextOption = Annotated[
    str | None,
    typer.Option("--context", help="Context of the kubeconfig, with --engine argo. Default: the current one."),
]


class WorkflowEngine(StrEnum):
    LOCAL = "local"
    ARGO = "argo"


@dataclasses.dataclass(frozen=True)
class ConfigOptions:
    """The settings of a command: a file, a platform, and single fields."""

    platform: Annotated[
        str | None, typer.Option(envvar="SLIPWAY_PLATFORM", help="Where it runs: a name in configs/platforms.")
    ] = None
    config: ConfigOption = None
    assignments: SetOption = None

    def load(
        self,
        *,
        platform: str | None = None,
        profile: str | None = None,
        workload: str | None = None,
        assignments: Sequence[str] = (),
    ) -> RunConfig:
        """Read the settings. *platform* counts instead of ``--platform``, *assignments* beside those of ``--set``."""
        from pipeline.settings.config import load

        if self.config is not None and not self.config.is_file():
            raise ConfigError(f"there is no file {self.config}", hint="--config takes a YAML file")
        names = {"profile": profile, "workload": workload, "platform": platform or self.platform}
        return load(self.config, chosen=names, assignments=[*(self.assignments or ()), *assignments])

    def of_cluster(self, **names: Any) -> RunConfig:
        """Read the settings of a cluster. Raises: ConfigError: the platform is this machine."""
        from pipeline.settings.config import names as names_of

        settings = self.load(**names)
        if settings.platform.cluster is None:
            clusters = ", ".join(name for name in names_of("platform") if name != "local")
            raise ConfigError(
                f"the platform {settings.platform.name} is one machine, not a cluster",
                hint=f"--platform, or SLIPWAY_PLATFORM: one of {clusters}",
            )
        return settings


@dataclasses.dataclass(frozen=True)
class Where:
    """Where runs and models are: in a store on this machine, or in a namespace of a cluster."""

    store: StoreOption = STORE
    engine: Annotated[
        WorkflowEngine | None,
        typer.Option(
            envvar="SLIPWAY_ENGINE", help="local: this machine (default). argo: Argo Workflows on a Kubernetes cluster."
        ),
    ] = None
    context: ContextOption = None
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", envvar="SLIPWAY_NAMESPACE", help="Namespace of the runs, with --engine argo."
        ),
    ] = None

    @property
    def on_cluster(self) -> bool:
        return self.engine is WorkflowEngine.ARGO

    def settings(self, options: ConfigOptions, **names: Any) -> RunConfig:
        """Read the settings of what runs there. On this machine the platform is ``local``."""
        return options.of_cluster(**names) if self.on_cluster else options.load(platform="local", **names)

    def engine_of(self, run: str = "", settings: RunConfig | None = None, *, follow: bool = True) -> PipelineEngine:
        """Return the chosen engine; if none was chosen, the one that the name of *run* belongs to.

        With *follow*, that of a cluster waits until a run that it starts has ended.
        """
        if self.on_cluster or (self.engine is None and run.startswith(RUN_PREFIX)):
            return argo_engine(self.cluster(settings), follow=follow)
        from pipeline.local.engine import LocalEngine

        return LocalEngine(self.store)

    def cluster(self, settings: RunConfig | None = None, *, namespace: str | None = None) -> Cluster:
        """Connect to the cluster, in the first namespace that is known: that of ``--namespace``, *namespace*, those of
        *settings*, of the platform in ``SLIPWAY_PLATFORM``, and of the kubeconfig."""
        from stages.parts.cluster.api import connect

        namespace = self.namespace or namespace or (settings.platform.namespace if settings else None)
        if namespace is None and (name := os.environ.get("SLIPWAY_PLATFORM")):
            platform = ConfigOptions(platform=name).load().platform
            namespace = platform.namespace if platform.cluster else None
        return connect(self.context, namespace)


def argo_engine(cluster: Cluster, *, follow: bool) -> ArgoEngine:
    """Return the engine of a cluster. What checks that it can serve a model is imported only for that."""
    from pipeline.argo.engine import ArgoEngine

    def check_serving(cluster: Cluster, config: RunConfig, model: str) -> None:
        from pipeline.cluster import doctor

        doctor.check_serving(cluster, config, model)

    return ArgoEngine(cluster, check_serving, follow=follow)


class _Group(TyperGroup):
    """A group of commands whose own help option is known to be off without pydantic, whose import takes longer than
    printing a command's help."""

    def get_help_option(self, ctx: Any) -> TyperOption | None:
        option = super().get_help_option(ctx)
        if option:
            option.default = False
        return option


def command_group(text: str, example: str, **options: Any) -> typer.Typer:
    """Return a group of commands with a help *text* and an example. It needs no rich, whose import takes 0.3 s."""
    return typer.Typer(
        cls=_Group, help=text, epilog=_epilog(example), no_args_is_help=True, rich_markup_mode=None, **options
    )


def add(app: typer.Typer, command: Callable[..., None], example: str, name: str | None = None) -> None:
    """Add a command, with the options of its groups, and an example as the last line of its help.

    Without a *name*, it has the function's, with hyphens.
    """
    app.command(name, epilog=_epilog(example))(grouped(command))


def _epilog(example: str) -> str:
    return f"Example: slipway {example}"


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of the groups that *command* takes, and *command* the groups."""
    types = get_type_hints(command, include_extras=True)
    declared = inspect.signature(command).parameters
    groups = {name: types[name] for name in declared if dataclasses.is_dataclass(types[name])}
    parameters = [declared[name].replace(annotation=types[name]) for name in declared if name not in groups]
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=hints[field.name]))

    @functools.wraps(command)
    def called(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def model_store(store: Path, model: str) -> ModelStore:
    """Return the folder in the store, which need not exist, of a model on the Hub or in a local directory."""
    from stages.parts.model.name import ModelName

    return ModelName.parse(model).store(store)


def print_result(document: Any, text: Any, as_json: bool) -> None:
    """Print the result to stdout: JSON for programs, or *text* (a string or anything that rich can draw). In a pod, it
    becomes the output ``PRINTED`` too, for whoever runs the command from elsewhere."""
    from stages.parts.base.program import PRINTED, write_output

    if as_json:
        printed = json.dumps(document, indent=2) + "\n"
        sys.stdout.write(printed)
    else:
        from rich.console import Console

        # A pipe has no width, and the default of 80 columns would cut tables.
        terminal = sys.stdout.isatty()
        console = Console(width=None if terminal else 200, highlight=False, soft_wrap=not terminal, record=True)
        console.print(text)
        printed = console.export_text()
    write_output(PRINTED, printed)
