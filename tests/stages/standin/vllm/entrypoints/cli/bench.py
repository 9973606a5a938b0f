"""A load generator that succeeds at once, and notes in the file ``STANDIN_JOURNAL`` what it was asked to do."""

import argparse
import json
import os
import sys
from pathlib import Path


def bench() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--max-concurrency", type=int)
    parser.add_argument("--random-output-len", type=int)
    parser.add_argument("--dataset-path", type=Path)
    parser.add_argument("--result-dir", type=Path)
    parser.add_argument("--result-filename")
    asked, _ = parser.parse_known_args()
    behaviour = json.loads((asked.tokenizer / "behaviour.json").read_text())
    note("load", asked.model, asked.seed, asked.max_concurrency)
    if asked.seed == behaviour.get("fails_at_seed"):
        sys.exit("RuntimeError: lost the server")
    lengths = [asked.random_output_len] * asked.num_prompts
    if asked.dataset_path:
        lengths = [json.loads(line)["output_tokens"] for line in asked.dataset_path.read_text().splitlines()]
    told = {
        "completed": len(lengths),
        "failed": 0,
        "duration": 2.0,
        "start_times": [100.0 + number for number in range(len(lengths))],
        "ttfts": [0.1] * len(lengths),
        "itls": [[0.01] * (length - 1) for length in lengths],
        "input_lens": [4] * len(lengths),
        "output_lens": lengths,
        "max_concurrent_requests": 2,
    }
    (asked.result_dir / asked.result_filename).write_text(json.dumps(told))


def note(what: str, name: str, *numbers: int) -> None:
    """One line: what was done to which variant (its served name without the digest)."""
    with Path(os.environ["STANDIN_JOURNAL"]).open("a") as journal:
        journal.write(" ".join([what, name.rpartition("-")[0], *map(str, numbers)]) + "\n")
