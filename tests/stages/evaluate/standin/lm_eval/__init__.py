"""A program that can be started in lm-eval's place: it answers at once, and notes that it was asked."""

import os
from pathlib import Path
from typing import Any

ITEMS = 1000


def simple_evaluate(
    model_args: dict[str, Any],
    tasks: list[Any],
    limit: int | None = None,
    samples: dict[str, list[int]] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Three of every four items are right; none if the model or its recipe is named ``wrong``. A model named ``unsure``
    answers a tenth of them otherwise, both ways equally often."""
    name = str(model_args["model"]).rpartition("-")[0]
    names = [each.task_name for each in tasks]
    asked = (samples or {}).get(names[0], range(min(limit or ITEMS, ITEMS)))
    with Path(os.environ["STANDIN_JOURNAL"]).open("a") as file:
        file.write(f"quality {name} {asked[0]}-{asked[-1]}\n")
    otherwise = (0, 1) if name == "unsure" else ()
    right = {item: (item % 4 > 0) != (item % 20 in otherwise) and not name.endswith("wrong") for item in asked}
    answers = [
        {"doc_id": item, "doc_hash": str(item), "filter": "none", "metrics": ["acc"], "acc": float(each)}
        for item, each in right.items()
    ]
    return {
        "results": {task: {"acc,none": sum(right.values()) / len(right), "acc_stderr,none": 0.1} for task in names},
        "group_subtasks": {},
        "samples": dict.fromkeys(names, answers),
    }
