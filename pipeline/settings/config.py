"""A run's whole configuration, read from ``configs/``, a file of the user's, and flags.

Precedence: ``configs/defaults.yaml`` < ``--config`` file < ``--set`` and the flags (or their environment variables).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from pydantic import ValidationError, model_validator

from pipeline.settings.platform import STORE_MOUNT, ClusterSettings, Platform
from scoring.profile import Profile
from stages.evaluate.trace import read_trace
from stages.parts.base.errors import ConfigError, UnknownName
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.serving_settings import AskedServing, EngineSettings
from stages.parts.base.settings import CONFIGS, Settings, from_yaml, mistakes, read_yaml
from stages.parts.base.workload import Workload, protocol_of
from stages.parts.model.corpora import is_path, own_files
from stages.parts.records.rollout import LOCAL
from stages.rollout.kserve.settings import KServe

NAMED: Final = ("profile", "workload", "platform")
"""What a configuration may name: by a name in the folder of that kind in ``configs/``, or by a path."""
OF_ONE_MACHINE: Final = {
    "replicas": "kserve.scaling.minimum",
    "affinity": "kserve.llm.scheduler",
    "request_timeout_s": "kserve.timeout_s",
    **dict.fromkeys(("host", "port", "tls_certificate", "tls_key", "plain_http"), "the listeners of the Gateway"),
    "shared_port": "kserve.shared_host",
    "metrics_address": "manifests/monitoring",
}
"""The settings in ``serving`` of the endpoint on one machine, and what takes their place on a cluster."""


class RunConfig(Settings):
    profile: Profile
    workload: Workload
    platform: Platform
    optimize: Optimize = Optimize()
    serving: AskedServing = AskedServing()
    engine: EngineSettings = EngineSettings()
    rollout: Rollout = Rollout()
    kserve: KServe = KServe()

    @property
    def cluster(self) -> ClusterSettings:
        """The settings of the platform's cluster. Raises: ConfigError: the platform is one machine."""
        if self.platform.cluster is None:
            clusters = ", ".join(name for name in names("platform") if name != LOCAL)
            hint = f"--platform, or SLIPWAY_PLATFORM: one of {clusters}"
            raise ConfigError(f"the platform {self.platform.name} is one machine, not a cluster", hint=hint)
        return self.platform.cluster

    @model_validator(mode="after")
    def _possible(self) -> Self:
        reference = self.profile.reference_variant
        if reference and reference not in self.optimize.names:
            raise ValueError(
                f"optimize.variants: {reference}, with which the others are compared, is not among them: add it, or "
                "name another one, or fixed values, in profile.reference"
            )
        if self.platform.serves_on != LOCAL:
            fields, name = AskedServing.model_fields, self.platform.name
            _refuse(
                f"serving.{field} is for one machine; on {name}: {instead}"
                for field, instead in OF_ONE_MACHINE.items()
                if getattr(self.serving, field) != fields[field].default
            )
            if self.serving.signing != "off" and self.kserve.llm.source:
                _refuse(["kserve.llm.source: serving.signing verifies what is on the volume only; set one of the two"])
        if self.platform.cluster:
            if self.kserve.scaling.spot and not self.platform.cluster.spot:
                _refuse([f"kserve.scaling.spot: the platform {self.platform.name} names no spot nodes in cluster.spot"])
            _refuse(
                f"{field} names {path}, which pods on {self.platform.name} can't read: copy it to the store's volume "
                f"and name it {STORE_MOUNT}/…, or run on one machine"
                for field, path in own_files(self.workload, self.optimize, self.serving).items()
                if not path.is_relative_to(STORE_MOUNT)
            )
        return self


def _refuse(mistakes: Iterable[str]) -> None:
    if text := "; ".join(mistakes):
        raise ValueError(text)


def load(
    file: Path | None = None,
    *,
    given: Mapping[str, Any] | None = None,
    chosen: Mapping[str, str | None] | None = None,
    assignments: Iterable[str] = (),
) -> RunConfig:
    """Read the configuration of a run.

    Args:
        file: YAML with any part of ``configs/defaults.yaml``.
        given: such a part that *file* says of one of several models, instead of all that it says.
        chosen: profile, workload or platform, by name or path; None keeps what the files say.
        assignments: ``path.to.field=value`` with a YAML value.

    Raises:
        ConfigError: every mistake at once, each on its own line.
    """
    defaults = read_yaml(CONFIGS / "defaults.yaml")
    data, folders = dict(defaults), dict.fromkeys(NAMED, Path())
    if file:
        given = read_yaml(file) if given is None else given
        data = merged(defaults, given)
        folders |= dict.fromkeys(given.keys() & {*NAMED}, file.parent)
    for kind, name in (chosen or {}).items():
        if name is not None:
            data[kind], folders[kind] = name, Path()
    wrong = _read_named(data, folders, defaults)
    for assignment in assignments:
        try:
            assign(data, assignment)
        except ConfigError as error:
            wrong.append(str(error))
    wrong += _read_recipes(data, file.parent if file else Path())
    if isinstance(data["profile"], dict) and isinstance(data["workload"], dict):
        data["profile"].setdefault("error_rate", protocol_of(data["workload"]).error_rate)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        wrong.extend(mistakes(error, RunConfig))
    if wrong:
        raise ConfigError.of_many(wrong, f"the configuration{f' ({file})' if file else ''}")
    if config.workload.trace and (trace := Path(config.workload.trace)).is_file():
        read_trace(trace)  # show its mistakes now rather than after hours of quantizing
    return config


def _read_named(data: dict[str, Any], folders: Mapping[str, Path], defaults: Mapping[str, Any]) -> list[str]:
    """Replace each name in *data* by what it names, an unknown one by the default's; return the mistakes."""
    wrong = []
    for kind, folder in folders.items():
        try:
            data[kind] = named(kind, data[kind], folder)
        except ConfigError as error:
            wrong.append(f"{kind}: {error}" + (f" ({error.hint})" if error.hint else ""))
            data[kind] = named(kind, defaults[kind], Path())
    return wrong


def _read_recipes(data: dict[str, Any], folder: Path) -> list[str]:
    """Replace a list of recipes in ``serving`` by what they say, by name; return the mistakes."""
    wrong, serving = [], data.get("serving")
    if not isinstance(serving, dict) or not isinstance(serving.get("recipes"), list):
        return []
    recipes = {}
    for text in map(str, serving["recipes"]):
        try:
            recipe = named("recipe", text, folder)
            recipes[recipe.pop("name")] = recipe
        except ConfigError as error:
            wrong.append(f"serving.recipes: {error}" + (f" ({error.hint})" if error.hint else ""))
    data["serving"] = serving | {"recipes": recipes}
    return wrong


def named(kind: str, name: Any, folder: Path) -> dict[str, Any]:
    """Read a file of this kind by its name or path; a mapping is taken as it is. Raises: UnknownName."""
    if isinstance(name, dict):
        return {"name": "custom"} | name
    text = str(name)
    path = folder / text if text.endswith((".yaml", ".yml")) else CONFIGS / f"{kind}s" / f"{text}.yaml"
    if not os.path.isfile(path):  # noqa: PTH113 - False also for what can't be a path
        raise UnknownName(kind, text, names(kind))
    data = {"name": path.stem} | (_platform(path) if kind == "platform" else read_yaml(path))
    if kind == "workload":
        _resolve(data, path.parent, "tasks_path", "trace")
        if is_path(str(data.get("divergence_text", ""))):
            _resolve(data, path.parent, "divergence_text")
    return data


def _platform(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Merge the file over the one that its ``extends`` names, in the same folder or in ``configs/platforms``, which may
    extend another one in turn.

    *extending* are the files that extend this one: a file of the user's may have the name of the one that it extends.
    """
    data, extending = read_yaml(path), (*extending, path.resolve())
    cluster = data.get("cluster")
    if isinstance(cluster, dict) and isinstance(cluster.get("clients"), dict):
        _resolve(cluster["clients"], path.parent, "file")
    if (name := data.pop("extends", None)) is None:
        return data
    for folder in (path.parent, CONFIGS / "platforms"):
        file = folder / f"{name}.yaml"
        if file.is_file() and file.resolve() not in extending:
            return merged(_platform(file, extending), data)
    raise UnknownName("platform to extend", str(name), names("platform"))


def _resolve(data: dict[str, Any], folder: Path, *fields: str) -> None:
    """Complete the paths in *fields*, which are relative to *folder*."""
    for field in fields:
        if data.get(field):
            data[field] = str((folder / str(data[field])).resolve())


def names(kind: str) -> list[str]:
    """Return the names that ``configs/`` has of a kind."""
    return sorted(path.stem for path in (CONFIGS / f"{kind}s").glob("*.yaml"))


def merged(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return *base* with the fields of *data*, mapping by mapping."""
    nested = {key for key in base.keys() & data.keys() if isinstance(base[key], dict) and isinstance(data[key], dict)}
    return {**base, **data} | {key: merged(base[key], data[key]) for key in nested}


def assign(data: dict[str, Any], assignment: str) -> None:
    """Set one field of *data*, from ``path.to.field=value`` with a YAML value. Raises: ConfigError."""
    path, separator, text = assignment.partition("=")
    if not separator or not path:
        raise ConfigError(f"--set {assignment}: not of the form path.to.field=value")
    *parents, field = path.split(".")
    place = data
    for name in parents:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise ConfigError(f"--set {assignment}: {name} is a value and has no fields")
    try:
        place[field] = from_yaml(text)
    except ValueError:
        place[field] = text


def served_by_kserve(config: RunConfig) -> KServe:
    """Return the settings of the platform's KServe. Raises: ConfigError: the platform serves on this machine."""
    if config.platform.serves_on == LOCAL:
        hint = "choose --platform"
        raise ConfigError(f"the platform {config.platform.name} serves on this machine, not on KServe", hint=hint)
    return kserve_settings(config)


def kserve_settings(config: RunConfig) -> KServe:
    """Complete ``config.kserve`` with the platform's volume, namespace, nodes and, if it has no GPUs, image."""
    platform, settings = config.platform, config.kserve
    if platform.cluster is None:
        return settings
    changes: dict[str, Any] = {"claim": platform.claim, "namespace": settings.namespace or platform.namespace}
    changes["verifier_image"] = settings.verifier_image or platform.image_of("serve")
    changes["spot_nodes"] = platform.cluster.spot if settings.scaling.spot else settings.spot_nodes
    if platform.stages.evaluate.gpus:
        nodes = platform.cluster.gpu
        changes["node_selector"] = nodes.selector | settings.node_selector
        changes["tolerations"] = (*nodes.tolerations, *settings.tolerations)
    else:
        changes["gpu"] = None
        if settings.image == KServe().image:  # it is for GPUs: the image that measured the release also serves it
            changes["image"] = platform.image_of("evaluate")
    return settings.model_copy(update=changes)
