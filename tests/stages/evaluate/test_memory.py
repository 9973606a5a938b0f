from __future__ import annotations

import sys
import time
from pathlib import Path

from stages.parts.machine.process import INTERVAL_S, Contained, PeakMemory
from tests.serving import wait_until

MIB = 1 << 20
PARENT = """
import subprocess, sys, time, pathlib
held = bytearray(60 * 2**20)
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], check=True)
pathlib.Path(sys.argv[3]).touch()
time.sleep(1000)
"""
WAITS = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
CHILD = f"held = bytearray(100 * 2**20)\n{WAITS}"


def test_the_peak_counts_children_and_memory_freed_later(tmp_path: Path) -> None:
    go_on, done = tmp_path / "go-on", tmp_path / "done"
    command = [sys.executable, "-c", PARENT, CHILD, str(go_on), str(done)]
    with Contained(command) as process, PeakMemory(process.pid) as memory:
        wait_until(lambda: memory.resident_bytes > 160 * MIB, "a look at both")
        go_on.touch()
        wait_until(done.exists, "the child's end")
    assert 160 * MIB < memory.resident_bytes < 1024 * MIB


def test_a_process_that_ended_while_watched_leaves_its_peak(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    with Contained([sys.executable, "-c", WAITS, str(go_on)]) as process, PeakMemory(process.pid) as memory:
        wait_until(lambda: memory.resident_bytes > MIB, "a look at it")
        go_on.touch()
        process.wait(60)
        time.sleep(2 * INTERVAL_S)
    assert memory.resident_bytes > MIB
