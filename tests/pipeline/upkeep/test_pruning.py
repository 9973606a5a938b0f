"""What ``slipway store prune`` removes, and what it never does."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.local.folder import LOCK
from pipeline.upkeep.pruning import prune
from stages.parts.base.errors import Busy, ConfigError
from stages.parts.base.files import exclusive, swap_link, write_json
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import WANTED, Wanted
from stages.parts.records.rollout import LOCK as ROLLOUT_LOCK
from stages.parts.releases.release import METRICS, Move, Split, remember
from tests.samples import measured_store

NOTHING = Split(stable=None)
LONG_AGO, AGE_S = datetime.now(UTC) - timedelta(days=30), 40 * 24 * 3600


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return measured_store(tmp_path)


def empty(store: ModelStore, *names: str, age_s: float = 0) -> None:
    for name in names:
        (store.releases / name).mkdir(parents=True)
        (store.releases / name / "model.safetensors").write_text(f"weights of {name}")
        aged(store.releases / name, age_s)


def aged(folder: Path, age_s: float = AGE_S) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - age_s,) * 2)


def move(release: str, before: str) -> Move:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    moved = {"kind": "rollout", "release": release, "before": before, "result": "promoted", "reason": "good"}
    return Move.model_validate({"id": "x", **moved, "started_at": now, "ended_at": now})


def test_prune_keeps_what_is_needed_and_says_what_it_freed(store: ModelStore) -> None:
    names = [f"{number:04d}-awq-{number:012x}" for number in range(1, 10)]
    empty(store, *names)
    shared = store.releases / names[2] / "model.safetensors"
    (store.path / "elsewhere").hardlink_to(shared)
    swap_link(store.production, Path("releases") / names[4])
    remember(store, move(names[4], before=names[1]))
    swap_link(store.path / "candidate", Path("releases") / names[5])
    split = Split(stable=names[4], canary=names[6], standby=names[0])
    pruned = prune(store, 1, split)
    assert pruned.removed == (names[7], names[3], names[2])
    assert sorted(path.name for path in store.releases.iterdir()) == sorted(pruned.kept)
    assert set(pruned.kept) == {names[8], names[6], names[5], names[4], names[1], names[0]}
    each = len(f"weights of {names[0]}")
    assert (pruned.removed_bytes, pruned.freed_bytes) == (3 * each, 2 * each)
    assert (store.path / "elsewhere").read_text() == f"weights of {names[2]}"
    assert prune(store, 1, split).removed == ()


def test_prune_removes_what_other_settings_made_only_if_asked(store: ModelStore) -> None:
    empty(store, "0001-awq-aaaaaaaaaaaa")
    path = store.optimized("other")
    path.mkdir()
    (path / "model.safetensors").write_text("weights")
    store.take_up([path], "a" * 64, "b" * 64)
    assert not path.exists()
    assert prune(store, 1, Split(stable=None)).others is False
    assert [*store.aside.glob("*/*")]
    pruned = prune(store, 1, Split(stable=None), others=True)
    assert (pruned.removed, pruned.others, pruned.freed_bytes) == ((), True, len("weights"))
    assert not [*store.aside.glob("*/*")]


def test_prune_counts_bytes_that_two_removed_releases_share_once(store: ModelStore) -> None:
    empty(store, "0001-awq-aaaaaaaaaaaa", "0003-awq-cccccccccccc")
    twin = store.releases / "0002-awq-bbbbbbbbbbbb"
    twin.mkdir()
    (twin / "model.safetensors").hardlink_to(store.releases / "0001-awq-aaaaaaaaaaaa" / "model.safetensors")
    pruned = prune(store, 1, Split(stable=None))
    size = len("weights of 0001-awq-aaaaaaaaaaaa")
    assert (pruned.removed_bytes, pruned.freed_bytes) == (2 * size, size)


def test_prune_never_removes_the_newest_so_that_numbers_are_not_used_again(store: ModelStore) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        prune(store, 0, Split(stable=None))


def test_a_dry_run_lists_the_same_and_removes_nothing(store: ModelStore) -> None:
    empty(store, "0001-awq-aaaaaaaaaaaa", "0002-awq-bbbbbbbbbbbb")
    listed = prune(store, 1, NOTHING, dry_run=True)
    assert listed.removed == ("0001-awq-aaaaaaaaaaaa",)
    assert len([*store.releases.iterdir()]) == 2
    assert prune(store, 1, NOTHING) == listed
    assert [path.name for path in store.releases.iterdir()] == ["0002-awq-bbbbbbbbbbbb"]


def test_what_a_stopped_endpoint_serves_when_it_is_started_again_stays(store: ModelStore) -> None:
    names = [f"{number:04d}-awq-{number:012x}" for number in range(1, 7)]
    empty(store, *names)
    Wanted(stable=names[0], canary=names[1], standby=names[2], replaced=names[3]).write(store.path / WANTED)
    assert prune(store, 1, NOTHING).removed == (names[4],)


def test_of_a_model_in_a_rollout_nothing_is_removed(store: ModelStore) -> None:
    empty(store, "0001-awq-aaaaaaaaaaaa", "0002-awq-bbbbbbbbbbbb")
    with exclusive(store.lock(ROLLOUT_LOCK), "a rollout"), pytest.raises(Busy):
        prune(store, 1, NOTHING)
    assert len([*store.releases.iterdir()]) == 2


def test_with_an_age_younger_releases_stay(store: ModelStore) -> None:
    empty(store, "0001-awq-aaaaaaaaaaaa", age_s=AGE_S)
    empty(store, "0002-awq-bbbbbbbbbbbb", "0003-awq-cccccccccccc")
    assert prune(store, 1, NOTHING, older=LONG_AGO).removed == ("0001-awq-aaaaaaaaaaaa",)


def test_only_old_runs_that_ended_and_decided_for_no_kept_release_are_removed(store: ModelStore) -> None:
    empty(store, "0001-awq-aaaaaaaaaaaa")
    for name in ("old", "deciding", "young", "running", "killed", "on a cluster"):
        write_json(store.run(name) / "decision.json", {})
    for name in ("old", "deciding", "young", "running"):
        write_json(store.run(name) / "report.json", {})
    for name in ("running", "killed"):
        (store.run(name) / LOCK).write_text("1")
    write_json(store.releases / "0001-awq-aaaaaaaaaaaa" / METRICS, {"run": "deciding"})
    for run in store.runs.iterdir():
        aged(run, 0 if run.name == "young" else AGE_S)
    assert prune(store, 1, NOTHING).runs == ()
    with exclusive(store.run("running") / LOCK, "the run"):
        assert prune(store, 1, NOTHING, older=LONG_AGO).runs == ("killed", "old")
    assert {path.name for path in store.runs.iterdir()} == {"deciding", "young", "running", "on a cluster", "run-1"}


def test_what_another_process_works_on_stays(store: ModelStore) -> None:
    path = store.optimized("other")
    path.mkdir()
    (path / "model.safetensors").write_text("weights")
    store.take_up([path], "a" * 64, "b" * 64)
    (store.path / ".building" / "base" / "commit").mkdir(parents=True)
    aged(store.path / ".building" / "base")
    with exclusive(store.lock("optimize-other"), "optimize"), exclusive(store.lock("base"), "acquire"):
        pruned = prune(store, 1, NOTHING, others=True, older=datetime.now(UTC))
        assert (pruned.others, pruned.unfinished) == (False, ())
    pruned = prune(store, 1, NOTHING, others=True, older=datetime.now(UTC))
    assert (pruned.others, pruned.unfinished) == (True, ("base",))


def test_the_remains_of_a_killed_removal_are_removed(store: ModelStore) -> None:
    (store.path / ".building" / "pruned-1" / "x").mkdir(parents=True)
    (store.path / ".building" / "base" / "commit").mkdir(parents=True)
    assert prune(store, 1, NOTHING).unfinished == ("pruned-1",)
    assert [path.name for path in (store.path / ".building").iterdir()] == ["base"]
