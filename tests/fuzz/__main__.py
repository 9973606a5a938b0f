"""``make fuzz``: feeds every target for long, with the inputs of a seed that is printed, and counts what each took."""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.fuzz.feeding import bounded_memory, feed
from tests.fuzz.targets import TARGETS

TURN_S = 0.5
"""How long one target is fed before the next."""
APART = 10**12
"""Between the seeds of two processes."""


class Fed(NamedTuple):
    """What one process did."""

    inputs: Counter[str]
    defects: tuple[str, ...]


def feed_all(names: tuple[str, ...], seed: int, minutes: float) -> Fed:
    """Feed the targets by turns; of each one the first defect is kept, and it is not fed any more."""
    inputs, defects, left = Counter[str](), list[str](), list(names)
    end = time.monotonic() + minutes * 60
    with tempfile.TemporaryDirectory(prefix="slipway-fuzz-") as folder, bounded_memory():
        for name in names:
            (Path(folder) / name).mkdir()
            TARGETS[name].prepare(Path(folder) / name)
        while left and time.monotonic() < end:
            for name in tuple(left):
                turn = time.monotonic() + TURN_S
                while time.monotonic() < turn:
                    number = seed + inputs[name]
                    inputs[name] += 1
                    try:
                        feed(TARGETS[name], TARGETS[name].make(Random(number)), Path(folder) / name)
                    except BaseException:  # whatever it is, it is a defect
                        defects.append(f"{name}, input {number}:\n{traceback.format_exc()}")
                        left.remove(name)
                        break
    return Fed(inputs, tuple(defects))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**9)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS])
    arguments = parser.parse_args()
    names = tuple(arguments.targets or TARGETS)
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes, {arguments.processes} processes", flush=True)
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        futures = [
            pool.submit(feed_all, names, arguments.seed + APART * number, arguments.minutes)
            for number in range(arguments.processes)
        ]
        results = [future.result() for future in futures]
    total = sum((each.inputs for each in results), Counter[str]())
    for name in names:
        print(f"{name:15} {total[name]:>12,}")
    print(f"{'all':15} {total.total():>12,}")
    defects = [text for each in results for text in each.defects]
    print(*defects, sep="\n")
    return 1 if defects else 0


if __name__ == "__main__":
    raise SystemExit(main())
