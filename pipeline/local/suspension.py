"""``suspend`` templates: a task that waits for an approval.

As ``argo resume`` does on a cluster, ``resume`` lets the suspended tasks of a run continue. The request is a small
file in the run's folder, which the engine looks for and removes.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.local.folder import read_run, writable
from stages.parts.base.store import write_json

REQUESTS: Final = "resume"
LOOK_S: Final = 0.2
"""The interval at which the engine looks for requests while something is suspended."""
SUSPENDED: Final = "suspended"


class ResumeRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: tuple[str, ...]


def resume(run_dir: Path, task: str | None = None) -> list[str]:
    """Resume suspended tasks of a run: *task*, or all. Returns their names; does not wait for them."""
    names = read_run(run_dir).suspended(task)
    with writable(run_dir):
        (run_dir / REQUESTS).mkdir(exist_ok=True)
        write_json(run_dir / REQUESTS / f"{uuid.uuid4().hex}.json", ResumeRequest(nodes=tuple(names)))
    return names


def requested(run_dir: Path) -> list[str]:
    """Return the nodes that were resumed since the last look; the requests are removed."""
    names: list[str] = []
    for path in sorted((run_dir / REQUESTS).glob("*.json")):
        with contextlib.suppress(OSError, ValidationError):  # gone, or not ours
            names += ResumeRequest.model_validate_json(path.read_bytes()).nodes
        path.unlink(missing_ok=True)
    return names
