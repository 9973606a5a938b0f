from types import SimpleNamespace
from typing import Any


class TaskManager:
    def __init__(self, **_: Any) -> None:
        self.task_index = {"questions": SimpleNamespace(cfg={"task": "questions"})}
