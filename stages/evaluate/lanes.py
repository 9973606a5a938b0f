"""Where servers run: one after another on one GPU or a CPU, or side by side with GPUs of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.evaluate import generator, harness
from stages.evaluate.preloaded import Preloaded
from stages.parts.base.settings import Serving
from stages.parts.engine.arguments import serves_on_gpu
from stages.parts.machine.hardware import gpu_ids, gpus


@dataclass(frozen=True)
class Lane:
    """A place for one server at a time, with the clients that load and ask it."""

    gpus: str
    """The server's ``CUDA_VISIBLE_DEVICES``; empty without GPUs of its own."""
    generator: Preloaded
    harness: Preloaded


def lanes(standing: contextlib.ExitStack, serving: Serving, variants: int, logs: Path) -> list[Lane]:
    """The lanes of this machine, at most one for each variant; their clients run until *standing* is closed."""
    found = []
    for number, each in enumerate(gpu_groups(serving)[:variants]):
        clients = (
            standing.enter_context(Preloaded(one.MODULE, logs / f"evaluate.{name}{number or ''}.log", one.VARIABLES))
            for name, one in (("generator", generator), ("harness", harness))
        )
        found.append(Lane(each, *clients))
    return found


def gpu_groups(serving: Serving) -> list[str]:
    """Groups of ``tensor_parallel_size`` GPUs of one kind, as ``CUDA_VISIBLE_DEVICES``. A single empty one if servers
    use what there is: without GPUs, with too few, or with GPUs that differ."""
    if not serves_on_gpu():
        return [""]
    return groups(gpu_ids(), gpus(), serving.tensor_parallel_size)


def groups(ids: Sequence[str], kinds: Sequence[str], size: int) -> list[str]:
    """See ``gpu_groups``.

    Args:
        kinds: the GPUs' names and memory, in the order of *ids*.
    """
    if len(set(kinds)) > 1 or len(ids) != len(kinds) or len(ids) < 2 * size:
        return [""]
    return [",".join(ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]
