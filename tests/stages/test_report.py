from __future__ import annotations

import html
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scoring.metrics import shown, si
from scoring.profile import Profile
from stages.report import RunReport, collect, render
from stages.select import select
from stages.store import ModelStore
from tests.samples import MODEL, measured_store, outcome

RUN = "run-1"
VARIANTS = ["fp16", "awq", "gptq"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    return measured_store(tmp_path)


def decided(store: ModelStore) -> RunReport:
    _, decision, _ = select(store, Profile(name="balanced"), VARIANTS)
    outcome(store, RUN, "select", "", "done", key=decision.key, why=decision.reason)
    return collect(store, RUN, "Succeeded")


def test_the_first_screen_says_what_to_ship_and_why(store):
    report = decided(store)
    page = render(report)
    assert report.decision is not None
    assert "<h1>Ship awq</h1>" in page
    assert html.escape(report.decision.reason) in page


def test_the_figures_shown_are_those_that_were_measured(store):
    report = decided(store)
    page = render(report)
    assert report.decision is not None
    for each in report.decision.candidates:
        assert f"{each.score:.3f}" in page
        for metric, value in each.raw.items():
            assert shown(metric, value) in page


def test_the_page_needs_nothing_from_outside(store):
    page = render(decided(store))
    for outside in ("<script", "<link", "src=", "@import", "http://", "https://"):
        assert outside not in page.replace("http://hub.example", "")


def test_a_failed_run_is_reported_with_what_failed(store):
    outcome(store, RUN, "optimize", "fp16", "failed", why="model.safetensors is <damaged>")
    page = render(collect(store, RUN, "Failed"))
    assert "<h1>No variant was chosen</h1>" in page
    assert "model.safetensors is &lt;damaged&gt;" in page


def test_a_decision_of_another_run_is_not_shown_as_this_runs(store):
    decided(store)
    outcome(store, RUN, "select", "", "done", key="the key of a decision that production has moved on from")
    assert collect(store, RUN, "Succeeded").decision is None


def test_damaged_documents_are_left_out_rather_than_fatal(store):
    decided(store)
    store.evaluation("gptq").write_text("{")
    report = collect(store, RUN, "Succeeded")
    assert [each.variant for each in report.evaluations] != VARIANTS
    assert len(report.evaluations) == 2
    assert "<h1>Ship awq</h1>" in render(report)


def test_a_run_that_did_nothing_yet_has_a_report(tmp_path):
    report = collect(ModelStore(tmp_path, MODEL), RUN, "Failed")
    assert report.decision is None
    assert "No variant was chosen" in render(report)


def test_the_program_writes_both_documents(store):
    decided(store)
    ended = subprocess.run(
        [sys.executable, "-m", "stages.report", "--model", MODEL, "--status", "Succeeded"],
        env=os.environ | {"SLIPWAY_STORE": str(store.root), "SLIPWAY_RUN": RUN},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == str(store.run(RUN) / "report.html")
    written = RunReport.read(store.run(RUN) / "report.json")
    assert written is not None
    assert written.decision is not None
    assert written.decision.winner == "awq"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 "), (999, "999 "), (1234, "1.23 k"), (5.8e6, "5.80 M"), (1.5e10, "15.00 G")]
)
def test_numbers_carry_a_prefix(value, text):
    assert si(value) == text
