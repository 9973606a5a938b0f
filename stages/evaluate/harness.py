"""Run lm-eval against a running server in a separate process, which can be ended at any moment and keeps lm-eval's
imports and output out of ours. A call is the request of ``quality.run_tasks``; its ``result`` names the file to write.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

from stages.evaluate.preloaded import answer_calls
from stages.parts.base.store import write_json

MODULE: Final = "stages.evaluate.harness"
VARIABLES: Final[dict[str, str]] = {}


def main() -> None:
    answer_calls(prepare, run)


def prepare() -> None:
    """Import what lm-eval imports only when it is used."""
    for module in ("lm_eval.tasks", "lm_eval.models.openai_completions"):
        import_module(module)
    from transformers import AutoTokenizer  # noqa: F401


def run(request: dict[str, Any]) -> int:
    write_json(Path(request["result"]), evaluate(request))
    return 0


def evaluate(request: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's result, with its samples reduced to the measured values of each item."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    result = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": request["model"],
            "base_url": f"{request['url']}/v1/completions",
            "tokenizer": request["tokenizer"],
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "num_concurrent": request["concurrency"],
            "max_length": request["max_model_len"],
        },
        tasks=request["tasks"],
        limit=request["limit"],
        task_manager=TaskManager(
            include_path=request["tasks_path"],
            include_defaults=request["include_defaults"],
            metadata={"tokenizer": request["tokenizer"]},
        ),
        log_samples=True,
    )
    return {
        "results": {task: _numbers(metrics) for task, metrics in result["results"].items()},
        "subtasks": result["group_subtasks"],
        "items": {task: count["effective"] for task, count in result["n-samples"].items()},
        "samples": {task: [_sample(each) for each in samples] for task, samples in result["samples"].items()},
    }


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The numeric metrics: a standard error that lm-eval does not compute is the text 'N/A'."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if "," in name and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "doc_id": sample["doc_id"],
        "doc_hash": sample["doc_hash"],
        "filter": sample["filter"],
        **{metric: sample[metric] for metric in sample["metrics"] if metric in sample},
    }


if __name__ == "__main__":
    main()
