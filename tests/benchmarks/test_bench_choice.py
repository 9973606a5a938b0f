"""The simulation of ``make bench-choice`` with fewer runs: seeds are fixed, and limits leave room for their number."""

from __future__ import annotations

from benchmarks.choice import (
    IDENTICAL,
    LEADS,
    NOISES,
    ONE_TASK,
    calibration,
    copies,
    replicated,
    reversals,
    stated,
    table,
    tally,
)

RUNS = 40
USUAL = NOISES[1]
"""1 % between starts of the server."""


def test_two_copies_are_equivalent():
    found = tally(copies(2), USUAL, RUNS)
    assert found.equivalent >= 0.9
    assert found.wrong <= 0.05


def test_identical_variants_are_not_called_different_however_large_the_noise():
    assert tally(IDENTICAL[-1], NOISES[-1], RUNS).wrong <= 0.1


def test_a_lead_of_ten_percent_at_equal_quality_is_found():
    found = tally(LEADS[1], USUAL, RUNS)
    assert found.right >= 0.75
    assert found.served >= 0.95
    assert found.minutes <= 60


def test_a_variant_that_loses_three_percent_on_one_task_is_not_chosen():
    found = tally(ONE_TASK, USUAL, RUNS)
    assert found.excluded >= 0.9
    assert found.right >= 0.9
    assert found.wrong <= 0.1


def test_a_third_variant_never_changes_the_order_of_two():
    assert reversals(1000) == 0


def test_what_is_right_follows_from_the_truth():
    assert copies(2).equal
    assert [each.right() for each in LEADS[:3]] == [{"b"}] * 3
    assert ONE_TASK.right() == {"a"}
    assert not LEADS[0].equal


def test_a_stated_probability_is_compared_with_how_often_it_is_true():
    found = [(0.78, True), (0.82, True), (0.8, True), (0.8, False), (0.99, True)]
    count, mean, true = replicated(found, 0.75, 0.85)
    assert (count, round(mean, 3), true) == (4, 0.8, 0.75)
    assert sum(right for _, right in stated(RUNS)) > 0.8 * RUNS * 0.8


def test_the_tables_have_a_row_for_every_case():
    rows = list(table(1))
    assert len(rows) == 2 + 4 * (len(IDENTICAL) + len(LEADS) + 4)
    assert len({row.count("|") for row in rows}) == 1
    assert next(iter(calibration(4))).startswith("| stated")
