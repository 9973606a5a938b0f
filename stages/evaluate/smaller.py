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
from typing import Final

from stages.evaluate.load import described
from stages.evaluate.subject import Lane, Subject, lanes
from stages.parts.base.log import say
from stages.parts.records.evaluation import Smaller
from stages.parts.samples.lines import LoadSamples, StartLoad
from stages.parts.vllm.arguments import gpu_groups

STARTS: Final = 2
"""With those on more GPUs they show how much a start changes; what is to be seen is a difference of a third or more."""


def measure_smaller(subject: Subject, size: int, leading: StartLoad, *, left_s: float, running: Sequence[Lane]) -> None:
    """Measure *subject* on *size* GPUs: one start, and another one if *left_s* seconds suffice for it.

    Args:
        leading: the load of the variant that fixed the rate for all.
        running: lanes whose clients run already; if there are none, others are started.
    """
    larger = subject.session.serving
    serving = larger.model_copy(update={"tensor_parallel_size": size})
    session = replace(subject.session, serving=serving)
    smaller = Subject(f"{subject.name}-tp{size}", subject.directory, subject.conditions, session)
    title = f"{subject.name} on {size} instead of {larger.tensor_parallel_size} GPUs"
    began = time.monotonic()
    with contextlib.ExitStack() as standing:
        lane = replace((running or lanes(standing, serving, 1, session.logs))[0], gpus=gpu_groups(serving)[0])
        standing.callback(smaller.stop)
        for number in range(STARTS):
            with smaller.turn():
                smaller.start(lane)
                list(smaller.search(number, leading))
                list(smaller.measure(smaller.loading.pace))
                say(f"load of {title}: {described(smaller.loading.found)}")
            smaller.stop()
            if smaller.failure or (time.monotonic() - began) * (number + 2) / (number + 1) > left_s:
                break
    if smaller.failure:
        say(f"{title}: {smaller.failure}")
    data = smaller.data
    subject.data.smaller = Smaller(
        tensor_parallel_size=size,
        instead_of=larger.tensor_parallel_size,
        failure=str(smaller.failure or ""),
        kv_cache_tokens=data.kv_cache_tokens,
        **data.figures(session.workload),
    )
    load = StartLoad(_labelled(data.samples.rounds, size), _labelled(data.samples.trials, size))
    subject.data.samples = replace(subject.data.samples, smaller=load)
    subject.measured_now = True


def _labelled(runs: Sequence[LoadSamples], gpus: int) -> tuple[LoadSamples, ...]:
    label = {"gpus": gpus}
    return tuple(
        LoadSamples(run.run.model_copy(update=label), tuple(one.model_copy(update=label) for one in run.requests))
        for run in runs
    )
