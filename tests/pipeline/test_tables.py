"""What the terminal shows of a decision."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipeline.commands.decisions import cost_lines
from pipeline.runs.state import FailedAttempt, Node, RunState
from pipeline.runs.tables import runs_table, score_table, tasks_table
from scoring.profile import Profile
from stages.parts.records.production import Price, Production
from stages.select.selection import select
from tests.samples import measured_store, outcome

VARIANTS = ["fp16", "awq", "gptq"]


@pytest.fixture(scope="module")
def decision(tmp_path_factory: pytest.TempPathFactory) -> Production:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPWAY_RUN", "run-1")
        store = measured_store(tmp_path_factory.mktemp("store"))
        outcome(store, "run-1", "evaluate", "gptq", "failed", why="vLLM did not start")
        return select(store, Profile(name="balanced"), VARIANTS, price=Price(per_hour=2.5))[1]


def drawn(decision: Production, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(score_table(decision))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_winner_has_a_star_its_score_and_its_certainty(decision):
    (row,) = [line for line in drawn(decision) if "★" in line]
    best = decision.candidates[0]
    assert row.split()[:2] == ["★", decision.winner]
    assert f"{best.score:.3f} ({best.score_low:.2f}–{best.score_high:.2f})" in row


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "awq: incomplete, without gptq"),
        ({"outcome": "decided"}, "awq: decided, better than every other"),
        ({"outcome": "unresolved"}, "awq: unresolved, first of the ranking"),
        ({"outcome": "equivalent", "winner": "fp16"}, "fp16: equivalent to awq, and the cheapest to run"),
    ],
)
def test_the_table_says_what_the_outcome_is(decision, changed, said):
    assert drawn(decision.model_copy(update=changed))[0] == f"profile balanced: {said}"


def test_an_only_choice_is_not_called_better_than_others(decision):
    alone = [
        each if each.variant == "awq" else each.model_copy(update={"excluded": "slow"}) for each in decision.candidates
    ]
    only = decision.model_copy(update={"candidates": tuple(alone), "comparisons": (), "outcome": "decided"})
    assert drawn(only)[0].endswith("awq: decided, the only choice")


def test_the_runs_are_listed_with_their_outcomes(decision):
    state = RunState(name="run-1", workflow="slipway", phase="Succeeded", arguments={"model": "org/name"}, nodes=[])
    run = SimpleNamespace(id="run-1", model="org/name", winner="awq", outcome="unresolved", state=state)
    console = Console(file=io.StringIO(), width=100)
    console.print(runs_table([run]))
    head, row = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert head.split() == ["Run", "Model", "Phase", "Winner", "Outcome", "Started", "Took"]
    assert row.split() == ["run-1", "org/name", "Succeeded", "awq", "unresolved", "–", "–"]


def test_the_tasks_of_a_run_say_why_they_were_retried():
    failure = FailedAttempt(phase="Failed", message="the Hub did not answer", exit_code=75)
    node = Node(name="acquire", template="acquire", phase="Succeeded", attempts=2, retried=[failure])
    state = RunState(name="run-1", workflow="slipway", phase="Succeeded", arguments={}, nodes=[node])
    console = Console(file=io.StringIO(), width=100)
    console.print(tasks_table(SimpleNamespace(state=state)))
    assert "attempt 1 failed: the Hub did not answer" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("basis", ["goodput", "throughput"])
def test_the_cost_of_tokens_names_its_rate(decision, basis):
    candidates = [
        each.model_copy(update={"cost": each.cost and each.cost.model_copy(update={"basis": basis, "high": None})})
        for each in decision.candidates
    ]
    priced = decision.model_copy(update={"candidates": tuple(candidates)})
    assert drawn(priced)[-1].strip() == f"USD for a million output tokens at the {basis}"
    cost = candidates[0].cost
    assert cost is not None
    line = cost_lines(priced)[0]
    assert f"(≥ {cost.low:.3g}) for a million output tokens, at the " in line
    assert basis in line


def test_a_variant_that_is_out_has_no_numbers(decision):
    (row,) = [line for line in drawn(decision) if line.strip().startswith("gptq")]
    assert row.split() == ["gptq", "out", *["–"] * 6]


@pytest.mark.parametrize("width", [80, 120])
def test_large_numbers_fit(decision, width):
    large = {"quality": 0.81234, "latency": 123456.7, "throughput": 98765.4, "memory": 140.25e9}
    candidates = [
        each.model_copy(
            update={
                "variant": f"{each.variant}-of-a-long-name",
                "raw": large,
                "score": 0.5,
                "score_low": 0.25,
                "score_high": 0.75,
            }
        )
        for each in decision.candidates
    ]
    lines = drawn(decision.model_copy(update={"candidates": tuple(candidates)}), width)
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if "(0.25–0.75)" in line]
    assert len(rows) == 3
    assert all(row.split()[-6:-1] == ["0.8123", "123,457", "98,765", "140.25", "GB"] for row in rows)
