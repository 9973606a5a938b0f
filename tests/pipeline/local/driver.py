"""One engine in a process of its own: ``driver.py MANIFEST STORE RUN_DIR STATE_DIR``; the progress goes to stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pipeline.local.execution import execute
from pipeline.local.folder import RunFolders
from pipeline.local.resources import MachineResources
from pipeline.runs.progress import observer_for
from stages.parts.base.errors import SlipwayError


def main() -> int:
    manifest, store, run_dir, state_dir = map(Path, sys.argv[1:])
    try:
        state = execute(
            json.loads(manifest.read_text()),
            arguments={},
            name=run_dir.name,
            folders=RunFolders({"/mnt/store": store}, run_dir, state_dir),
            capacity=MachineResources(cores=4, memory_bytes=8 << 30),
            observer=observer_for(sys.stderr, run_dir),
        )
    except SlipwayError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    return 0 if state.phase == "Succeeded" else 1


if __name__ == "__main__":
    sys.exit(main())
