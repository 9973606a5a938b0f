"""A store with releases, and a platform in a folder to roll them out on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages.parts.base.files import swap_link, write_json
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.releases import release as releases
from stages.rollout.state_machine import roll_out
from tests.serving import REPOSITORY
from tests.stages.rollout.disk_target import DiskTarget
from tests.stages.rollout.release_server import probes

MODEL = "org/name"
GOOD = "0001-fp16-000000000001"
NEXT = "0002-awq-000000000002"
SETTINGS = Rollout(
    step_s=0, min_requests=16, step_timeout_s=60, ready_timeout_s=60, poll_s=0.01, ttft_slack_ms=5, tpot_slack_ms=2
)


class Stage:
    """A store with releases, and a platform to roll them out on."""

    def __init__(self, folder: Path) -> None:
        self.store = ModelStore(folder / "store", MODEL)
        self.target = DiskTarget(folder / "platform", self.store.releases)

    def make(self, name: str, *, recorded: bool = True, **behaviour: Any) -> str:
        """A release whose server behaves as *behaviour* says."""
        folder = self.store.releases / name
        folder.mkdir(parents=True)
        (folder / "behaviour.json").write_text(json.dumps(behaviour))
        (folder / releases.METRICS).write_text(json.dumps({"release": name, "reason": f"why {name}"}))
        if recorded:
            write_json(folder / releases.PROBES, probes())
        return name

    def nominate(self, name: str) -> None:
        swap_link(self.store.path / releases.CANDIDATE, Path("releases") / name)

    def served(self, name: str = GOOD, **behaviour: Any) -> str:
        """The first release, in production and served."""
        self.make(name, **behaviour)
        roll_out(self.store, self.target, name, SETTINGS)
        return name

    def started(self, release: str, until: str = "promote") -> subprocess.Popen[str]:
        """The rollout as a process of its own, that can be killed."""
        command = [sys.executable, "-m", "tests.stages.rollout.driver", str(self.store.root), str(self.target.folder)]
        command += [release, SETTINGS.model_dump_json(), until]
        return subprocess.Popen(command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def reasons(self) -> str:
        text: str = json.loads(self.store.production_metrics.read_text())["release"]
        return text
