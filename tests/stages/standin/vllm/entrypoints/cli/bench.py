"""A load generator that succeeds at once, and notes in the file ``STANDIN_JOURNAL`` what it was asked to do."""

import argparse
import contextlib
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen


def bench() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url")
    parser.add_argument("--model")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--request-rate", type=float, default=10.0)
    parser.add_argument("--dataset-path", type=Path)
    parser.add_argument("--result-dir", type=Path)
    parser.add_argument("--result-filename")
    asked, _ = parser.parse_known_args()
    behaviour = behaviour_of(asked.tokenizer, asked.model)
    note("load", asked.model, asked.seed)
    if asked.seed == behaviour.get("fails_at_seed"):
        sys.exit("RuntimeError: lost the server")
    if asked.seed == behaviour.get("killed_at_seed") and noted("load", asked.model, asked.seed) == 1:
        with contextlib.suppress(OSError):
            urlopen(f"{asked.base_url}/kill", b"{}")  # noqa: S310
    # A start of its own has an effect of its own on the speed, the same whenever this is repeated.
    drawn = random.Random(f"{asked.model} {asked.seed}").gauss(0, behaviour.get("noise", 0))
    slower = math.exp(drawn) / behaviour.get("faster", 1)
    # With a limit, the wait for the first token is in proportion to the rate, and 0.1 s at this one.
    wait_s = 0.1 * slower * (asked.request_rate / behaviour["limit"] if "limit" in behaviour else 1)
    lines = map(json.loads, asked.dataset_path.read_text().splitlines())
    lengths = [each.get("output_tokens") or each["output_length"] for each in lines]
    told = {
        "completed": len(lengths),
        "failed": 0,
        "start_times": [100.0 + number * slower / asked.request_rate for number in range(len(lengths))],
        "ttfts": [wait_s] * len(lengths),
        "itls": [[0.01 * slower] * (length - 1) for length in lengths],
        "input_lens": [4] * len(lengths),
        "output_lens": lengths,
    }
    (asked.result_dir / asked.result_filename).write_text(json.dumps(told))


def behaviour_of(model: Path, name: str) -> dict[str, Any]:
    """What ``behaviour.json`` says of a server of this name: ``on_fewer_gpus`` changes it for one on fewer GPUs."""
    path = model / "behaviour.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    fewer = found.pop("on_fewer_gpus", {})
    return {**found, **(fewer if "+tp" in name else {})}


def noted(what: str, name: str, number: int) -> int:
    """How often that was done."""
    done = f"{what} {name.rpartition('-')[0]} {number}"
    return sum(line == done for line in Path(os.environ["STANDIN_JOURNAL"]).read_text().splitlines())


def note(what: str, name: str, *numbers: object) -> None:
    """One line: what was done to which variant (its served name without the digest)."""
    with Path(os.environ["STANDIN_JOURNAL"]).open("a") as journal:
        journal.write(" ".join([what, name.rpartition("-")[0], *map(str, numbers)]) + "\n")
