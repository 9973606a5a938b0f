"""The variant that leads, measured once more on fewer GPUs: all variants are measured on as many as fp16 needs, and a
quantized one often fits on fewer.

It is started and loaded as in the blocks, with the same requests, after these have ended and on the same GPUs. What
fails here is recorded, and fails nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from stages.evaluate.lanes import Lane, lanes
from stages.evaluate.load import StartLoad, described
from stages.evaluate.session import Session, say
from stages.evaluate.subject import Subject
from stages.parts.samples.lines import LoadSamples
from stages.parts.vllm.placement import gpu_groups

STARTS: Final = 2
"""With those on more GPUs they show how much a start changes; what is to be seen is a difference of a third or more."""


def measure_smaller(
    session: Session,
    subject: Subject,
    size: int,
    leading: StartLoad,
    *,
    left_s: float,
    given: Sequence[Lane],
    logs: Path,
) -> None:
    """Measure *subject* on *size* GPUs: one start, and another one if *left_s* seconds suffice for it.

    Args:
        leading: the load of the variant that fixed the rate for all.
        given: lanes whose clients run already; empty: others are started.
    """
    serving = session.serving.model_copy(update={"tensor_parallel_size": size})
    smaller = Subject(f"{subject.name}-tp{size}", subject.directory, subject.conditions, logs)
    began = time.monotonic()
    with contextlib.ExitStack() as standing:
        lane = replace((given or lanes(standing, serving, 1, logs))[0], gpus=gpu_groups(serving)[0])
        standing.callback(smaller.stop)
        for number in range(STARTS):
            with smaller.turn():
                smaller.start(lane, session.workload, serving, session.trace, session.cancelled)
                for _ in smaller.search(session.workload, number, session.trace, leading):
                    pass
                for _ in smaller.measure(smaller.loading.pace):
                    pass
                found = described(smaller.loading.found)
                say(f"load of {subject.name} on {size} instead of {_of(session)} GPUs: {found}")
            smaller.stop()
            if smaller.failure or (time.monotonic() - began) * (number + 2) / (number + 1) > left_s:
                break
    if smaller.failure:
        say(f"{subject.name} on {size} instead of {_of(session)} GPUs: {smaller.failure}")
    subject.smaller = smaller.as_smaller(size, session.workload, session.serving)
    subject.smaller_load = StartLoad(_labelled(smaller.rounds, size), _labelled(smaller.trials, size))
    subject.measured_now = True


def _of(session: Session) -> int:
    return session.serving.tensor_parallel_size


def _labelled(runs: Sequence[LoadSamples], gpus: int) -> list[LoadSamples]:
    label = {"gpus": gpus}
    return [
        LoadSamples(run.run.model_copy(update=label), tuple(one.model_copy(update=label) for one in run.requests))
        for run in runs
    ]
