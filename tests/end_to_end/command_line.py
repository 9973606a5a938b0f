"""The product as its users have it: the command line, on one store, with a Hub that has the demo model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from stages.parts.base.store import ModelStore
from stages.parts.machine.hardware import processor
from stages.parts.machine.process import Contained
from tests.demo import DEMO
from tests.demo import MODEL as MODEL
from tests.hub.server import HubServer

EVERY: Final = bool(os.environ.get("EVERY_VARIANT"))
"""As in ``make test-all``: awq too, whose kernel is gptq's, and int8 where vLLM can serve 4 bit."""
SERVED_IN_4_BIT: Final = ("gptq", "awq") if EVERY else ("gptq",)
FOUR_BIT: Final = SERVED_IN_4_BIT if (here := processor()) and here.avx512 else ()
"""The 4-bit variants, where vLLM can serve them."""
EIGHT_BIT: Final = ("int8",) if EVERY or not FOUR_BIT else ()
VARIANTS: Final = ("fp16", *FOUR_BIT, *EIGHT_BIT)
SETTINGS: Final = DEMO / "slipway.yaml"
BLOCKS, STEADY_S = 2, 2
PROMPT_TOKENS, OUTPUT_TOKENS, SPREAD = 64, 32, 0.5
CHANGED: Final = (
    f"optimize.variants=[{', '.join(('fp16', *SERVED_IN_4_BIT, *EIGHT_BIT))}]",
    "optimize.calibration.samples=16",
    "workload.budget_minutes=1",  # spent in the two blocks that are measured in any case
    f"workload.steady_s={STEADY_S}",
    "workload.ramp_s=0.25",
    "workload.trial_s=0.5",
    "workload.trials=3",
    f"workload.prompt_tokens={PROMPT_TOKENS}",
    f"workload.prompt_spread={SPREAD}",
    f"workload.output_tokens={OUTPUT_TOKENS}",
    f"workload.output_spread={SPREAD}",
    "workload.quality_limit=80",
    "profile.task_loss=0.3",  # what so few items can show
    "profile.constraints.quality_recovery={min: 0.5}",
    "workload.slo={ttft_ms: 5000, tpot_ms: 500}",
    "serving.extra_arguments=[--middleware, tests.failing_requests.FailSome]",
)
"""What is less than in the demo, for time, and what the demo does not make or measure."""
CONFIG: Final = ("--config", str(SETTINGS), *(text for each in CHANGED for text in ("--set", each)))
API_KEY: Final = "a-secret-that-must-not-be-seen"
TOKEN: Final = "hf_another-secret-that-must-not-be-seen"
START_LIMIT_S: Final = 600.0


class Pipeline:
    """The command line on one store, with a Hub that has the demo model."""

    def __init__(self, root: Path, hub: HubServer) -> None:
        self.root = root
        self.store = ModelStore(root, MODEL)
        self.environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": TOKEN,
            "SLIPWAY_API_KEY": API_KEY,
            "SLIPWAY_STORE": str(root),
        }

    def command(self, *arguments: str) -> list[str]:
        return [str(Path(sys.executable).with_name("slipway")), *arguments]

    def call(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment | variables
        return subprocess.run(self.command(*arguments), env=environment, capture_output=True, text=True, check=False)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.call("run", MODEL, *CONFIG, *arguments, **variables)

    def killed_when(self, task: str, log_line: str) -> None:
        """Start a run and SIGKILL the command line as soon as *task* has logged *log_line*."""
        before = set(self.store.runs.glob("*"))
        with Contained(self.command("run", MODEL, *CONFIG), environment=self.environment) as run:
            deadline = time.monotonic() + START_LIMIT_S
            while time.monotonic() < deadline:
                assert run.poll() is None, "it ended before it could be killed"
                logs = [
                    path for each in set(self.store.runs.glob("*")) - before for path in each.glob(f"logs/{task}.log")
                ]
                if any(log_line in path.read_text(errors="replace") for path in logs):
                    break
                time.sleep(0.1)
            else:
                pytest.fail(f"{task} did not come to {log_line!r}")
            (engine,) = children_of(run.pid)
            os.kill(engine, signal.SIGKILL)


def wait_until_gone(text: str) -> None:
    deadline = time.monotonic() + 60
    while left := processes_naming(text):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)


def processes_naming(text: str) -> list[str]:
    """Living processes, other than this one, whose command line or environment names *text*."""
    return [line for line in (read_process(pid) for pid in living()) if text in line]


def command_lines() -> list[str]:
    return [read_process(pid, "cmdline") for pid in living()]


def living() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if int(folder.name) != os.getpid()]


def read_process(pid: int, *names: str) -> str:
    """What /proc says of a process; nothing once it has ended."""
    try:
        parts = [Path(f"/proc/{pid}/{name}").read_bytes() for name in names or ("cmdline", "environ")]
    except OSError:
        return ""
    return b" ".join(parts).replace(b"\0", b" ").decode(errors="replace")


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
