from __future__ import annotations

import pytest

from stages.parts.base.errors import DamagedModel
from stages.parts.samples.lines import AccuracyItem, Samples
from stages.parts.samples.questions import items_of, questions
from tests.samples import answer


def samples(*items: AccuracyItem) -> Samples:
    return Samples(rounds=(), accuracy=items, perplexity=(), held_out=())


def test_items_of_several_starts_are_rows_of_one_array() -> None:
    items = [answer(item, correct=(item + start) % 2 == 1, restart=start) for start in (1, 0) for item in (2, 0, 1)]
    found = items_of(samples(*items), hashed=False)["arc"]
    assert found.values.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    with pytest.raises(DamagedModel, match="awq do not agree: the starts of the server were asked different questions"):
        questions({"awq": samples(*items[:-1])})


def test_items_are_named_by_their_documents_only_if_all_samples_have_hashes() -> None:
    plain = samples(answer(0, correct=True))
    hashed = samples(answer(0, correct=True).model_copy(update={"doc_hash": "0c4b"}))
    assert questions({"a": hashed})["a"]["arc"].named() == (" 0 0c4b",)
    assert {each["arc"].named() for each in questions({"a": hashed, "b": plain}).values()} == {(" 0",)}
