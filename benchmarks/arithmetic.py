"""Which arithmetic a processor computes fastest: one linear layer, and vLLM's answers, in bfloat16 and in float32.

    make bench-arithmetic
    python -m benchmarks.arithmetic --model DIRECTORY

The layer takes 1024 tokens from 256 to 768 dimensions on one core, in a process for each set of instructions that
oneDNN can be limited to. With ``--model`` two servers without a GPU answer the same prompt, one per dtype, each on half
of the cores. The two dtypes take turns and the best of several times counts, so that the ratio holds on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stages.parts.base.settings import Serving
from stages.parts.engine.client import http
from stages.parts.engine.server import Server, ServerSpec, running
from stages.parts.machine.processor import LIMIT, cpu_dtype, processor

LIMITS: Final = ("DEFAULT", "AVX512_CORE", "AVX2")
TOKENS, INPUTS, OUTPUTS = 1024, 256, 768
ROUNDS: Final = 100
ANSWERS: Final = 5
ANSWER_TOKENS: Final = 128
TIMEOUT_S: Final = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="a directory that vLLM serves in either dtype, such as a fp16 variant"
    )
    parser.add_argument("--layer", action="store_true", help="only the layer, limited as the environment says")
    asked = parser.parse_args()
    if asked.layer:
        report(layer_ms(), "ms")
        return
    print(f"{'Processor':<22} {'bfloat16':>14} {'float32':>14}   float32 faster by")
    for limit in LIMITS:
        environment = os.environ | {LIMIT: limit}
        subprocess.run([sys.executable, "-m", "benchmarks.arithmetic", "--layer"], env=environment, check=True)
    if asked.model:
        report(tokens_per_s(asked.model), "tokens/s")


def report(measured: Mapping[str, float], unit: str) -> None:
    found, bfloat16, float32 = processor(), measured["bfloat16"], measured["float32"]
    ratio = bfloat16 / float32 if unit == "ms" else float32 / bfloat16
    name = found.name if found else "unknown"
    chosen = f"auto: {cpu_dtype(found)}"
    print(f"{name:<22} {bfloat16:>9.2f} {unit:<8} {float32:>5.2f} {unit:<8} {ratio:.2f} ({chosen})", flush=True)


def layer_ms() -> dict[str, float]:
    """The shortest time of the layer by dtype, in ms."""
    import torch

    torch.set_num_threads(1)
    given, weight = torch.randn(TOKENS, INPUTS), torch.randn(OUTPUTS, INPUTS)
    pairs = {
        name: (given.to(dtype), weight.to(dtype))
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    }
    best = dict.fromkeys(pairs, math.inf)
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, (tokens, weights) in pairs.items():
                started = time.perf_counter()
                torch.nn.functional.linear(tokens, weights)
                best[name] = min(best[name], 1000 * (time.perf_counter() - started))
    return best


def tokens_per_s(model: Path) -> dict[str, float]:
    """The highest rate at which a server generates an answer for one user, by dtype."""
    best = {"bfloat16": 0.0, "float32": 0.0}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipway-bench-")))
        servers = {
            dtype: stack.enter_context(running(server_spec(model, dtype, half, folder / f"{dtype}.log")))
            for half, dtype in enumerate(best)
        }
        for _ in range(ANSWERS):
            for dtype, server in servers.items():
                started = time.perf_counter()
                answer(server)
                best[dtype] = max(best[dtype], ANSWER_TOKENS / (time.perf_counter() - started))
    return best


def server_spec(model: Path, dtype: str, half: int, log: Path) -> ServerSpec:
    settings = Serving.model_validate({"dtype": dtype, "max_model_len": 512, "kv_cache_mib": 64, "enforce_eager": True})
    return ServerSpec(model, "model", settings, log, half=half)


def answer(server: Server) -> None:
    asked = {"model": server.name, "prompt": "the " * 100, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    http().post(f"{server.url}/v1/completions", json=asked, timeout=TIMEOUT_S).raise_for_status()


if __name__ == "__main__":
    main()
