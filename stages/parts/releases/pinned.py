"""The settings with which a release is served: where they are left open, those that it was measured with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, Field

from scoring.names import PRODUCTION
from stages.parts.base.errors import DamagedModel
from stages.parts.base.serving_settings import PINNED, AskedServing, ProductionServing, Recipe, Serving
from stages.parts.base.store import ModelStore, Record
from stages.parts.base.workload import Slo
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
    hardware: Hardware | None = None
    prompt_tokens_per_s: float | None = None
    workload: dict[str, Any] = Field(default={})

    @classmethod
    def of(cls, release: Path) -> MeasuredWith:
        """Read it, by the release's folder; what is damaged says nothing."""
        return cls.read_if_intact(release / METRICS) or cls()

    @property
    def read_in_time(self) -> float | None:
        """Tokens of prompts that it reads within the target for the first token, if that is known."""
        slo = self.slo
        return slo.ttft_ms / 1000 * self.prompt_tokens_per_s if slo and self.prompt_tokens_per_s else None

    @property
    def slo(self) -> Slo | None:
        """The workload's targets."""
        return Slo.model_validate(slo) if (slo := self.workload.get("slo")) else None


def alike(store: ModelStore, release: str, decision: Production) -> bool:
    """Whether a release of the same variant is served by the recipe and with the adapters that *decision* says, as a
    release never changes."""
    try:
        measured = MeasuredWith.read(store.releases / release / METRICS) or MeasuredWith()
    except DamagedModel:
        return False
    return measured.recipe == decision.recipe and measured.workload.get("adapters", {}) == decision.adapters


def in_production(store: ModelStore) -> ProductionServing | None:
    """Say which release is in production, and how it is served beside a run's variants; None if there is none."""
    release = current_release(store)
    return ProductionServing(release=release, recipe=_of_production(store).recipe) if release else None


def moved_stack(store: ModelStore) -> str:
    """Say that engine or hardware are no longer those that the release in production was measured on; empty if they
    are, or if that is not known."""
    measured = _of_production(store)
    engine, machine = measured.engine, measured.hardware
    if engine is None or machine is None:
        return ""
    here, installed = hardware(), installed_version("vllm").partition("+")[0]
    before, now = (", ".join(dict.fromkeys(each.gpus)) or each.cpu for each in (machine, here))
    pairs = {f"vLLM {engine.version.partition('+')[0]}": f"vLLM {installed}", before: now}
    moved = {was: present for was, present in pairs.items() if was != present}
    was, present = " and ".join(moved), " and ".join(moved.values())
    text = f"{current_release(store)}, which is in production, was measured on {was}, and here is {present}"
    return text if moved else ""


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
    if release is None or not any(getattr(asked, name) == "auto" for name in PINNED):
        return asked.pinned().with_recipe(measured.recipe if measured else None)
    engine = measured.engine if measured else None
    arguments, ready_s = (engine.arguments, engine.ready_s) if engine else ((), 0.0)
    figures = {name: int(value) for name, argument in ARGUMENTS.items() if (value := value_of(arguments, argument))}
    figures["startup_timeout_s"] = startup_s(weights_bytes(store, release), ready_s)
    found = chosen_parsers(asked, chat_model(store.releases / release))
    named = zip(PARSERS.items(), found, strict=True)
    parsers = {name: value_of(arguments, argument) or parser or "none" for (name, argument), parser in named}
    settings = asked.pinned(**figures, **parsers).with_recipe(measured.recipe if measured else None)
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
