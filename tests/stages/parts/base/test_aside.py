"""What other configurations made is found again by its key."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from stages.parts.base.store import SET_ASIDE, ModelStore

KEYS = [f"{digit}" * 64 for digit in range(SET_ASIDE + 3)]


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path, "org/name")


@pytest.fixture
def paths(store: ModelStore) -> list[Path]:
    """Two files that belong together."""
    found = store.evaluation("gptq")
    found.parent.mkdir(parents=True)
    return [found.with_suffix(".samples.jsonl"), found]


def write(paths: list[Path], text: str) -> None:
    for path in paths:
        path.write_text(text)


def texts(paths: list[Path]) -> list[str]:
    return [path.read_text() for path in paths if path.exists()]


def test_what_has_the_key_stays(store: ModelStore, paths: list[Path]) -> None:
    write(paths, "here")
    store.take_up(paths, KEYS[0], KEYS[0])
    assert texts(paths) == ["here"] * 2
    assert not store.aside.exists()


def test_what_was_put_aside_comes_back_whole_and_only_once(store: ModelStore, paths: list[Path]) -> None:
    write(paths, "first")
    store.take_up(paths, KEYS[0], KEYS[1])
    assert texts(paths) == []
    write(paths, "second")
    store.take_up(paths, KEYS[1], KEYS[0])
    assert texts(paths) == ["first"] * 2
    store.take_up(paths, KEYS[0], KEYS[1])
    assert texts(paths) == ["second"] * 2
    assert len(list(store.aside.rglob("gptq.json"))) == 2  # the folder of the name, and the one put aside


def test_what_is_damaged_is_replaced_by_what_was_kept(store: ModelStore, paths: list[Path]) -> None:
    write(paths, "first")
    store.take_up(paths, KEYS[0], KEYS[1])
    write(paths, "damaged")
    store.take_up(paths, None, KEYS[0])
    assert texts(paths) == ["first"] * 2


def test_directories_are_kept_too(store: ModelStore) -> None:
    path = store.optimized("gptq")
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text("weights")
    inode = (path / "model.safetensors").stat().st_ino
    store.take_up([path], KEYS[0], KEYS[1])
    path.mkdir()
    (path / "half").touch()
    store.take_up([path], None, KEYS[0])
    assert [each.name for each in path.iterdir()] == ["model.safetensors"]
    assert (path / "model.safetensors").stat().st_ino == inode


def test_what_a_killed_process_had_begun_to_put_aside_is_removed_by_the_next(
    store: ModelStore, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(paths, "first")
    with monkeypatch.context() as patched:
        patched.setattr("stages.parts.base.store.swap", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.take_up(paths, KEYS[0], KEYS[1])
    (left,) = next(store.aside.rglob("gptq.json")).iterdir()
    assert left.name.startswith(".")
    store.take_up(paths, None, KEYS[1])
    assert not left.exists()


def test_what_is_half_removed_is_never_taken_up(
    store: ModelStore, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for before, after in itertools.pairwise(KEYS[: SET_ASIDE + 1]):
        write(paths, before)
        store.take_up(paths, before, after)
    write(paths, KEYS[SET_ASIDE])
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path, **_: interrupted() if path.exists() else None)
        with pytest.raises(KeyboardInterrupt):
            store.take_up(paths, KEYS[SET_ASIDE], KEYS[SET_ASIDE + 1])
    assert not store.set_aside(paths[-1], KEYS[0]).exists()


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_only_the_last_ones_in_use_are_kept(store: ModelStore, paths: list[Path]) -> None:
    for before, after in itertools.pairwise(KEYS):
        write(paths, before)
        store.take_up(paths, before, after)
    kept = next(store.aside.rglob("gptq.json"))
    assert sorted(each.name[0] for each in kept.iterdir()) == [str(digit) for digit in range(2, SET_ASIDE + 2)]
