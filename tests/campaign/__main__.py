"""``make campaign``: kills programs, runs and rollouts, lets power, disks and the Hub fail, and hosts see late, by
a printed seed."""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

from stages.parts.machine.lock import LOCK_VARIABLE
from tests import preloaded
from tests.campaign.parts import PARTS, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="for all parts together")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**9)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    arguments = parser.parse_args()
    names = arguments.parts or [*PARTS]
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes: {', '.join(names)}", flush=True)
    preloaded.install()
    results = {}
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        os.environ[LOCK_VARIABLE] = f"{folder}/machine.lock"
        for number, name in enumerate(names):
            place = Path(folder, name).resolve()
            place.mkdir()
            until_s = time.monotonic() + arguments.minutes * 60 / len(names)
            results[name] = PARTS[name](place, random.Random(f"{arguments.seed} {name} {number}"), until_s)
    print(*table(results), sep="\n")
    return 1 if any(result.wrong for result in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
