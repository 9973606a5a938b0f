"""An endpoint that answers so many questions rightly and the others wrongly, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.evaluate.harness import evaluate
from stages.evaluate.quality import FIRST
from stages.parts.vllm.server import Server
from tests.stages.parts.vllm.answering import Answering, Asked

Said = dict[str, Any]
"""A choice of a reply."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools }}"


def model(folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    """The directory of a model whose tokenizer has this chat template; none if it is empty."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    return folder


def scripted(right: int, script: Callable[[Asked, bool], Said]) -> Answering:
    """*script* answers a question; it is told to be right for the first *right* ones, whatever their order."""
    left, lock = [right], threading.Lock()

    def answer(path: str, asked: Asked) -> tuple[int, Any]:
        if path == "/tokenize":
            return 200, {"tokens": list(range(len(asked["prompt"].split())))}
        with lock:
            left[0] -= 1
            be_right = left[0] >= 0
        choice = script(asked, be_right)
        return 200, {
            "choices": [{"index": 0} | choice],
            "usage": {"completion_tokens": len(json.dumps(choice).split())},
        }

    return Answering(answer)


def ask(
    server: Answering | Server, directory: Path, *tasks: str, part: Sequence[int | None] = (0, FIRST), **request: Any
) -> dict[str, Any]:
    """The harness's result."""
    given = {
        "url": server.url,
        "model": "m",
        "tokenizer": str(directory),
        "max_model_len": 1024,
        "parses_calls": False,
        "tasks": list(tasks),
        "tasks_path": None,
        "include_defaults": False,
        "parts": {task: list(part) for task in tasks},
        "concurrency": 16,
    }
    return evaluate(given | request)


def chat(text: str) -> Said:
    return {"message": {"role": "assistant", "content": text}}


def prompt_of(asked: Asked) -> str:
    """What the user said, or the text to continue."""
    return str(asked["messages"][-1]["content"] if "messages" in asked else asked["prompt"])
