"""What is the same for every variant that is measured."""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stages.evaluate.trace import Trace
from stages.parts.base.program import RUN_VARIABLE
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload

if TYPE_CHECKING:
    from scoring.profile import Profile


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


def logs_folder(store: ModelStore) -> Path:
    """Make the folder for logs: in the run's folder, or outside a run a temporary one that stays after a failure."""
    if run_id := os.environ.get(RUN_VARIABLE):
        folder = store.run(run_id) / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    return Path(tempfile.mkdtemp(prefix="slipway-evaluate-"))
