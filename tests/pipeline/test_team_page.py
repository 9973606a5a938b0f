"""``slipway models``: what a team sees of its models, in the terminal and in a browser."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.local.folder import STATE
from pipeline.local.runs import LocalRun
from pipeline.runs.models import ModelRow, page_of, row_of
from pipeline.runs.state import Node, RunState
from scoring.profile import Profile
from stages.parts.base.errors import ClusterUnavailable
from stages.parts.base.files import write_json, write_text
from stages.parts.base.store import ModelStore
from stages.parts.records.production import Price, Production
from stages.parts.releases.release import publish
from stages.report.page import HTML, collect, render
from stages.select.selection import select
from tests.browser import CHROMIUM, Browser
from tests.samples import MODEL, measured_store, outcome
from tests.stages.rollout.disk_target import DiskTarget

RUN = "20261126-184512-9c1e"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    return measured_store(tmp_path / "store", RUN)


@pytest.fixture
def decision(store: ModelStore) -> Production:
    _, decision, _ = select(store, Profile(name="balanced"), ["fp16", "awq", "gptq"], price=Price(per_hour=2.5))
    publish(store, decision, "production")
    return decision


@pytest.fixture
def ran(store: ModelStore, decision: Production) -> LocalRun:
    """The run that chose, with its report."""
    outcome(store, RUN, "select", "", "done", key=decision.key, why=decision.reason)
    arguments = {"model": store.model, "model-directory": store.path.name}
    state = RunState(name=RUN, workflow="slipway", phase="Succeeded", arguments=arguments, nodes=[])
    state.started_at = datetime(2026, 11, 26, 18, 45, 12, tzinfo=UTC)
    write_json(store.run(RUN) / STATE, state)
    write_text(store.run(RUN) / HTML, render(collect(store, RUN, "Succeeded")))
    return LocalRun(store.run(RUN), state)


def test_a_release_in_production_is_shown_with_its_outcome_servers_and_price(
    store: ModelStore, decision: Production, ran: LocalRun, tmp_path: Path
) -> None:
    target = DiskTarget(tmp_path / "platform", store.releases)
    assert row_of(store, lambda: target).health == "not served"
    (store.releases / decision.release / "behaviour.json").write_text("{}")
    target.deploy(decision.release)
    target.promote(decision.release)
    try:
        row = row_of(store, lambda: target).after(ran, "team-chat")
        assert (row.release, row.outcome, row.owner) == (decision.release, decision.ended, "team-chat")
        assert (row.health, row.servers, row.up) == ("up", 1, 1)
        assert (row.price_per_hour, row.currency) == (2.5, "USD")
        assert (row.run, row.phase, row.page) == (RUN, "Succeeded", str(ran.page))
        assert row.since is not None
    finally:
        target.stop_all()
    assert row_of(store, lambda: target).health == "degraded"


def test_a_platform_that_does_not_answer_does_not_hide_what_the_store_knows(
    store: ModelStore, decision: Production
) -> None:
    def connect() -> DiskTarget:
        raise ClusterUnavailable("the Kubernetes API does not answer")

    row = row_of(store, connect)
    assert (row.release, row.health) == (decision.release, "the Kubernetes API does not answer")


def test_what_waits_for_a_person_comes_with_the_command(ran: LocalRun) -> None:
    waiting = ran.state.model_copy(update={"phase": "Running"})
    waiting.nodes.append(Node(name="approve", template="approve", kind="Suspend", phase="Running"))
    row = ModelRow(model=MODEL).after(LocalRun(ran.path, waiting), "team-chat")
    assert row.waits_for == f"approval: slipway resume {RUN}"


def test_what_is_not_known_is_a_dash() -> None:
    row = ModelRow(model="org/chat", owner="team-chat", servers=3, up=2, health="degraded")
    assert row.columns == ("org/chat", "team-chat", "–", "–", "–", "degraded", "2 of 3", *("–",) * 5)


def test_what_models_are_called_is_text_in_the_page(tmp_path: Path) -> None:
    html = page_of([ModelRow(model="org/chat", owner="<b>", page="https://argo.example/?a=1&b")], tmp_path / "m.html")
    assert "&lt;b&gt;" in html
    assert '<a href="https://argo.example/?a=1&amp;b">org/chat</a>' in html


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_leads_to_each_models_report_in_a_browser(store: ModelStore, ran: LocalRun, tmp_path: Path) -> None:
    page = store.root / "models.html"
    rows = [ModelRow(model=MODEL, release="0001-awq").after(ran, "team-chat"), ModelRow(model="org/new", owner="me")]
    write_text(page, page_of(rows, page))
    with Browser(tmp_path / "profile") as browser:
        browser.open(page.as_uri())
        assert browser.value("document.title") == "2 models"
        cells = browser.value(
            "[...document.querySelectorAll('#models tbody tr')].map(row => row.innerText.split('\\t'))"
        )
        assert [row[:3] for row in cells] == [[MODEL, "team-chat", "0001-awq"], ["org/new", "me", "–"]]
        assert browser.value("document.querySelectorAll('#models a').length") == 1
        browser.value("document.querySelector('#models a').click()")
        browser.wait_for(ran.page.as_uri())
        assert RUN in browser.value("document.title")
        browser.value("history.back()")
        browser.wait_for(page.as_uri())
