"""Refuses a run whose settings contradict each other, the model or the hardware, before anything is submitted."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pipeline.settings.config import RunConfig
from stages.parts.base.errors import HubUnavailable, SlipwayError, UnknownName
from stages.parts.base.store import ModelStore
from stages.parts.machine.accelerators import catalogue
from stages.parts.model.description import Description, describe_directory, describe_model
from stages.parts.model.name import ModelName
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.vllm.automatic import Decided, Place, Requirements, decide, place_here, refuse_contradictions

PATIENCE_S: Final = 10.0
"""Without an answer by then, a run is submitted without this check, and checks itself."""


def decide_before(config: RunConfig, model: str, revision: str, store: Path | None = None) -> Decided | None:
    """Decide what *auto* will mean in a run, or return None if that is known only during it.

    Args:
        store: where the model may lie already, on one machine.

    Raises:
        UnknownName: the catalogue has no accelerator of the platform's name.
        ConfigError: the settings contradict each other, the model or the hardware; every contradiction is named.
    """
    required = Requirements(config.serving, config.workload, config.optimize)
    place = place_of(config)
    described = _described(model, revision, store)
    if described is None:
        return None
    if place is None:
        refuse_contradictions(described, required)
        return None
    return decide(described, required, place)


def place_of(config: RunConfig) -> Place | None:
    """Return the hardware that the platform's runs measure on, or None if it is not known.

    Raises:
        UnknownName: the catalogue has no accelerator of the platform's name.
    """
    cluster, most = config.platform.cluster, config.platform.most_gpus
    if cluster is None:
        return place_here(catalogue())
    if not most:
        return Place("a node without GPUs", None)
    if cluster.accelerator is None:
        return None
    accelerators = catalogue()
    if cluster.accelerator not in accelerators:
        raise UnknownName("accelerator", cluster.accelerator, accelerators)
    return Place(cluster.accelerator, accelerators[cluster.accelerator], most)


def _in_time(ask: Callable[[], Description]) -> Description:
    """Return what *ask* returns, unless it takes too long.

    Raises:
        HubUnavailable: it took longer; the other errors are those of *ask*.
    """
    answers: queue.SimpleQueue[Description | SlipwayError] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put(ask())
        except SlipwayError as error:
            answers.put(error)

    threading.Thread(target=answer, daemon=True).start()  # a command that ends does not wait for it
    try:
        answered = answers.get(timeout=PATIENCE_S)
    except queue.Empty:
        raise HubUnavailable(f"the Hub has not answered within {PATIENCE_S:g} s") from None
    if isinstance(answered, SlipwayError):
        raise answered
    return answered


def _described(model: str, revision: str, store: Path | None) -> Description | None:
    """Read the model's small files; return None if they can't be had now: the run says why."""
    try:
        name = ModelName.parse(model)
        if store and not name.directory:
            base = ModelStore(store, name.id).base
            acquired = Acquired.read(base / ACQUIRED)
            if acquired and revision in (acquired.revision, acquired.commit):
                return describe_directory(base, model)
        return _in_time(lambda: describe_model(model, revision))
    except SlipwayError as error:
        if store is None:
            sys.stderr.write(f"note: the run itself will check whether {model} fits: {error}\n")
        return None
