"""A program that can be started in lm-eval's place: it answers at once, and notes that it was asked."""

import os
from pathlib import Path
from typing import Any

ITEMS = 4


def simple_evaluate(model_args: dict[str, Any], tasks: list[str], **_: Any) -> dict[str, Any]:
    """Three of four items right at the first start of a server, two at any further."""
    name = str(model_args["model"]).rpartition("-")[0]
    journal = Path(os.environ["STANDIN_JOURNAL"])
    starts = journal.read_text().splitlines().count(f"quality {name}")
    with journal.open("a") as file:
        file.write(f"quality {name}\n")
    right = 3 if starts == 0 else 2
    samples = [
        {"doc_id": item, "doc_hash": str(item), "filter": "none", "metrics": ["acc"], "acc": float(item < right)}
        for item in range(ITEMS)
    ]
    return {
        "results": {task: {"acc,none": right / ITEMS, "acc_stderr,none": 0.1} for task in tasks},
        "group_subtasks": {},
        "n-samples": {task: {"effective": ITEMS} for task in tasks},
        "samples": dict.fromkeys(tasks, samples),
    }
