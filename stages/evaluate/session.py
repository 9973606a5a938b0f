"""What is the same for every variant that is measured, and where servers run: one after another on one GPU or a CPU, or
side by side with GPUs of their own."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from pathlib import Path

from scoring.profile import Profile
from stages.evaluate import generator, harness
from stages.evaluate.preloaded import Preloaded
from stages.evaluate.trace import Trace
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.vllm.placement import gpu_groups


@dataclass(frozen=True)
class Session:
    store: ModelStore
    workload: Workload
    serving: Serving
    profile: Profile
    trace: Trace | None
    include_defaults: bool
    """Whether lm-eval's own tasks are needed."""
    beside: tuple[str, ...]
    """Models that are served on the same machine."""
    logs: Path
    """The folder for logs."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Ends the starts that other threads wait for."""


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
