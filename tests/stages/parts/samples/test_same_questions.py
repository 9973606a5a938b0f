from __future__ import annotations

from stages.parts.samples.evidence import items_of, questions
from stages.parts.samples.lines import AccuracyItem, Samples
from tests.samples import answer


def samples(*items: AccuracyItem) -> Samples:
    return Samples(items=items)


def test_items_are_in_the_order_of_their_documents() -> None:
    items = [answer(item, correct=item == 1) for item in (2, 0, 1)]
    assert items_of(samples(*items), hashed=False)["arc"].values.tolist() == [0.0, 1.0, 0.0]


def test_items_are_named_by_their_documents_only_if_all_samples_have_hashes() -> None:
    plain = samples(answer(0, correct=True))
    hashed = samples(answer(0, correct=True).model_copy(update={"doc_hash": "0c4b"}))
    assert questions({"a": hashed})["a"]["arc"].named() == (" 0 0c4b",)
    assert {each["arc"].named() for each in questions({"a": hashed, "b": plain}).values()} == {(" 0",)}
