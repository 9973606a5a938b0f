"""Run vLLM's commands in a process that has imported vLLM: ``{"arguments": […]}`` is the call ``vllm …``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from stages.evaluate.preloaded import answer_calls
from stages.parts.engine.arguments import VLLM

MODULE: Final = "stages.evaluate.generator"
VARIABLES: Final = {"HF_HUB_OFFLINE": "1"}


def main() -> None:
    answer_calls(prepare, lambda call: run_vllm(call["arguments"]))


def prepare() -> None:
    with contextlib.suppress(SystemExit):
        run_vllm(["--version"])  # imports what every command needs


def run_vllm(arguments: Sequence[str]) -> int:
    """The exit status of the ``vllm`` command, run in this process."""
    sys.argv = ["vllm", *arguments]
    command: Any = import_module(VLLM[-1])
    command.main()
    return 0


if __name__ == "__main__":
    main()
