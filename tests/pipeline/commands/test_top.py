"""``slipway top`` on a terminal and in a pipe; tests/stages/serve/test_shared_address.py has endpoints for it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

TOP = [sys.executable, "-m", "pipeline", "top", "--every", "0.1", "--store"]


def test_on_a_terminal_it_looks_until_ctrl_c(tmp_path: Path) -> None:
    terminal, other_end = pty.openpty()
    variables = os.environ | {"TERM": "xterm"}
    with subprocess.Popen([*TOP, str(tmp_path)], stdin=other_end, stdout=other_end, env=variables) as process:
        shown = b""
        while b"slipway serve MODEL" not in shown:
            shown += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    for descriptor in (terminal, other_end):
        os.close(descriptor)


def test_in_a_pipe_it_looks_once(tmp_path: Path) -> None:
    said = subprocess.run([*TOP, str(tmp_path)], capture_output=True, text=True, check=True)
    assert said.stdout == "nothing is being served; start an endpoint with: slipway serve MODEL\n"
    said = subprocess.run([*TOP, str(tmp_path), "--json"], capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == {"releases": [], "clients": []}
