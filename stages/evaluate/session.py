"""What is the same for every variant that is measured."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from scoring.profile import Profile
from stages.evaluate.trace import Trace
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload


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
