"""Ask the quality tasks of a running server in a separate process, which can be ended at any moment and keeps lm-eval's
imports and output out of ours. A call is the request of ``quality.run_tasks``; its ``result`` names the file to write.

The result has lm-eval's form, whoever asked: lm-eval, or for our own tasks ``stages.evaluate.questions``.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from stages.evaluate.preloaded import answer_calls
from stages.evaluate.questions import DEFINED, OWN
from stages.evaluate.questions.question import CHAT, PLAIN, TIMEOUT_S, QuestionTask, Served, answers
from stages.parts.base.files import write_json
from stages.parts.model.description import chat_template
from stages.parts.vllm.client import Access

VARIABLES: Final[dict[str, str]] = {}
MAX_TOKENS: Final = 256
"""lm-eval's own default for an answer."""
CLUSTER_DIGITS: Final = 12
TASKS: Final = Path(__file__).with_name("tasks")
"""Definitions of our own for lm-eval."""
Result = dict[str, Any]


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


def evaluate(request: dict[str, Any]) -> Result:
    """Ask all tasks; their results, with the samples reduced to the measured value of each item. ``left_out`` says for
    each task that cannot be asked of this model why not, and ``seconds`` how long the others took."""
    access, directory = Access(request["url"], request["model"]), Path(request["tokenizer"])
    served = Served(access, directory, request["max_model_len"], request["parses_calls"])
    left_out = {name: why for name in request["tasks"] if (why := unfit(name, served.directory))}
    fit = [name for name in request["tasks"] if name not in left_out]
    parts = [own_task(name, served, request) for name in fit if name in OWN]
    if lm_eval_names := [name for name in fit if name not in OWN]:
        parts += lm_eval_tasks(lm_eval_names, served, request)
    results: Result = {"results": {}, "subtasks": {}, "items": {}, "samples": {}, "seconds": {}}
    for part in parts:
        for field, entries in part.items():
            results[field] |= entries
    return results | {"left_out": left_out}


def unfit(name: str, directory: Path) -> str:
    """Why the task cannot be asked of the model in *directory*; empty if it can."""
    template = chat_template(directory)
    needs = OWN[name].needs if name in OWN else "chat" if name in DEFINED else "nothing"
    if needs != "nothing" and not template:
        return "the model's tokenizer has no chat template"
    if needs == "tools" and "tools" not in template:
        return "the model's chat template does not show it tools"
    return ""


def own_task(name: str, served: Served, request: Mapping[str, Any]) -> Result:
    task, (start, stop), began = OWN[name], request["parts"][name], time.monotonic()
    questions = list(islice(task.questions(served), start, stop))
    answered = answers(served, questions, request["concurrency"])
    graded = [value for value, _ in answered]
    samples = [
        {
            "doc_id": start + place,
            "doc_hash": question.digest,
            "cluster": question.cluster,
            "filter": "none",
            "tokens": tokens,
            task.metric: value,
        }
        for place, (question, (value, tokens)) in enumerate(zip(questions, answered, strict=True))
    ]
    return {
        "results": {name: _metrics(task, graded)} if graded else {},
        "items": {name: len(samples)},
        "samples": {name: samples},
        "seconds": {name: time.monotonic() - began},
    }


def _metrics(task: QuestionTask, graded: Sequence[Any]) -> dict[str, float]:
    if task.metric == "bits_per_byte":
        likelihood, size = (sum(column) for column in zip(*graded, strict=True))
        return {"bits_per_byte,none": -likelihood / size / math.log(2)}
    error = stdev(graded) / math.sqrt(len(graded)) if len(graded) > 1 else 0.0
    return {f"{task.metric},none": fmean(graded), f"{task.metric}_stderr,none": error}


def lm_eval_tasks(names: Sequence[str], served: Served, request: Mapping[str, Any]) -> list[Result]:
    """lm-eval's results: of the tasks that generate text through the model's chat template, if it has one, and of the
    others, whose probabilities only the plain completions give."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=[str(TASKS), *filter(None, [request["tasks_path"]])],
        include_defaults=request["include_defaults"],
        metadata={"tokenizer": request["tokenizer"]},
    )
    chats: dict[bool, list[Any]] = {True: [], False: []}
    items: dict[str, list[int]] = {}
    for name in names:
        loaded = manager.load([name])
        items |= _take_out(loaded, *request["parts"][name])
        generating = [task for task in loaded["tasks"].values() if task.OUTPUT_TYPE == "generate_until"]
        for task in generating:  # with a short context, a server refuses to give long answers
            most = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", MAX_TOKENS)
            shortened = {"max_gen_toks": min(served.max_model_len // 2, most)}
            task.set_config("generation_kwargs", shortened, update=True)
        generates = len(generating) == len(loaded["tasks"])
        group = loaded.get("groups", {}).get(name)
        if loaded["tasks"]:
            chats[generates and served.chats] += [group] if group else loaded["tasks"].values()
    of_items = {"samples": items} if items else {"limit": request["parts"][names[0]][1]}
    return [
        _asked(tasks, chat, served, request["concurrency"], task_manager=manager, **of_items)
        for chat, tasks in chats.items()
        if tasks
    ]


def _take_out(loaded: Any, start: int, stop: int | None) -> dict[str, list[int]]:
    """List the numbers of the items to ask by task, if they do not begin with the first. Tasks without any are
    removed from *loaded*, since lm-eval takes no numbers for all numbers."""
    if start == 0:
        return {}
    sizes = {name: len(task.eval_docs) for name, task in loaded["tasks"].items()}
    items = {name: list(range(start, min(size, stop or size))) for name, size in sizes.items()}
    for name in [name for name, numbers in items.items() if not numbers]:
        del loaded["tasks"][name], items[name]
        for group in loaded.get("groups", {}).values():
            group.pop(name)
    return items


def _asked(tasks: list[Any], chat: bool, served: Served, concurrency: int, **options: Any) -> Result:
    import lm_eval

    began = time.monotonic()
    arguments = {"model": served.access.model, "num_concurrent": concurrency, "timeout": TIMEOUT_S}
    if chat:
        from stages.evaluate.answers import WholeAnswers

        model: Any = WholeAnswers(base_url=served.access.at(CHAT), **arguments)
        arguments = {}
    else:
        model = "local-completions"
        arguments |= {
            "base_url": served.access.at(PLAIN),
            "tokenizer": str(served.directory),
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "max_length": served.max_model_len,
        }
    result = lm_eval.simple_evaluate(
        model=model, model_args=arguments or None, tasks=tasks, apply_chat_template=chat, log_samples=True, **options
    )
    counts = {task: len({sample["doc_id"] for sample in samples}) for task, samples in result["samples"].items()}
    by_item_s = (time.monotonic() - began) / max(1, sum(counts.values()))
    return {
        "results": {task: _numbers(metrics) for task, metrics in result["results"].items()},
        "subtasks": result["group_subtasks"],
        "items": counts,
        "samples": {task: [_sample(sample) for sample in samples] for task, samples in result["samples"].items()},
        "seconds": {task: count * by_item_s for task, count in counts.items()},
    }


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Select the numeric metrics: a standard error that lm-eval does not compute is the text 'N/A'."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if "," in name and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    """Reduce a sample; its cluster is its longest text, which questions about the same passage have in common."""
    document = sample.get("doc")
    texts = [text for text in document.values() if isinstance(text, str)] if isinstance(document, dict) else []
    longest = max(texts, key=len, default="")
    return {
        "doc_id": sample["doc_id"],
        "doc_hash": sample["doc_hash"],
        "cluster": hashlib.sha256(longest.encode()).hexdigest()[:CLUSTER_DIGITS] if longest else None,
        "filter": sample["filter"],
        **{metric: sample[metric] for metric in sample["metrics"] if metric in sample},
    }


if __name__ == "__main__":
    main()
