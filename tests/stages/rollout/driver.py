"""Runs a rollout on a DiskTarget, as a program that a test can kill.

python -m tests.stages.rollout.driver STORE PLATFORM RELEASE SETTINGS UNTIL, or ``rollback`` instead of UNTIL
"""

from __future__ import annotations

import sys
from pathlib import Path

from stages.parts.base import program
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.rollout.state_machine import roll_out
from tests.stages.rollout.disk_target import DiskTarget


def main() -> None:
    root, platform, release, settings, until = sys.argv[1:]
    store = ModelStore(Path(root), "org/name")
    target = DiskTarget(Path(platform), store.releases)
    back = until == "rollback"
    given = Rollout.model_validate_json(settings)
    print(roll_out(store, target, release, given, rollback=back, until="promote" if back else until).state)


if __name__ == "__main__":
    program.main(main)
