from __future__ import annotations

from scoring.machine import notes


def test_the_difference_between_the_machines_is_noted_with_its_number():
    (note,) = notes({"fp16": 50.0, "awq": 44.0, "gptq": 49.0})
    assert note.startswith("The machine itself was 12% slower for awq than for fp16")
    assert notes({"fp16": 50.0, "awq": 50.0}) == []
    assert notes({}) == []
