from __future__ import annotations

import sys
import time
from pathlib import Path

from stages.evaluate.memory import INTERVAL_S, PeakMemory
from stages.process import contained
from tests.serving import wait_until

MIB = 1 << 20
PARENT = """
import subprocess, sys, time, pathlib
held = bytearray(60 * 2**20)
subprocess.run([sys.executable, "-c", "import time; held = bytearray(100 * 2**20); time.sleep(1)"], check=True)
pathlib.Path(sys.argv[1]).touch()
time.sleep(1000)
"""


def test_the_peak_counts_children_and_what_is_gone_again(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with contained([sys.executable, "-c", PARENT, str(done)]) as process, PeakMemory(process.pid) as memory:
        wait_until(done.exists, "the child's end")
    assert 160 * MIB < memory.resident_bytes < 1024 * MIB


def test_a_process_that_ended_while_watched_leaves_its_peak() -> None:
    with contained([sys.executable, "-c", "import time; time.sleep(1)"]) as process, PeakMemory(process.pid) as memory:
        process.wait(20)
        time.sleep(2 * INTERVAL_S)
    assert memory.resident_bytes > MIB
