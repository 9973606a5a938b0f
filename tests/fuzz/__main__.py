"""``make fuzz``: feeds every target for long, with the inputs of a seed that is printed, and counts what each took."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.fuzz.feeding import feed_all
from tests.fuzz.targets import TARGETS

APART = 10**12
"""Between the seeds of two processes."""


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
