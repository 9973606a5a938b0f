"""The settings with which a release is served: where they are left open, those that it was measured with."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, Field

from scoring.names import PRODUCTION
from stages.parts.base.errors import ConfigError, DamagedModel, NothingToServe
from stages.parts.base.serving_settings import PINNED, AskedServing, EngineSettings, ProductionServing, Recipe, Serving
from stages.parts.base.store import ModelStore, Record
from stages.parts.base.workload import Slo
from stages.parts.machine.environment import engine_of, stack_of
from stages.parts.machine.hardware import Hardware, hardware
from stages.parts.model.checkpoint import config_in, stated
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.evaluation import Engine
from stages.parts.records.production import Production
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases.release import METRICS, current_release
from stages.parts.vllm.arguments import installed_version, value_of
from stages.parts.vllm.parsers import REASONING_PARSER, TOOL_PARSER, chat_model, chosen_parsers
from stages.parts.vllm.sizing import startup_s

ROUNDED: Final = 100
"""Tokens, to which a limit is rounded."""
LIMITED: Final = re.compile(r"--max[-_]num[-_]queued[-_]")
"""Extra arguments with a limit of the user's own."""
ARGUMENTS: Final = {"max_model_len": "--max-model-len", "tensor_parallel_size": "--tensor-parallel-size"}
PARSERS: Final = {"tool_parser": TOOL_PARSER, "reasoning_parser": REASONING_PARSER}


class MeasuredWith(Record):
    """The part of a release's ``production_metrics.json`` that is read here, also of one by another version."""

    model_config = ConfigDict(extra="ignore")

    engine: Engine | None = None
    recipe: Recipe | None = None
    winner: str = ""
    commit: str = "main"
    hardware: Hardware | None = None
    prompt_tokens_per_s: float | None = None
    workload: dict[str, Any] = Field(default={})

    @classmethod
    def of(cls, release: Path) -> MeasuredWith:
        """Read it, by the release's folder; what is damaged says nothing."""
        return cls.read_if_intact(release / METRICS) or cls()

    @property
    def engine_version(self) -> str:
        """The version of vLLM that serves it; empty: the installed one."""
        return self.engine.stack.get("vLLM", "") if self.engine else ""

    @property
    def served_by(self) -> Recipe | None:
        """Its recipe, with its version of vLLM."""
        changes = self.recipe.changes if self.recipe else {}
        return Recipe(**changes | {"engine_version": self.engine_version}) if self.engine_version else self.recipe

    @property
    def read_in_time(self) -> float | None:
        """Tokens of prompts that it reads within the target for the first token, if that is known."""
        slo = self.slo
        return slo.ttft_ms / 1000 * self.prompt_tokens_per_s if slo and self.prompt_tokens_per_s else None

    @property
    def slo(self) -> Slo | None:
        """The workload's targets."""
        return Slo.model_validate(slo) if (slo := self.workload.get("slo")) else None

    def moved(self, stack: Mapping[str, str], here: Hardware | None, dtype: str = "auto") -> str:
        """Say which of these it was not measured with; empty if there are none, or if nothing is known."""
        if self.engine is None or self.hardware is None:
            return ""
        before = self.engine.stack or {"vLLM": self.engine.version.partition("+")[0]}
        pairs = {f"{name} {was}": f"{name} {stack.get(name, was)}" for name, was in before.items()}
        pairs[self.engine.dtype] = self.engine.dtype if dtype == "auto" else dtype
        was, now = (", ".join(dict.fromkeys(each.gpus)) or each.cpu for each in (self.hardware, here or self.hardware))
        moved = {was: now for was, now in {**pairs, was: now}.items() if was != now}
        return f"was measured with {' and '.join(moved)}, not {' and '.join(moved.values())}" if moved else ""


def alike(store: ModelStore, release: str, decision: Production) -> bool:
    """Whether a release of the same variant is served by the engine and recipe and with the adapters that *decision*
    says, as a release never changes."""
    try:
        measured = MeasuredWith.read(store.releases / release / METRICS) or MeasuredWith()
    except DamagedModel:
        return False
    same_engine = measured.engine_version in ("", decision.engine.stack.get("vLLM"))
    same_adapters = measured.workload.get("adapters", {}) == decision.adapters
    return same_engine and same_adapters and measured.recipe == decision.recipe


def in_production(store: ModelStore) -> ProductionServing | None:
    """Say which release is in production, and how it is served beside a run's variants; None if there is none."""
    release, measured = current_release(store), _of_production(store)
    is_here = engine_of(measured.engine_version).is_here or "KUBERNETES_SERVICE_HOST" in os.environ  # a pod has one
    recipe = measured.recipe if is_here else measured.served_by
    return ProductionServing(release=release, recipe=recipe) if release else None


def moved_stack(store: ModelStore) -> str:
    """Say that engine or hardware are no longer those that the release in production was measured with; empty if they
    are, or if that is not known."""
    measured = _of_production(store)
    moved = measured.moved(stack_of(), hardware())
    text = f"{current_release(store)}, which is in production, {moved}"
    if measured.engine_version not in ("", installed_version("vllm").partition("+")[0]):
        text += f"; to compare them: slipway requalify {store.model}"
    return text if moved else ""


def requalification(store: ModelStore, engine: EngineSettings, arguments: tuple[str, ...]) -> Recipe:
    """Make the recipe by which the release in production is tried under another *engine*, and the environments of both
    versions of vLLM. *arguments* are those of every server.

    Raises:
        NothingToServe: nothing is in production.
        ConfigError: it is served by that engine.
        NotInstalled: there is no such version, or its environment can't be made.
    """
    if (release := current_release(store)) is None:
        raise NothingToServe(f"no release of {store.model} is in production", hint=f"first: slipway run {store.model}")
    measured, here = _of_production(store), installed_version("vllm").partition("+")[0]
    version, served = engine.version or here, measured.engine_version or here
    if version == served and not engine.arguments:
        hint = "name another version: --set engine.version=…; other hardware is noticed by slipway run"
        raise ConfigError(f"{release} is served by vLLM {version} already: there is nothing to compare", hint=hint)
    for each in (served, version):
        engine_of(each).python()
    changes = measured.recipe.changes if measured.recipe else {}
    if engine.arguments:
        changes["extra_arguments"] = (*changes.get("extra_arguments", arguments), *engine.arguments)
    return Recipe(**changes | {"engine_version": version})


def _of_production(store: ModelStore) -> MeasuredWith:
    return MeasuredWith.of(store.optimized(PRODUCTION))


def row_of_production(store: ModelStore, names: Iterable[str], serving: Serving) -> str:
    """Name the candidate that is what is in production: one of the *names* that was made of the present base, with the
    same weights and recipe; otherwise the release itself."""
    base = Acquired.read_if_intact(store.base / ACQUIRED)
    released = Variant.read_if_intact(store.optimized(PRODUCTION) / VARIANT)
    recipe = serving.recipe_of(PRODUCTION)
    for name in names:
        variant, own = Variant.read_if_intact(store.optimized(name) / VARIANT), serving.recipe_of(name)
        if name == PRODUCTION or not (base and released and variant) or variant.base_digest != base.digest:
            continue
        if variant.digest == released.digest and (own and own.changes) == (recipe and recipe.changes):
            return name
    return PRODUCTION


def pinned(store: ModelStore, asked: AskedServing, release: str | None) -> Serving:
    """Put what the release was measured with in place of every ``auto`` in *asked*, and its recipe over all.

    Where nothing is known, the parsers are those of what its model writes, and the rest the defaults of ``Serving``.
    Raises DamagedModel if what is stored of the release can't be read."""
    measured = MeasuredWith.read(store.releases / release / METRICS) if release else None
    recipe = measured.served_by if measured else None
    if release is None or not any(getattr(asked, name) == "auto" for name in PINNED):
        return asked.pinned().with_recipe(recipe)
    engine = measured.engine if measured else None
    arguments, ready_s, start = (engine.arguments, engine.ready_s, engine.start) if engine else ((), 0.0, None)
    figures = {name: int(value) for name, argument in ARGUMENTS.items() if (value := value_of(arguments, argument))}
    figures["startup_timeout_s"] = startup_s(weights_bytes(store, release), ready_s, start)
    found = chosen_parsers(asked, chat_model(store.releases / release))
    named = zip(PARSERS.items(), found, strict=True)
    parsers = {name: value_of(arguments, argument) or parser or "none" for (name, argument), parser in named}
    settings = asked.pinned(**figures, **parsers).with_recipe(recipe)
    if measured is None or asked.max_queued_tokens != "auto" or LIMITED.search(" ".join(asked.extra_arguments)):
        return settings
    context = settings.max_model_len or stated(config_in(store.releases / release), "max_position_embeddings")
    queue = None
    if measured.read_in_time is not None and context is not None:
        # So many that the last is read in time; but while the longest prompt alone is being read, others may wait, too.
        queue = max(round(measured.read_in_time / ROUNDED) * ROUNDED, context)
    return settings.model_copy(update={"max_queued_tokens": queue})


def weights_bytes(store: ModelStore, release: str) -> int:
    return sum(path.stat().st_size for path in (store.releases / release).glob("*.safetensors"))
