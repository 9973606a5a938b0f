"""Run vLLM's commands in a process that has imported vLLM: ``{"arguments": […]}`` is the call ``vllm …``.

With ``limits`` (``stages.evaluate.bench.Limits``) it ends as soon as too many requests have missed them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any, Final

from stages.evaluate.preloaded import answer_calls
from stages.parts.vllm.arguments import VLLM

# vLLM seeds the prompts of a trace with Python's hash of a text.
VARIABLES: Final = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
ENDED_EARLY: Final = 3
Send = Callable[..., Awaitable[Any]]


def main() -> None:
    answer_calls(prepare, lambda call: run_vllm(call["arguments"], call.get("limits")))


def prepare() -> None:
    with contextlib.suppress(SystemExit):
        run_vllm(["bench", "serve", "--help"])  # imports what the command needs


def run_vllm(arguments: Sequence[str], limits: dict[str, Any] | None = None) -> int:
    """Run the ``vllm`` command in this process; its exit status."""
    if limits:
        backends = import_module("vllm.benchmarks.lib.endpoint_request_func").ASYNC_REQUEST_FUNCS
        backends["openai"] = ending_early(backends["openai"], **limits)
    sys.argv = ["vllm", *arguments]
    command: Any = import_module(VLLM)
    command.main()
    return 0


def ending_early(send: Send, *, ttft_ms: float, tpot_ms: float, allowed: int, first: int, end: int) -> Send:
    """*send*, which ends the program with ``ENDED_EARLY`` once more than *allowed* of the requests from number *first*
    up to *end* have taken longer than a limit."""
    missed = 0

    async def send_and_count(request_func_input: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal missed
        answer = await send(request_func_input, *arguments, **named)
        number = str(request_func_input.request_id or "").rpartition("-")[2]
        if answer.success and number.isdigit() and first <= int(number) < end:
            per_token_s = (answer.latency - answer.ttft) / max(1, (answer.output_tokens or 1) - 1)
            missed += answer.ttft * 1000 > ttft_ms or per_token_s * 1000 > tpot_ms
            if missed > allowed:
                raise SystemExit(ENDED_EARLY)
        return answer

    return send_and_count


if __name__ == "__main__":
    main()
