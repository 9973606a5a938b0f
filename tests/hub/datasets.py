"""Small data sets in the form of those that quality tasks fetch from the Hub, with items of our own."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.evaluate.questions.question import DATA
from stages.parts.model.hub import DatasetFile
from tests.hub.server import HubServer


def add_datasets(hub: HubServer, count: int) -> None:
    """As many items of each data set, at the commit that is pinned."""
    _add(hub, DATA["gsm8k"], parquet([problem(number) for number in range(count)]))
    _add(hub, DATA["ifeval"], "".join(json.dumps(prompt(number)) + "\n" for number in range(count)).encode())


def problem(number: int) -> dict[str, Any]:
    """The answer is ``3 * number + 1000``."""
    question = f"A mill has {1000 + number} sacks. A cart brings {2 * number} more. How many sacks has the mill then?"
    return {
        "question": question,
        "answer": f"{1000 + number} + {2 * number} = {1000 + 3 * number}\n#### {1000 + 3 * number:,}",
    }


def prompt(number: int) -> dict[str, Any]:
    """Every fifth demands a language."""
    names = ["punctuation:no_comma", "length_constraints:number_words"]
    arguments: list[dict[str, Any]] = [{}, {"relation": "at least", "num_words": 5, "keywords": None}]
    if number % 5 == 4:
        names, arguments = ["language:response_language"], [{"language": "de"}]
    text = f"Write about field {number} in at least 5 words, without commas."
    return {"key": number, "prompt": text, "instruction_id_list": names, "kwargs": arguments}


def parquet(rows: list[dict[str, Any]]) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), content)
    return content.getvalue()


def _add(hub: HubServer, file: DatasetFile, content: bytes) -> None:
    hub.pin(file.dataset, file.commit, {file.path: content})
