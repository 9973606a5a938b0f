"""The options that commands share, reading the settings, and printing the result.

Options that belong together are a group: a frozen dataclass whose fields are options. A command that has a parameter of
such a type has all its options. One that returns a ``Printout`` has ``--json``, and what it returns is printed:

    @commands.add("report latest")
    def report(name: RunArgument = "latest", *, where: Where) -> Printout: ...
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from pipeline.runs.engine import Printout
from stages.parts.base.errors import ConfigError, SlipwayError
from stages.parts.base.log import say

if TYPE_CHECKING:
    from typer.core import TyperOption

    from pipeline.argo.engine import ArgoEngine
    from pipeline.runs.engine import PipelineEngine
    from pipeline.settings.config import RunConfig
    from stages.parts.base.store import ModelStore
    from stages.parts.cluster.api import Cluster

RUN_PREFIX: Final = "slipway-"
"""The beginning of the names of runs on a cluster; ids of runs on this machine begin with a date."""
EXAMPLE: Final = "Example: slipway "
Command: TypeAlias = Callable[..., Printout | None]

ModelArgument = Annotated[str, typer.Argument(help="A model that a run has published.")]
AnyModelArgument = Annotated[
    str, typer.Argument(help="Name on the Hugging Face Hub, or a local directory such as ./my-model.")
]
ReleaseOption = Annotated[
    str | None, typer.Option("--release", help="A release's number or name. Default: the one in production.")
]
RunArgument = Annotated[str, typer.Argument(metavar="[RUN]", help="A run's id, or its beginning.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", envvar="SLIPWAY_CONFIG", help="YAML with any part of configs/defaults.yaml.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="One setting, e.g. serving.max_model_len=4096.")
]
PlatformOption = Annotated[
    str | None, typer.Option(envvar="SLIPWAY_PLATFORM", help="Where it runs: a name in configs/platforms.")
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
CandidatesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--candidate",
        metavar="NAME[@REVISION]",
        help="Another checkpoint of the same model on the Hub, such as one in FP8, that is measured, too: "
        "optimize.candidates. Its variant is named as its repository, without the words of the model's own name.",
    ),
]
CandidatesFromOption = Annotated[
    str | None,
    typer.Option(
        metavar="RUN",
        help="Measure the candidates of another run: its id, or its report.json, such as one from another machine.",
    ),
]
AllowIncompleteOption = Annotated[
    bool, typer.Option("--allow-incomplete", help="Go on if a variant could not be made or measured.")
]
ForcePublishOption = Annotated[
    bool, typer.Option("--force-publish", help="Serve the winner even if what serves may be better.")
]
FollowOption = Annotated[bool, typer.Option(help="On a cluster: wait until the run ends.")]
ContextOption = Annotated[
    str | None,
    typer.Option("--context", help="Context of the kubeconfig, with --engine argo. Default: the current one."),
]


def candidates_set(candidates: Sequence[str] | None) -> list[str]:
    """Make the assignment that sets the *candidates* of ``--candidate``, if there are any."""
    return [f"optimize.candidates={json.dumps(candidates)}"] if candidates else []


def assignments_of(source: str | None, store: Path) -> list[str]:
    """Make the assignments by which a run measures what another one measured. *source*: the other run's id, or the path
    of its report.json, which may come from another machine; None: nothing. Raises: MissingRun, ConfigError: there is no
    such run, or it measured nothing."""
    from pipeline.local.runs import folder
    from scoring.names import PRODUCTION, recipe_of, variant_of
    from stages.parts.base.formats import FORMATS
    from stages.report.run_report import JSON, RunReport

    if source is None:
        return []
    report = RunReport.read(Path(source) if Path(source).is_file() else folder(store, source) / JSON)
    if report is None or not report.evaluations:
        raise ConfigError(f"{source} measured no candidates", hint="name a run that measured some, or its report.json")
    evaluations = [evaluation for evaluation in report.evaluations if variant_of(evaluation.variant) != PRODUCTION]
    names, asked = [evaluation.variant for evaluation in evaluations], report.settings
    recipes = {recipe_of(name): each.recipe for name, each in zip(names, evaluations, strict=True) if each.recipe}
    chosen = {
        "optimize.variants": [*dict.fromkeys(variant_of(name) for name in names if variant_of(name) in FORMATS)],
        "optimize.candidates": asked.get("optimize", {}).get("candidates", []),
        "serving.recipes": {name: recipe.model_dump(mode="json") for name, recipe in recipes.items()},
    }
    return [f"{field}={json.dumps(value)}" for field, value in chosen.items()]


@dataclasses.dataclass(frozen=True)
class ConfigOptions:
    """The settings of a command: a file, a platform, and single fields."""

    platform: PlatformOption = None
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
        settings = self.load(**names)
        _ = settings.cluster  # which refuses a platform that is one machine
        return settings


@dataclasses.dataclass(frozen=True)
class StoreOptions:
    """The store on this machine."""

    store: Annotated[
        Path, typer.Option("--store", envvar="SLIPWAY_STORE", help="Folder of models, variants, releases and runs.")
    ] = Path(".slipway")

    def of_model(self, model: str) -> ModelStore:
        """Return the folder in the store, which need not exist, of a model on the Hub or in a local directory."""
        from stages.parts.model.name import ModelName

        return ModelName.parse(model).store(self.store)

    def release_of(self, model: str, release: str | None) -> Path:
        """Return the folder of a model's *release*, its number or name; None: of the one in production."""
        from stages.parts.endpoint.endpoint import published
        from stages.parts.releases.release import find

        store = self.of_model(model)
        return store.releases / find(store, release) if release else published(store)


@dataclasses.dataclass(frozen=True)
class LocalOptions(StoreOptions, ConfigOptions):
    """The store on this machine, and the settings of a command."""


@dataclasses.dataclass(frozen=True)
class Where(StoreOptions):
    """Where runs and models are: in a store on this machine, or in a namespace of a cluster."""

    engine: Annotated[
        Literal["local", "argo"] | None,
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
        return self.engine == "argo"

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


@dataclasses.dataclass(frozen=True)
class VolumeOptions(Where, ConfigOptions):
    """Where a store is, on this machine or on the volume of a cluster's namespace, and the settings of a command.

    With ``--engine argo`` the command runs in a pod that has the volume, with the same output and exit code.
    """

    invocation: typer.Context = dataclasses.field(kw_only=True)

    def call_in_pod(self) -> None:
        from pipeline.argo.template import call_in_pod

        settings, root = self.of_cluster(), self.invocation.find_root()
        # Without what says where the command runs and with which settings.
        words = self.invocation.command_path.removeprefix(root.command_path).split()
        place = {field.name for field in dataclasses.fields(VolumeOptions)}
        for param in self.invocation.command.params:
            value = self.invocation.params.get(param.name or "")
            if param.name in place or value is None or value is False:
                continue
            flag = param.opts[0]
            is_argument = param.param_type_name == "argument"
            words.append(str(value) if is_argument else flag if value is True else f"{flag}={value}")
        output, exit_code = call_in_pod(self.cluster(settings), settings, words)
        sys.stdout.write(output)
        if exit_code:
            raise typer.Exit(exit_code)


class CommandGroup(TyperGroup):
    """A group of commands whose own help option is known to be off without pydantic, whose import takes longer than
    printing a command's help."""

    def get_help_option(self, ctx: Any) -> TyperOption | None:
        option = super().get_help_option(ctx)
        if option:
            option.default = False
        return option


class Commands(typer.Typer):
    """A group of commands with a help *text* and an example. It needs no rich, whose import takes 0.3 s."""

    def __init__(self, text: str | None = None, example: str = "", **options: Any) -> None:
        for name, default in {"cls": CommandGroup, "no_args_is_help": True}.items():
            options.setdefault(name, default)
        super().__init__(help=text, epilog=EXAMPLE + example, rich_markup_mode=None, **options)

    def add(self, example: str, name: str | None = None, *, cleans_up: bool = False) -> Callable[[Command], Command]:
        """Add a command, with the options of its groups, and an example as the last line of its help.

        Without a *name*, it has the function's, with hyphens. One that *cleans_up* ends after SIGTERM as after Ctrl-C.
        """

        def added(command: Command) -> Command:
            self.command(name, epilog=EXAMPLE + example)(grouped(command, cleans_up=cleans_up))
            return command

        return added


def grouped(command: Command, *, cleans_up: bool) -> Callable[..., None]:
    """Let typer see the fields of the groups that *command* takes, and *command* the groups; print what it returns."""
    types, keyword = get_type_hints(command, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    declared = inspect.signature(command).parameters
    groups = {name: types[name] for name in declared if dataclasses.is_dataclass(types[name])}
    parameters = [declared[name].replace(annotation=types[name]) for name in declared if name not in groups]
    if Printout in (types["return"], *get_args(types["return"])):
        parameters.append(inspect.Parameter("as_json", keyword, default=False, annotation=JsonOption))
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            parameters.append(inspect.Parameter(field.name, keyword, default=default, annotation=hints[field.name]))

    @functools.wraps(command)
    def called(*, as_json: bool = False, **values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
            if isinstance(values[name], VolumeOptions) and values[name].on_cluster:
                values[name].call_in_pod()
                return
        if cleans_up:
            from stages.parts.base.program import answer_sigterm

            answer_sigterm()
        if (printout := command(**values)) is not None:
            print_result(printout, as_json)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def print_result(printout: Printout, as_json: bool) -> None:
    """Print the result to stdout: JSON for programs, or the text. In a pod, it becomes the output ``PRINTED`` too, for
    whoever runs the command from elsewhere. Raises: the printout's failure."""
    from stages.parts.base.program import PRINTED, write_output

    document, text, failure = printout
    printed = ""
    if as_json:
        from pydantic import TypeAdapter

        printed = json.dumps(TypeAdapter(Any).dump_python(document, mode="json"), indent=2) + "\n"
        sys.stdout.write(printed)
    elif text is not None:
        from rich.console import Console

        # A pipe has no width, and the default of 80 columns would cut tables.
        terminal = sys.stdout.isatty()
        console = Console(width=None if terminal else 200, highlight=False, soft_wrap=not terminal, record=True)
        console.print(text)
        printed = console.export_text()
    write_output(PRINTED, printed)
    if as_json and isinstance(failure, SlipwayError):
        say(failure.render())  # stdout holds the document alone
        raise typer.Exit(failure.exit_code)
    if failure:
        raise failure
