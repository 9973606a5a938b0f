"""The data of the tasks in this folder, pinned and from the Hub alone: given a data set's name, ``datasets`` would also
ask another server about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stages.evaluate.questions.question import DATA
from stages.parts.model.hub import dataset_file

if TYPE_CHECKING:
    from datasets import Dataset


def load(**_metadata: Any) -> dict[str, Dataset]:
    """lm-eval passes its own metadata along; they are not needed."""
    from datasets import Dataset

    return {"test": Dataset.from_parquet(str(dataset_file(DATA["gsm8k"])))}
