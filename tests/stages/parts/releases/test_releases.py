from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scoring.criteria import Weights
from scoring.profile import Profile
from stages.parts.base.errors import DamagedModel, UnknownName
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import supervising
from stages.parts.model.adapter import CONFIG, WEIGHTS
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Production
from stages.parts.releases.listing import catalogue, summarized_moves
from stages.parts.releases.release import (
    HISTORY,
    METRICS,
    Move,
    Split,
    before,
    candidate,
    current_release,
    find,
    history,
    probes,
    promote,
    remember,
)
from stages.rollout.resume import begin
from stages.select.selection import select
from tests.adapters import acquired
from tests.samples import MODEL, measured_store
from tests.stages.rollout.release_server import probes as recorded_probes

BALANCED = Profile(name="balanced")
QUALITY = Profile(name="own", weights=Weights(quality=1, latency=0, throughput=0, memory=0))
VARIANTS = ["fp16", "awq", "gptq"]


@pytest.fixture(autouse=True)
def in_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_RUN", "run-1")


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return measured_store(tmp_path)


def empty(store: ModelStore, *names: str) -> None:
    for name in names:
        (store.releases / name).mkdir(parents=True)
        (store.releases / name / "model.safetensors").write_text(f"weights of {name}")


def test_every_move_names_the_outcome_by_which_its_release_was_chosen(store: ModelStore) -> None:
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.headline == "awq: decided, better than every other"
    assert [each.decision for each in history(store)] == [decision.headline]
    assert [(each.outcome, each.moves[0].decision) for each in catalogue(store)] == [(decision.headline,) * 2]
    asked = {"split": lambda: Split(stable=None), "check_room": lambda _: None, "who": lambda: "jane"}
    asked["serving_of"] = lambda _: Serving()
    target: Any = SimpleNamespace(name="kserve", **asked)
    assert begin(store, target, decision.release, Rollout(), rollback=False).decision == decision.headline
    (store.releases / decision.release / METRICS).write_text("{}")
    (store.path / "candidate_metrics.json").unlink(missing_ok=True)
    assert begin(store, target, decision.release, Rollout(), rollback=False).decision == ""


def test_the_winner_is_in_production_at_once_if_nothing_is_served(store: ModelStore) -> None:
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert (current_release(store), candidate(store)) == (decision.release, None)
    assert Production.read(store.production_metrics) == decision
    assert [(each.kind, each.release, each.before) for each in history(store)] == [("publish", decision.release, None)]


def test_the_winner_is_the_candidate_and_production_stays_if_a_rollout_follows(store: ModelStore) -> None:
    _, first, _ = select(store, BALANCED, VARIANTS)
    _, second, _ = select(store, QUALITY, VARIANTS, serve=True)
    assert (current_release(store), candidate(store)) == (first.release, second.release)
    assert Production.read(store.production_metrics) == first
    assert select(store, QUALITY, VARIANTS, serve=True)[0], "the same decision stands"
    promote(store, second.release)
    assert (current_release(store), candidate(store)) == (second.release, None)
    assert Production.read(store.production_metrics) == second


def test_the_winner_waits_for_a_rollout_if_a_release_is_being_served(store: ModelStore) -> None:
    _, first, _ = select(store, BALANCED, VARIANTS)
    with supervising(store):
        (store.path / "endpoint.json").write_text(_endpoint(first.release))
        _, second, _ = select(store, QUALITY, VARIANTS)
        assert (current_release(store), candidate(store)) == (first.release, second.release)
    reused, again, _ = select(store, QUALITY, VARIANTS)
    assert (reused, again) == (True, second)
    assert (current_release(store), candidate(store)) == (second.release, None), "nothing is served any more"


def test_the_same_winner_of_newer_measurements_keeps_its_release_with_the_newer_reasons(store: ModelStore) -> None:
    _, first, _ = select(store, BALANCED, VARIANTS)
    throughput = Profile(name="own", weights=Weights(quality=0, latency=0, throughput=1, memory=0))
    _, second, _ = select(store, throughput, VARIANTS, serve=True)
    assert second.release == first.release
    assert (current_release(store), candidate(store)) == (first.release, None)
    assert Production.read(store.production_metrics) == second


def test_a_winner_that_is_already_in_production_stays_there_and_nothing_waits(store: ModelStore) -> None:
    _, first, _ = select(store, BALANCED, VARIANTS)
    select(store, QUALITY, VARIANTS, serve=True)
    reused, again, _ = select(store, BALANCED, VARIANTS, serve=True)
    assert (reused, again.release, candidate(store)) == (True, first.release, None)


def test_a_release_carries_its_recorded_answers(store: ModelStore) -> None:
    document = json.loads(store.evaluation("awq").read_text())
    document["probes"] = recorded_probes()
    Evaluation.model_validate(document).write(store.evaluation("awq"))
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert [each.prompt for each in probes(store, decision.release)] == [each["prompt"] for each in recorded_probes()]


def test_a_release_is_found_by_number_name_or_prefix(store: ModelStore) -> None:
    empty(store, "0001-fp16-aaaaaaaaaaaa", "0012-awq-bbbbbbbbbbbb")
    for text in ("12", "0012", "0012-awq", "0012-awq-bbbbbbbbbbbb"):
        assert find(store, text) == "0012-awq-bbbbbbbbbbbb"
    with pytest.raises(UnknownName, match="unknown release '2'") as unknown:
        find(store, "2")
    assert "known: 0001-fp16-aaaaaaaaaaaa, 0012-awq-bbbbbbbbbbbb" in unknown.value.hint


def test_only_a_truncated_line_of_the_history_is_lost_and_no_move_is_written_twice(store: ModelStore) -> None:
    first, second = _move("a", "0001-fp16-aaaaaaaaaaaa"), _move("b", "0002-awq-bbbbbbbbbbbb")
    remember(store, first)
    with (store.path / HISTORY).open("a") as file:
        file.write(second.model_dump_json()[:40])
    for _ in range(2):
        remember(store, second)
    assert history(store) == [first, second]


def test_without_a_history_the_release_before_is_the_one_with_the_lower_number(store: ModelStore) -> None:
    empty(store, "0001-fp16-aaaaaaaaaaaa", "0002-awq-bbbbbbbbbbbb")
    assert before(store, "0002-awq-bbbbbbbbbbbb") == "0001-fp16-aaaaaaaaaaaa"
    assert before(store, "0001-fp16-aaaaaaaaaaaa") is None


def test_a_release_that_was_served_first_when_it_was_in_production_has_none_before_it(store: ModelStore) -> None:
    empty(store, "0001-fp16-aaaaaaaaaaaa")
    remember(store, _move("a", "0001-fp16-aaaaaaaaaaaa", before="0001-fp16-aaaaaaaaaaaa"))
    assert before(store, "0001-fp16-aaaaaaaaaaaa") is None


def test_the_catalogue_says_what_each_release_is(store: ModelStore) -> None:
    _, first, _ = select(store, BALANCED, VARIANTS)
    select(store, QUALITY, VARIANTS, serve=True)
    empty(store, "0003-gptq-cccccccccccc", "0004-awq-dddddddddddd")
    found = catalogue(
        store, Split(stable=first.release, canary="0004-awq-dddddddddddd", standby="0003-gptq-cccccccccccc")
    )
    assert [(each.number, each.variant, each.state) for each in found] == [
        (4, "awq", "canary"),
        (3, "gptq", "standby"),
        (2, "fp16", "candidate"),
        (1, "awq", "production"),
    ]
    winner = next(each for each in first.candidates if each.variant == "awq")
    assert (found[3].score, found[3].digest, found[3].made_at) == (winner.score, winner.digest, first.decided_at)
    assert found[3].size_bytes > 0
    assert (found[0].score, found[0].digest) == (None, None)
    (published,) = found[3].moves
    assert (published.kind, published.percent, published.analysis) == ("publish", 100, None)
    assert [each.moves for each in found[:3]] == [(), (), ()]


def test_moves_are_listed_newest_first_with_share_duration_and_last_analysis(store: ModelStore) -> None:
    empty(store, "0002-awq-bbbbbbbbbbbb")
    remember(store, _move("a", "0001-fp16-aaaaaaaaaaaa"))
    looks = ({"percent": 10, "verdict": "promote"}, {"percent": 50, "verdict": "rollback"})
    back = {"result": "rolled back", "reason": "slow", "before": "0001-fp16-aaaaaaaaaaaa", "analyses": looks}
    second = _move("b", "0002-awq-bbbbbbbbbbbb")
    remember(store, second.model_copy(update=back | {"ended_at": second.started_at + timedelta(minutes=2)}))
    newest, oldest = summarized_moves(store)
    assert (newest.before, newest.release) == ("0001-fp16-aaaaaaaaaaaa", "0002-awq-bbbbbbbbbbbb")
    assert (newest.percent, newest.seconds, newest.analysis) == (50, 120.0, looks[-1])
    assert (oldest.percent, oldest.seconds, oldest.result) == (100, 0.0, "promoted")
    (only,) = catalogue(store)
    assert (only.state, only.moves) == ("rolled back", (newest,))


def _move(id_: str, release: str, before: str | None = None) -> Move:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    return Move(
        id=id_,
        kind="rollout",
        release=release,
        before=before,
        result="promoted",
        reason="good",
        started_at=now,
        ended_at=now,
    )


def _endpoint(release: str) -> str:
    return json.dumps(
        {
            "pid": os.getpid(),
            "url": "http://127.0.0.1:1",
            "model": MODEL,
            "release": release,
            "log": "",
            "serving": {},
            "protected": False,
            "started_at": "2026-01-02T03:04:05Z",
        }
    )


def measured_with(store: ModelStore, *adapters: Acquired) -> None:
    """As if all variants had been measured with these adapters."""
    for name in VARIANTS:
        evaluation = Evaluation.read(store.evaluation(name))
        assert evaluation
        digests = {adapter.model.removeprefix("org/"): adapter.digest for adapter in adapters}
        workload = evaluation.workload | {"adapters": digests}
        evaluation.model_copy(update={"workload": workload}).write(store.evaluation(name))


def test_a_release_has_the_adapters_that_were_measured_and_others_make_another_release(store: ModelStore) -> None:
    plain = select(store, BALANCED, VARIANTS).decision
    assert plain.adapters == {}
    first = acquired(store, "sql")
    measured_with(store, first)
    decision = select(store, BALANCED, VARIANTS).decision
    assert decision.adapters == {"sql": first.digest}
    assert "The variants were measured, and the winner is served, with the LoRA adapters sql." in decision.notes
    folder = store.releases / decision.release / "adapters" / "sql"
    assert Acquired.read(folder / ACQUIRED) == first
    assert (folder / WEIGHTS).stat().st_ino == (store.adapter("sql") / WEIGHTS).stat().st_ino
    assert select(store, BALANCED, VARIANTS).decision.release == decision.release
    # Another adapter of the same name: the former release keeps its own.
    second = acquired(store, "sql", lora_alpha=99)
    measured_with(store, second)
    other = select(store, BALANCED, VARIANTS).decision
    names = [plain.release, decision.release, other.release]
    assert [name[:9] for name in names] == ["0001-awq-", "0002-awq-", "0003-awq-"]
    assert len({name[9:] for name in names}) == 1, "the weights are the same"
    assert [row.adapters for row in catalogue(store)] == [("sql",), ("sql",), ()]
    assert Acquired.read(folder / ACQUIRED) == first
    assert json.loads((folder / CONFIG).read_bytes())["lora_alpha"] == 16
    promote(store, decision.release)
    assert current_release(store) == decision.release


def test_an_adapter_that_changed_after_it_was_measured_is_not_released(store: ModelStore) -> None:
    measured_with(store, acquired(store, "sql"))
    acquired(store, "sql", lora_alpha=99)
    with pytest.raises(DamagedModel, match="the adapter sql is not what was measured"):
        select(store, BALANCED, VARIANTS)
    assert current_release(store) is None
