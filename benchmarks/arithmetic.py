"""Which arithmetic a processor computes fastest: linear layers in bfloat16 beside float32.

    make bench-arithmetic

Each set of instructions that oneDNN can be limited to has a process of its own, which computes on one core. The two
dtypes take turns and the best of several times counts, so that the ratio holds on a busy machine, too.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from typing import Final

from stages.parts.machine.hardware import LIMIT, cpu_dtype, processor

LIMITS: Final = {"DEFAULT": "default", "AVX512_CORE": "default", "AVX2": "avx2"}
"""oneDNN's limit, and ``ATEN_CPU_CAPABILITY``, the limit of PyTorch's own kernels."""
LAYERS: Final = {"prompt": (1024, 256, 768), "8 answers": (8, 256, 768), "1 answer, large": (1, 4096, 4096)}
"""Tokens, input and output dimensions."""
TURNS: Final = 100
LAYER: Final = "--layers"


def main() -> None:
    print(f"{'Processor':<20} {'Layer':<16} {'bfloat16':>11} {'float32':>11}   float32 faster by", flush=True)
    for limit, aten in LIMITS.items():
        variables = {LIMIT: limit, "ATEN_CPU_CAPABILITY": aten}
        command = [sys.executable, "-m", "benchmarks.arithmetic", LAYER]
        subprocess.run(command, env=os.environ | variables, check=True)


def layers() -> None:
    """Print each layer's times under the limits of the environment."""
    flags = processor()
    name = flags.name if flags else "unknown"
    for layer, sizes in LAYERS.items():
        ms = layer_ms(*sizes)
        ratio = f"{ms['bfloat16'] / ms['float32']:.2f}"
        print(f"{name:<20} {layer:<16} {ms['bfloat16']:>8.3f} ms {ms['float32']:>8.3f} ms   {ratio}", flush=True)
    print(f"{'':<20} auto: {cpu_dtype(flags)}", flush=True)


def layer_ms(tokens: int, inputs: int, outputs: int) -> dict[str, float]:
    """Time a linear layer by dtype; the shortest times, in ms."""
    import torch

    torch.set_num_threads(1)
    values, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    pairs = {name: (values.to(dtype), weight.to(dtype)) for name, dtype in dtypes.items()}
    best = dict.fromkeys(pairs, math.inf)
    with torch.inference_mode():
        for _ in range(TURNS):
            for name, pair in pairs.items():
                started = time.perf_counter()
                torch.nn.functional.linear(*pair)
                best[name] = min(best[name], 1000 * (time.perf_counter() - started))
    return best


if __name__ == "__main__":
    layers() if LAYER in sys.argv else main()
