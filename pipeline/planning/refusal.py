"""Refuses a run whose settings contradict each other, the model or the hardware, before anything is submitted."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from pipeline.settings.config import RunConfig
from stages.parts.base.errors import (
    AccessDenied,
    HubUnavailable,
    ModelNotFound,
    SlipwayError,
    UnusableModel,
    check_known,
)
from stages.parts.base.store import ModelStore
from stages.parts.cluster.nodes import quantity
from stages.parts.machine.accelerators import catalogue
from stages.parts.model.adapter import check_adapters, parse_source
from stages.parts.model.candidates import with_candidates
from stages.parts.model.description import Description, describe_directory, describe_model
from stages.parts.model.name import ModelName
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.answers import are_kept
from stages.parts.vllm.automatic import Decided, Place, Requirements, decide, place_here, refuse_contradictions
from stages.parts.vllm.support import refuse_without_torchvision

Answer = TypeVar("Answer")

PATIENCE_S: Final = 10.0
"""Without an answer by then, a run is submitted without this check, and checks itself."""


def decide_before(config: RunConfig, name: ModelName, revision: str, store: ModelStore | None = None) -> Decided | None:
    """Decide what *auto* will mean in a run, or return None if that is known only during it. Name what is left out.

    Args:
        store: where the model may lie already, on one machine.

    Raises:
        UnknownName: the catalogue has no accelerator of the platform's name.
        UnusableModel: the model, or an adapter, can't be served, wherever it runs; or a candidate is another model.
        NotInstalled: it can't be served on this machine.
        ConfigError: the settings contradict each other, the model or the hardware; every contradiction is named.
    """
    place, described = place_of(config), _described(name, revision, store)
    if described is None:
        return None
    required = requirements(config, store, described)
    if not config.platform.cluster:
        refuse_without_torchvision(described)
    refuse_adapters(config, described, store)
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


def requirements(config: RunConfig, store: ModelStore | None, described: Description) -> Requirements:
    """Gather what a run's servers depend on. Answers that a *store* elsewhere may have are taken to be there."""
    reference = config.profile.for_format(described.form.name).reference_variant
    kept = store is None or are_kept(store, reference, described.commit, config.workload.quality_tasks)
    return Requirements(config.serving, config.workload, config.optimize, reference, answers_kept=kept)


def refuse_adapters(config: RunConfig, described: Description, store: ModelStore | None = None) -> None:
    """Refuse adapters that can't be served with the model, as ``check_adapters`` does. What can't be read is left to
    the run: on a cluster's volume or with its token, or while the Hub does not answer."""
    adapters, elsewhere = config.serving.adapters, config.platform.cluster is not None
    if elsewhere:
        adapters = {name: source for name, source in adapters.items() if not parse_source(source)[0].directory}
    with contextlib.suppress(HubUnavailable, *((AccessDenied, ModelNotFound) if elsewhere else ())):
        check_adapters(described, adapters, store)


def place_of(config: RunConfig) -> Place | None:
    """Return the hardware that the platform's runs measure on, or None if it is not known."""
    cluster, most = config.platform.cluster, config.platform.most_gpus
    if cluster is None:
        return place_here()
    if not most:
        memory = config.platform.stages.evaluate.memory
        return Place("a node without GPUs", None, 0, None if memory == "auto" else int(quantity(memory)))
    if cluster.accelerator is None:
        return None
    accelerators = catalogue()
    check_known("accelerator", cluster.accelerator, accelerators)
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
