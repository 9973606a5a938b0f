"""docs/models.md follows from what was recorded, and that from what can be seen cheaply."""

from __future__ import annotations

import pytest

from scoring.capacity.families import FAMILIES
from stages.parts.base import formats
from stages.parts.base.formats import FORMATS, why_not_made
from stages.parts.vllm.parsers import ChatModel
from tests.extras import need
from tests.models import page
from tests.models.prove import read
from tests.models.servable import KINDS, PARTS, TOOL_PARSERS, form_of

need("transformers")
RECORD = read()


def test_the_page_shows_what_was_recorded() -> None:
    assert page.FILE.read_text(encoding="utf-8") == page.text()


def test_what_failed_is_not_tried_again_and_everything_else_is() -> None:
    assert page.failures() == formats.FAILURES
    for name in FORMATS:
        for kind, found in RECORD.items():
            config = {"model_type": kind, "text_config": {"model_type": KINDS[kind]}}
            failed = found["made"].get(name, "made") != "made" and not found["fused_experts"]
            served = found.get("served", {})
            failed |= name != "fp16" and isinstance(served.get("fp16"), dict) and isinstance(served.get(name), str)
            assert bool(why_not_made(name, "fp16", config)) == failed, (name, kind)


def test_at_least_thirty_families_are_recorded_and_all_can_be_planned() -> None:
    assert len(RECORD) >= 30
    assert RECORD.keys() <= KINDS.keys()
    assert {KINDS[kind] for kind in RECORD} <= FAMILIES.keys()


@pytest.mark.parametrize("kind", RECORD)
def test_what_was_recorded_follows_from_the_configuration(kind: str) -> None:
    found = RECORD[kind]
    assert page.planned(kind, found)
    assert "fp16" in found["made"].keys() <= FORMATS.keys()
    served = found.get("served", {})
    assert {name for name, result in found["made"].items() if result == "made"} >= served.keys()
    for name, result in found["made"].items():
        if name != "fp16" and found["fused_experts"]:
            assert found["fused_experts"] in result, "what check leaves out is not made"
    for each in served.values():
        if isinstance(each, dict) and "tools" in each:
            assert each["tools"] == TOOL_PARSERS[kind]
        assert not (isinstance(each, dict) and "picture" in each and kind not in PARTS)


@pytest.mark.parametrize("kind", TOOL_PARSERS)
def test_a_template_in_the_form_of_the_family_gets_its_parser(kind: str) -> None:
    form = form_of(kind)
    assert form is not None
    assert ChatModel(kind, "{{ tools }}" + " ".join(form.marks)).tool_parser == TOOL_PARSERS[kind]
