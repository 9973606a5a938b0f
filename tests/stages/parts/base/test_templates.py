"""YAML from templates, whatever a value holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.templates import rendered

VALUES = (
    *("plain", "yes", "", " # no comment", "a: b\n\"c\"\t'd'", "{{ name }}", "é 😀"),
    *("\x7f\x85\x9f\u2028\u2029\ufeff", "\ud800"),
    *(0, 1.5, True, None, ["a", {"b": "c"}]),
)


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_read_as_it_was(tmp_path: Path, value: Any) -> None:
    (tmp_path / "one.yaml.jinja").write_text("field: {nested: {{ value }}}\n---\n# nothing\n---\n[{{ value }}]\n")
    assert rendered(tmp_path / "one.yaml.jinja", value=value) == [{"field": {"nested": value}}, [value]]


def test_a_value_that_was_not_given_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "one.yaml.jinja").write_text("field: {{ missing }}\n")
    with pytest.raises(TypeError, match="StrictUndefined"):
        rendered(tmp_path / "one.yaml.jinja")
