"""Backups: consistent while the store changes, continued after a kill, verified, and never over what is there."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from pipeline.upkeep import backup
from pipeline.upkeep.backup import MANIFEST, RETURNING, STORE, UNFINISHED, back_up, restore
from pipeline.upkeep.checking import Digests, check
from stages.parts.base.errors import Busy, ConfigError, DamagedModel, NotEnoughSpace
from stages.parts.base.files import exclusive, swap_link
from stages.parts.base.store import ModelStore
from stages.parts.endpoint import clients, database
from stages.parts.releases.release import current_release
from stages.select.verify import verify
from tests.samples import MODEL


def tree(folder: Path) -> dict[str, Any]:
    """Every file's content, every link's target, and which names are one file."""
    inodes: dict[int, str] = {}
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            files[name] = path.readlink()
        elif path.is_file() and ".locks" not in path.parts:
            files[name] = (path.read_bytes(), inodes.setdefault(path.stat().st_ino, name), path.stat().st_mtime_ns)
    return files


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "backup"


@pytest.fixture
def other(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "other", MODEL)


def test_after_the_loss_of_the_store_all_is_there_again(store: ModelStore, kept: Path) -> None:
    (store.root / clients.FILE).write_text("[]")
    with sqlite3.connect(store.root / database.FILE) as usage:
        usage.execute("CREATE TABLE used (tokens INTEGER)")
        usage.execute("INSERT INTO used VALUES (7)")
    usage.close()
    before = tree(store.path)
    back_up(store.root, kept)
    shutil.rmtree(store.root)
    restored = restore(store.root, kept)
    assert restored.models == (MODEL,)
    assert tree(store.path) == before
    assert (store.production / "model.safetensors").stat().st_nlink == 2
    assert check(store, Digests()).damaged == ()
    assert verify(store.run("run-1")).findings == []
    assert (store.root / clients.FILE).read_text() == "[]"
    with sqlite3.connect(store.root / database.FILE) as usage:
        assert usage.execute("SELECT tokens FROM used").fetchall() == [(7,)]
    usage.close()
    assert not (store.root / RETURNING).exists()


def test_a_backup_is_a_store_as_any_other(store: ModelStore, kept: Path) -> None:
    back_up(store.root, kept, MODEL)
    copied = ModelStore(kept / STORE, MODEL)
    assert current_release(copied) == current_release(store)
    assert check(copied, Digests()).damaged == ()


def test_what_goes_on_and_what_belongs_to_this_machine_stays_out(store: ModelStore, kept: Path) -> None:
    for name in ("runs/going-on/.lock", "endpoint.json", "serving/envoy.yaml", ".building/base/x"):
        (store.path / name).parent.mkdir(parents=True, exist_ok=True)
        (store.path / name).write_text("")
    with exclusive(store.run("going-on") / ".lock", "a run"):
        back_up(store.root, kept)
    copied = ModelStore(kept / STORE, MODEL).path
    assert {path.name for path in copied.iterdir()} == {
        *("base", "optimized", "evaluations", "releases", "runs", "production", "production_metrics.json"),
        *("rollouts.jsonl", "candidate_metrics.json"),
    }
    assert [path.name for path in (copied / "runs").iterdir()] == ["run-1"]


def test_what_changes_while_it_is_copied_is_copied_as_it_is_afterwards(
    store: ModelStore, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the copy a rollout moves production, and the release that was in production is removed."""
    first = str(current_release(store))
    second = f"0002-{first.partition('-')[2]}"
    take, copies = backup._take, []

    def change_meanwhile(source: Path, target: Path, *more: Any) -> None:
        copies.append(source)
        if len(copies) == 5:
            shutil.copytree(store.releases / first, store.releases / second)
            swap_link(store.production, Path("releases") / second)
            shutil.rmtree(store.releases / first)
        take(source, target, *more)

    monkeypatch.setattr(backup, "_take", change_meanwhile)
    back_up(store.root, kept)
    copied = ModelStore(kept / STORE, MODEL)
    assert current_release(copied) == second
    assert [path.name for path in copied.releases.iterdir()] == [second]


def test_a_store_that_never_rests_is_not_copied_for_ever(
    store: ModelStore, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = backup._take

    def change_always(*everything: Any) -> None:
        with (store.path / "rollouts.jsonl").open("a") as history:
            history.write("\n")
        take(*everything)

    monkeypatch.setattr(backup, "_take", change_always)
    monkeypatch.setattr(backup, "PASSES", 3)
    with pytest.raises(Busy, match="changes faster"):
        back_up(store.root, kept)
    assert not (kept / STORE).exists()


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_backup_that_was_killed_is_none_and_the_next_try_continues(
    store: ModelStore, kept: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Path] = []
    copy = shutil.copy

    def killed(source: Path, target: Path) -> Any:
        copies.append(source)
        if len(copies) == after + 1:
            target.write_bytes(source.read_bytes()[:3])
            raise KeyboardInterrupt
        return copy(source, target)

    monkeypatch.setattr(shutil, "copy", killed)
    with pytest.raises(KeyboardInterrupt):
        back_up(store.root, kept)
    assert not (kept / STORE).exists()
    with pytest.raises(ConfigError, match="holds no whole backup"):
        restore(store.root, kept)
    back_up(store.root, kept)
    assert len(copies) == len(set(copies)) + 1, "only what was being copied is copied again"
    assert not (kept / UNFINISHED).exists()
    copied = tree(kept / STORE / store.path.name)
    assert copied == tree(store.path)


@pytest.mark.parametrize("moment", ["while copying", "before the move", "after the move"])
def test_a_return_that_was_killed_is_continued(
    store: ModelStore, kept: Path, other: ModelStore, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(store.root, kept)
    name = {"while copying": "shutil.copystat", "before the move": "os.rename", "after the move": "fsync"}[moment]

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"pipeline.upkeep.backup.{name}", killed)
        with pytest.raises(KeyboardInterrupt):
            restore(other.root, kept)
    assert other.path.exists() == (moment == "after the move")
    restore(other.root, kept)
    assert tree(other.path) == tree(store.path)
    assert not (other.root / RETURNING).exists()


def test_nothing_is_overwritten(store: ModelStore, kept: Path, other: ModelStore) -> None:
    back_up(store.root, kept)
    with pytest.raises(ConfigError, match="holds a backup already"):
        back_up(store.root, kept)
    before = tree(store.root)
    with pytest.raises(ConfigError, match=f"has {MODEL} already"):
        restore(store.root, kept)
    assert {name: each for name, each in tree(store.root).items() if name != backup.LOCK} == before
    with pytest.raises(ConfigError, match="is in the store"):
        back_up(store.root, store.root / "backup")
    with pytest.raises(ConfigError, match="no whole backup of org/other"):
        restore(other.root, kept, "org/other")


def test_a_damaged_store_is_not_taken_for_a_backup(store: ModelStore, kept: Path) -> None:
    (store.optimized("gptq") / "config.json").write_text("[]")
    with pytest.raises(DamagedModel, match="optimized/gptq/config"):
        back_up(store.root, kept)
    assert not (kept / STORE).exists()


@pytest.mark.parametrize("change", ["altered", "missing", "more"])
def test_a_backup_that_changed_since_is_refused_and_leaves_nothing(
    store: ModelStore, kept: Path, other: ModelStore, change: str
) -> None:
    back_up(store.root, kept)
    file = kept / STORE / store.path.name / "runs" / "run-1" / "report.json"
    if change == "altered":
        file.write_bytes(file.read_bytes().replace(b"e", b"f", 1))
    elif change == "missing":
        file.unlink()
    else:
        file.with_name("more.json").write_text("{}")
    with pytest.raises(DamagedModel, match="is not what was backed up"):
        restore(other.root, kept)
    assert {path.name for path in other.root.iterdir()} == {backup.LOCK}


def test_without_hard_links_there_and_on_a_full_disk(
    store: ModelStore, kept: Path, other: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "not permitted")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "link", no_links)
    back_up(store.root, kept)
    assert check(ModelStore(kept / STORE, MODEL), Digests()).damaged == ()
    monkeypatch.setattr(shutil, "copy", full)
    with pytest.raises(NotEnoughSpace):
        restore(other.root, kept)
    assert not other.path.exists()
    assert (kept / STORE / MANIFEST).exists()
