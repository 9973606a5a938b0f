"""A group of the demo's tasks by lm-eval itself, from its yaml to the items that are paired; the probabilities come
from a server that makes them up."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from stages.evaluate.quality import check_tasks, items_of, scores_of
from stages.parts.base.workload import Workload
from stages.parts.samples.figures import task_score
from stages.parts.samples.lines import AccuracyItem, Samples
from tests.extras import need
from tests.serving import DEMO
from tests.stages.parts.vllm.answering import Answering, Asked

GROUP = """
group: demo_group
task: [demo_continuation, demo_few]
aggregate_metric_list:
  - {metric: acc, weight_by_size: false}
"""
FEW = """
include: demo_continuation.yaml
task: demo_few
dataset_kwargs: {data_file: few.jsonl}
"""
FEW_ITEMS, LIMIT = 5, 12


def made_up(path: str, asked: Asked) -> tuple[int, Any]:
    """Each token as likely as the hash of the text up to it says."""
    prompts = asked["prompt"] if isinstance(asked["prompt"][0], list) else [asked["prompt"]]
    choices = []
    for number, prompt in enumerate(prompts):
        told = [None, *(-hashlib.sha256(str(prompt[: end + 1]).encode()).digest()[0] for end in range(1, len(prompt)))]
        likeliest = [None, *({"a": 0.0} for _ in prompt)]
        choices.append({"index": number, "logprobs": {"token_logprobs": [*told, -1.0], "top_logprobs": likeliest}})
    return 200, {"choices": choices}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    need("lm_eval")
    folder = shutil.copytree(DEMO / "tasks", tmp_path / "tasks")
    (folder / "group.yaml").write_text(GROUP)
    (folder / "few.yaml").write_text(FEW)
    lines = (folder / "continuation.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[20 : 20 + FEW_ITEMS]))
    return folder


def test_a_group_has_lm_eval_s_score_and_the_items_of_its_tasks(tasks: Path) -> None:
    from stages.evaluate.harness import evaluate

    workload = Workload(
        name="w",
        prompt_tokens=8,
        output_tokens=8,
        concurrency=1,
        quality_tasks=("demo_group",),
        tasks_path=str(tasks),
    )
    assert check_tasks(workload) is False
    with Answering(made_up) as server:
        found = evaluate(
            {
                "url": server.url,
                "model": "m",
                "tokenizer": str(DEMO / "model"),
                "max_model_len": 1024,
                "tasks": ["demo_group"],
                "tasks_path": str(tasks),
                "include_defaults": False,
                "parts": {"demo_group": [0, LIMIT]},
                "parses_calls": False,
                "concurrency": 1,
            }
        )
    (score,) = scores_of(found)
    assert (score.task, score.kind, score.items) == ("demo_group", "accuracy", LIMIT + FEW_ITEMS)
    assert score.low < score.value < score.high
    items = tuple(each for each in items_of(found) if isinstance(each, AccuracyItem))
    assert [each.subtask for each in items] == ["demo_continuation"] * LIMIT + ["demo_few"] * FEW_ITEMS
    shares = [
        fmean(each.correct for each in items if each.subtask == task) for task in ("demo_continuation", "demo_few")
    ]
    assert score.value == pytest.approx(fmean(shares))
    samples = Samples(items=items)
    again = task_score(score, samples)
    assert again is not None
    assert (again.value, again.low, again.high) == pytest.approx((score.value, score.low, score.high))
