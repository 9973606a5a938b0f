"""The score table that a cluster's UI shows."""

from __future__ import annotations

import pytest

from scoring.metrics import TITLES
from scoring.profile import Profile
from stages.select.selection import select
from stages.select.sentences import markdown
from tests.samples import measured_store, outcome

PROFILE = Profile(name="balanced")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPWAY_RUN", "run-1")
    return measured_store(tmp_path)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def test_the_table_has_a_row_for_each_variant_with_the_winner_in_bold(store):
    _, decision, _ = select(store, PROFILE, ["fp16", "awq", "gptq"])
    said, _, *table = markdown(decision).splitlines()
    assert said == "awq: decided, better than every other"
    head, rule, *rows = cells("\n".join(table))
    assert head[:2] == ["Variant", "Score"]
    assert len(head) == 3 + len(TITLES)
    assert set(rule[1:]) == {"---:"}
    assert {len(row) for row in rows} == {len(head)}
    assert {row[0].strip("*") for row in rows} == {"fp16", "awq", "gptq"}
    assert [row[0] for row in rows if row[0].startswith("**")] == [f"**{decision.winner}**"]


def test_an_excluded_variant_has_its_reason_in_one_cell(store):
    outcome(store, "run-1", "optimize", "awq", "failed", why="no | kernel for\nthis")
    _, decision, _ = select(store, PROFILE, ["fp16", "awq", "gptq"])
    (row,) = [line for line in markdown(decision).splitlines() if line.startswith("| awq")]
    assert "excluded: optimize failed: no \\| kernel" in row
    assert row.count(" | ") == 2 + len(TITLES)
