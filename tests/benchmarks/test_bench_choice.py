"""The simulation of ``make bench-choice`` with fewer runs: seeds are fixed, and limits leave room for their number."""

from __future__ import annotations

import pytest

from benchmarks import choice
from benchmarks.choice import (
    LOAD_S,
    QUALITY_S,
    START_S,
    WORKLOAD,
    Bench,
    calibration,
    replicated,
    reversals,
    stated,
    table,
    tally,
)
from benchmarks.truths import (
    ASKED,
    CLUSTERED,
    IDENTICAL,
    LEADS,
    LOST,
    NOISES,
    NOISY,
    ONE_TASK,
    REVISIONS,
    SLOW,
    TASKS,
    TWELVE,
    UNTIDY,
    copies,
)

RUNS = 40
USUAL = NOISES[1]
"""1 % between starts of the server."""


def test_two_copies_are_equivalent():
    found = tally(copies(2), USUAL, RUNS)
    assert found.equivalent >= 0.9
    assert found.wrong <= 0.05


@pytest.mark.parametrize("case", [IDENTICAL[0], IDENTICAL[-1]], ids=lambda case: case.name)
def test_identical_variants_are_not_called_different_however_large_the_noise(case):
    assert tally(case, NOISES[-1], RUNS).wrong <= 0.1


@pytest.mark.parametrize("case", [NOISY, CLUSTERED], ids=lambda case: case.name)
def test_identical_variants_are_not_called_different_where_the_noise_is_less_tidy(case):
    assert tally(case, SLOW, RUNS).wrong <= 0.1


def test_a_variant_that_was_lost_in_the_first_block_is_missing_and_nothing_breaks():
    made = [Bench(LOST, USUAL, [number]).run() for number in range(20)]
    assert {"incomplete", "decided"} <= {each.verdict.outcome for each in made}


def test_a_lead_of_ten_percent_at_equal_quality_is_found():
    found = tally(LEADS[1], USUAL, RUNS)
    assert found.right >= 0.7
    assert found.served >= 0.95
    assert found.minutes <= 2 / 3 * WORKLOAD.budget_minutes


def test_a_variant_that_loses_three_percent_on_one_task_is_not_chosen_and_nothing_is_decided_against_it():
    found = tally(ONE_TASK, USUAL, RUNS)
    assert found.excluded >= 0.85
    assert found.served >= 0.85
    assert found.wrong <= 0.1
    assert found.unresolved >= 0.6


@pytest.mark.parametrize("case", REVISIONS, ids=lambda case: case.name)
def test_twenty_repeats_keep_the_error_rates_against_what_is_in_production(case):
    made = [Bench(case, USUAL, [number, *case.name.encode()]).run().verdict.standing for number in range(20)]
    relations = [each.relation for each in made if each]
    if case.name.startswith("better"):
        assert relations.count("better") >= 18
    else:
        assert relations.count("better") <= (3 if case.name.startswith("at the margin") else 0)
    assert ("worse" in relations) <= (not case.name.startswith(("equal", "better")))


def test_a_third_variant_never_changes_the_order_of_two():
    assert reversals(1000) == 0


def test_the_questions_are_those_of_the_default_workload():
    assert (*TASKS, "perplexity_prose") == WORKLOAD.quality_tasks
    assert max(task.items for task in TASKS.values()) == WORKLOAD.quality_limit


def test_each_block_is_charged_its_starts_and_load_and_each_variant_its_quality():
    bench = Bench(copies(2), USUAL, [0])
    seconds = bench.measure(bench.names), bench.measure(bench.names)
    assert seconds == tuple(2 * (START_S + each) for each in LOAD_S)
    assert bench.plan.block_s(2) == 2 * (START_S + sum(LOAD_S) / 2)
    blocks = Bench(copies(2), NOISES[-1], [0])
    minutes = blocks.run().minutes
    assert minutes == pytest.approx((2 * QUALITY_S + sum(seconds) + (len(blocks.blocks) - 2) * seconds[1]) / 60)
    assert WORKLOAD.budget_minutes - 10 < minutes <= WORKLOAD.budget_minutes


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


def test_the_tables_have_a_row_for_every_case(monkeypatch):
    monkeypatch.setattr(choice, "BUDGET_S", 0.0)  # as few blocks as there can be: no row's figures are looked at
    rows = list(table(1))
    untidy = 3 * len(UNTIDY) + 2 * len(ASKED) + 4 * len(TWELVE)
    assert len(rows) == 2 + len(NOISES) * (len(IDENTICAL) + len(LEADS) + 4) + 2 + untidy
    assert len({row.count("|") for row in rows}) == 1
    assert next(iter(calibration(4))).startswith("| stated")
    assert [row.split(" | ")[0] for row in table(1, "one task")][2:] == ["| 3 % lost on one task"] * len(NOISES)
