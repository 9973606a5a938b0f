"""A fleet file: many models, each with an owner and the settings of its own runs, over common defaults; and which of
them have to be run for the file to be in force. What ran last is known from the arguments of the runs themselves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from pipeline.runs.state import RunState
from pipeline.settings.config import RunConfig, load, merged
from pipeline.workflow.parameters import settings_of
from stages.parts.base.errors import ConfigError, EventRefused, SlipwayError, UnknownName
from stages.parts.base.files import canonical_json
from stages.parts.base.settings import Settings, parse, read_yaml
from stages.parts.model.description import local_commit
from stages.parts.model.hub import COMMIT, describe
from stages.parts.model.name import ModelName
from stages.parts.records.rollout import LOCAL

MAIN: Final = "main"
"""The branch whose pushes start runs."""
ADDRESS: Final = frozenset({"host", "port"})
"""Of ``serving``: they tell models apart on one machine, and are left out on a cluster: one file is good for both."""


class Policy(Settings):
    """What the file says of a model besides the settings of its runs."""

    model: str
    """A name on the Hub, or a directory relative to the file."""
    owner: str = ""
    """Who is asked if something waits for a person."""
    revision: str = MAIN
    """A branch or a tag, of which each new commit is run; or a commit, with which the model stays."""
    schedule: Literal["nightly"] | None = None
    """nightly: it is run every night, even if nothing has changed."""


class FleetFile(Settings):
    """The file as it is written: each entry is a ``Policy`` and any part of ``configs/defaults.yaml``."""

    defaults: dict[str, Any] = Field(default={})
    models: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class FleetModel:
    policy: Policy
    name: ModelName
    config: RunConfig

    def commit_now(self) -> str:
        """Find the commit that the revision means now. Raises: the errors of ``hub.describe`` and ``local_commit``."""
        if self.name.directory:
            return local_commit(self.name.directory)
        revision = self.policy.revision
        return revision if COMMIT.fullmatch(revision) else describe(self.name.id, revision).commit


def find(models: Mapping[str, FleetModel], name: str, *, pushed: bool) -> FleetModel:
    """Find a model by its name. Raises: UnknownName; or EventRefused, if a commit of it was *pushed* to main, also for
    one that is at another revision."""
    model = models.get(name) or next((each for each in models.values() if each.policy.model == name), None)
    if pushed and (model is None or model.policy.revision != MAIN):
        at = f"at revision {model.policy.revision}, not at {MAIN}" if model else "not in it"
        raise EventRefused(f"the fleet file has {name} {at}", hint="this event starts no run")
    if model is None:
        raise UnknownName("model in the fleet file", name, models)
    return model


def read_fleet(path: Path, platform: str | None, *, on_cluster: bool) -> dict[str, FleetModel]:
    """Read a fleet file: its models by ``ModelName.id``, in their order. *platform*: of the models of which the file
    names none, on a cluster; one machine is the platform ``local``. Raises: ConfigError: every mistake at once, each
    with its model and field; one in the defaults is all models'."""
    entries = parse(FleetFile, read_yaml(path), str(path))
    models: dict[str, FleetModel] = {}
    wrong: dict[str, list[str]] = {}
    for number, entry in enumerate(entries.models):
        given = merged(entries.defaults, entry)
        chosen = (None if given.get("platform") else platform) if on_cluster else LOCAL
        title = str(given.get("model", f"models.{number}"))
        try:
            model = _model(path, given, chosen, on_cluster=on_cluster)
            mistakes = [why for other in models.values() if (why := _contradiction(model, other))]
            models.setdefault(model.name.id, model)
        except ConfigError as error:
            mistakes = [*error.mistakes] or [f"{error}{f' ({error.hint})' if error.hint else ''}"]
        for mistake in mistakes:
            wrong.setdefault(mistake, []).append(title)
    if wrong:
        raise ConfigError.of_many([f"{', '.join(titles)}: {each}" for each, titles in wrong.items()], str(path))
    return models


def _model(path: Path, given: Mapping[str, Any], platform: str | None, *, on_cluster: bool) -> FleetModel:
    policy = parse(Policy, {key: value for key, value in given.items() if key in Policy.model_fields}, str(path))
    settings = {key: value for key, value in given.items() if key not in Policy.model_fields and value is not None}
    if on_cluster and isinstance(serving := settings.get("serving"), dict):
        settings["serving"] = {key: value for key, value in serving.items() if key not in ADDRESS}
    relative = policy.model.startswith(("./", "../"))
    name = ModelName.parse(str(path.parent.absolute() / policy.model) if relative else policy.model)
    config = load(path, given=settings, chosen={"platform": platform})
    if on_cluster:
        _ = config.cluster  # which refuses a platform that is one machine
    return FleetModel(policy, name, config)


def _contradiction(model: FleetModel, other: FleetModel) -> str:
    """Say why two models can't both be served as the file says; empty if they can."""
    mine, its = model.config, other.config
    if model.name.id == other.name.id:
        return "there is another entry of this model"
    if mine.platform.cluster is None:
        same = mine.serving.port and (mine.serving.host, mine.serving.port) == (its.serving.host, its.serving.port)
        return f"serving.port: {other.name.id} has {mine.serving.port} already" if same else ""
    namespace, same = its.platform.namespace, mine.platform == its.platform
    where = f"{other.name.id} is on {its.platform.name} in the same namespace {namespace}, whose workflow has the nodes"
    return "" if same or namespace != mine.platform.namespace else f"platform: {where} of one: give each a namespace"


@dataclass
class FleetStep:
    """What becomes of a model when the file is applied."""

    model: FleetModel
    commit: str = ""
    reason: str = ""
    starts: bool = False
    """Whether it is run."""
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """What the run before was given, and what this one is, by setting."""
    run: str = ""
    """The run's id, once it was started."""
    error: SlipwayError | None = None
    """Why it was not run, or failed."""

    def lines(self, verb: str) -> Iterator[str]:
        """Describe it as ``kubectl diff`` does."""
        owner = f" ({self.model.policy.owner})" if self.model.policy.owner else ""
        yield f"{self.model.name.id}{owner}: {f'{verb}: ' if self.starts else ''}{self.error or self.reason}"
        for setting, values in self.changes.items():
            yield from (f"  {sign} {setting}: {json.dumps(value)}" for sign, value in zip("-+", values, strict=True))

    def document(self) -> dict[str, Any]:
        error = str(self.error) if self.error else None
        return vars(self) | {"model": self.model.name.id, "owner": self.model.policy.owner, "error": error}


def step_of(model: FleetModel, commit: str, last: RunState | None, *, nightly: bool) -> FleetStep:
    """Compare what the file says of *model*, at a commit, with what it was run with last."""
    if last is None:
        return FleetStep(model, commit, "it was not run yet", starts=True)
    changes, before, policy, run = _changes(model.config, last.arguments), _commit_of(last), model.policy, last.name
    moved = f"{policy.revision} is at {commit[:12]}, not at {before[:12] or 'that'} as in run {run}"
    cases = (
        (bool(changes), True, f"its settings are not those of run {run}"),
        (commit != before, True, moved),
        (last.phase == "Interrupted", True, f"run {run} was interrupted"),
        (last.phase in ("Pending", "Running"), False, f"run {run} is under way"),
        (nightly and policy.schedule == "nightly", True, "its schedule is nightly"),
        (last.phase != "Succeeded", False, f"run {run} failed; again: slipway retry {run}"),
        (True, False, f"unchanged since run {run}"),
    )
    starts, reason = next((starts, reason) for holds, starts, reason in cases if holds)
    return FleetStep(model, commit, reason, starts, changes)


def _commit_of(run: RunState) -> str:
    """Return the commit that a run was of; empty if it did not find out."""
    revision = run.arguments.get("revision", "")
    outputs = (node.outputs for node in run.nodes if node.name == "resolve")
    return revision if COMMIT.fullmatch(revision) else next(outputs, {}).get("commit", "")


def _changes(config: RunConfig, before: Mapping[str, str]) -> dict[str, tuple[Any, Any]]:
    """Find the settings that a run with the arguments *before* had otherwise; None stands for one that it had not."""
    now = settings_of(config) | {"serve": "true"}
    del now["approval"]  # which the rollout's settings say, too
    old, new = (dict(_flat({name: _plain(name, given.get(name, "")) for name in now})) for given in (before, now))
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return {name: (old.get(name), new.get(name)) for name in names}


def _plain(name: str, text: str) -> Any:
    """Read an argument of a run, with this version's defaults for settings that an older one had not."""
    value: Any = text or None
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        kind: Any = RunConfig.model_fields[name].annotation if name in RunConfig.model_fields else None
        with contextlib.suppress(ValidationError):
            value = json.loads(canonical_json(kind.model_validate(value))) if kind else value
    return value


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value
