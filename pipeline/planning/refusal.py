"""Refuses a run whose settings contradict each other, the model or the hardware, before anything is submitted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from pipeline.settings.config import RunConfig
from stages.parts.base.errors import HubUnavailable, SlipwayError, UnknownName, UnusableModel
from stages.parts.base.store import ModelStore
from stages.parts.machine.accelerators import catalogue
from stages.parts.model.candidates import with_candidates
from stages.parts.model.description import Description, describe_directory, describe_model
from stages.parts.model.name import ModelName
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.vllm.automatic import Decided, Place, Requirements, decide, place_here, refuse_contradictions

Answer = TypeVar("Answer")

PATIENCE_S: Final = 10.0
"""Without an answer by then, a run is submitted without this check, and checks itself."""


def decide_before(config: RunConfig, name: ModelName, revision: str, store: ModelStore | None = None) -> Decided | None:
    """Decide what *auto* will mean in a run, or return None if that is known only during it. Name what is left out.

    Args:
        store: where the model may lie already, on one machine.

    Raises:
        UnknownName: the catalogue has no accelerator of the platform's name.
        UnusableModel: the model can't be served, wherever it runs; or a candidate is another model.
        ConfigError: the settings contradict each other, the model or the hardware; every contradiction is named.
    """
    required = Requirements(config.serving, config.workload, config.optimize)
    place, described = _place(config), _described(name, revision, store)
    if described is None:
        return None
    try:
        described = _in_time(partial(with_candidates, described, config.optimize.candidates, name.id))
    except UnusableModel:
        raise
    except SlipwayError as error:
        sys.stderr.write(f"note: the run itself will check the candidates: {error}\n")
    if place is None:
        refuse_contradictions(described, required)
        return None
    decided = decide(described, required, place)
    without = (f"without {variant}: {why}" for variant, why in decided.left_out.items())
    sys.stderr.writelines(f"note: {note}\n" for note in (*decided.notes, *without))
    return decided


def _place(config: RunConfig) -> Place | None:
    """Return the hardware that the platform's runs measure on, or None if it is not known."""
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


def _in_time(ask: Callable[[], Answer]) -> Answer:
    """Return what *ask* returns, or raise what it raises, or HubUnavailable if it takes too long."""
    answer: Future[Answer] = Future()

    def wait() -> None:
        try:
            answer.set_result(ask())
        except SlipwayError as error:
            answer.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()  # a command that ends does not wait for it
    try:
        return answer.result(PATIENCE_S)
    except TimeoutError:
        raise HubUnavailable(f"the Hub has not answered within {PATIENCE_S:g} s") from None


def _described(name: ModelName, revision: str, store: ModelStore | None) -> Description | None:
    """Read the model's small files; return None if they can't be had now: the run says why.

    Raises: UnusableModel.
    """
    try:
        if store and not name.directory:
            acquired = Acquired.read(store.base / ACQUIRED)
            if acquired and revision in (acquired.revision, acquired.commit):
                return describe_directory(store.base, name.source)
        return _in_time(lambda: describe_model(str(name.directory or name.source), revision))
    except UnusableModel:
        raise
    except SlipwayError as error:
        if store is None:
            sys.stderr.write(f"note: the run itself will check whether {name.source} fits: {error}\n")
        return None
