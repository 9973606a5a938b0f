from types import SimpleNamespace
from typing import Any


class TaskManager:
    def __init__(self, **_: Any) -> None:
        self.task_index = {"questions": SimpleNamespace(cfg={"task": "questions"})}

    def load(self, names: list[str]) -> dict[str, Any]:
        made = {"OUTPUT_TYPE": "multiple_choice", "eval_docs": range(1000)}
        return {"tasks": {each: SimpleNamespace(task_name=each, **made) for each in names}}
