"""Where servers run: one after another on one GPU or a CPU, or side by side with GPUs of their own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from stages.evaluate import generator, harness
from stages.evaluate.preloaded import Preloaded
from stages.parts.base.serving_settings import Serving
from stages.parts.vllm.placement import gpu_groups


@dataclass(frozen=True)
class Lane:
    """A place for one server at a time, with the clients that load and ask it."""

    gpus: str
    """The server's ``CUDA_VISIBLE_DEVICES``; empty without GPUs of its own."""
    generator: Preloaded
    harness: Preloaded


def lanes(standing: contextlib.ExitStack, serving: Serving, variants: int, logs: Path) -> list[Lane]:
    """Start the clients of this machine's lanes, at most one for each variant; they run until *standing* is closed."""
    places = []
    for number, gpus in enumerate(gpu_groups(serving)[:variants]):
        clients = (
            standing.enter_context(
                Preloaded(module.MODULE, logs / f"evaluate.{name}{number or ''}.log", module.VARIABLES)
            )
            for name, module in (("generator", generator), ("harness", harness))
        )
        places.append(Lane(gpus, *clients))
    return places
