from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.parts.base.errors import Busy, ConfigError, InvalidName, NotEnoughSpace, NotWritable, of_disk
from stages.parts.base.files import (
    LEFT_S,
    digest_of,
    end_holder,
    exclusive,
    place,
    place_tree,
    safe_relative,
    sha256_of,
    swap_link,
    write_json,
    write_text,
)
from stages.parts.base.store import ModelStore, directory_name, store_root

ROOT = Path(__file__).parents[4]
TARGETS = ("base", "optimized/fp16")


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store", "org/tiny")


@pytest.fixture
def other_volume(tmp_path: Path) -> Iterator[Path]:
    """A separate small file system (1 MiB)."""
    folder = tmp_path / "volume"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    prelude = (
        "import pathlib, sys, time; from stages.parts.base.files import *; from stages.parts.base.store import *\n"
    )
    prelude += "store = ModelStore(pathlib.Path(sys.argv[1]), 'org/tiny')\n"
    command = [sys.executable, "-c", prelude + program, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


# Names


@pytest.mark.parametrize(("model", "name"), [("gpt2", "gpt2"), ("org/tiny", "org--tiny"), ("a.b/c_d-e", "a.b--c_d-e")])
def test_every_model_name_has_its_directory_name(model: str, name: str) -> None:
    assert directory_name(model) == name


@given(st.lists(st.from_regex(r"[A-Za-z0-9._-]{1,6}", fullmatch=True), min_size=1, max_size=2))
def test_no_two_models_share_a_directory(parts: list[str]) -> None:
    model = "/".join(parts)
    with contextlib.suppress(InvalidName):
        assert directory_name(model).replace("--", "/") == model


@given(st.text(max_size=20))
def test_no_name_leaves_the_store(name: str) -> None:
    with contextlib.suppress(InvalidName):
        directory = directory_name(name)
        assert (Path("/store") / directory).parent == Path("/store")
        assert re.fullmatch(r"[A-Za-z0-9._-]+", directory)
        assert not directory.startswith(".")


@pytest.mark.parametrize(
    "name", ["", "/", "a/", "/a", "a/b/c", "..", "a/..", "a--b", "-a", "a.", "a b", "a\n", "ä", "a\0"]
)
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="is not a model's name"):
        directory_name(name)


@given(st.text(max_size=20) | st.from_regex(r"(\.\.?/|/|a){1,6}", fullmatch=True))
def test_no_file_name_leaves_its_directory(name: str) -> None:
    with contextlib.suppress(InvalidName):
        path = Path("/base") / safe_relative(name)
        assert Path(os.path.normpath(path)).parents[-2] == Path("/base")


@pytest.mark.parametrize("name", ["", ".", "./", "/etc/passwd", "../x", "a/../../x", "a\\b", "a\nb", "a\x1b[2J"])
def test_an_unsafe_file_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="unsafe name"):
        safe_relative(name)


# Files


def test_a_digest_depends_only_on_the_value() -> None:
    assert digest_of({"b": 1, "a": [1.5, "ä"]}) == digest_of({"a": [1.5, "ä"], "b": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})
    assert digest_of({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_the_digest_of_a_file_is_the_one_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(os.urandom(3_000_000))
    said = subprocess.run(["sha256sum", tmp_path / "x"], capture_output=True, text=True, check=True).stdout
    assert sha256_of(tmp_path / "x") == said.split()[0]


def test_writing_replaces_a_file_and_leaves_no_other_file(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "x", "one")
    write_json(tmp_path / "new" / "x", {"ä": 1})
    assert contents(tmp_path) == {"new/x": '{\n  "ä": 1\n}\n'}


def test_what_killed_writers_left_is_removed_by_the_next_one_an_hour_later(tmp_path: Path) -> None:
    old, young = "0" * 32, "1" * 32
    for name in ("x", "link"):
        for left in (tmp_path / f".{name}.{old}", tmp_path / f".{name}.{young}", tmp_path / f".{name}.json.{old}"):
            left.symlink_to("nowhere")
            if left.name.endswith(old):
                os.utime(left, (0, time.time() - LEFT_S - 1), follow_symlinks=False)
    write_text(tmp_path / "x", "one")
    swap_link(tmp_path / "link", Path("x"))
    left_now = {".x." + young, f".x.json.{old}", ".link." + young, f".link.json.{old}"}
    assert {path.name for path in tmp_path.iterdir()} == {"x", "link"} | left_now


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    texts, target = ["a" * 100_000, "b" * 100_000], tmp_path / "x"
    write_text(target, texts[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                write_text(target, text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert {target.read_text() for _ in range(300)} <= set(texts)
    finally:
        stop.set()
        writer.join()


def test_a_volume_that_can_not_be_written_to_is_named(other_volume: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", other_volume], check=True)
    with pytest.raises(NotWritable, match=f"cannot use {other_volume}: Read-only file system"):
        write_text(other_volume / "x.json", "x")


@pytest.mark.parametrize(
    ("number", "path", "told"),
    [
        (errno.ENOSPC, None, "no space left on the volume of /store"),
        (errno.EDQUOT, "/elsewhere/x", "no space left on the volume of /elsewhere/x"),
        (errno.EACCES, "/store/org--name/x", "cannot use /store: Permission denied"),
        (errno.EACCES, "/elsewhere/x", "cannot use /elsewhere/x: Permission denied"),
        (errno.EIO, None, "the volume of /store fails: Input/output error"),
        (errno.EPERM, None, None),
        (errno.ECONNREFUSED, None, None),
    ],
)
def test_a_disk_s_failure_names_where_it_is_and_another_one_stays_what_it_is(
    number: int, path: str | None, told: str | None
) -> None:
    found = of_disk(OSError(number, os.strerror(number), path), Path("/store"))
    assert (str(found) if found else None) == told


def test_on_a_full_disk_the_file_stays_unchanged(other_volume: Path) -> None:
    write_text(other_volume / "x", "old")
    with pytest.raises(NotEnoughSpace, match="no space left") as full:
        write_text(other_volume / "x", "n" * 2_000_000)
    assert "free some space" in full.value.hint
    assert contents(other_volume) == {"x": "old"}


def test_placing_within_a_volume_links(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    assert place(tmp_path / "a", tmp_path / "new" / "b") == "hardlink"
    assert (tmp_path / "new" / "b").stat().st_ino == (tmp_path / "a").stat().st_ino


def test_placing_across_volumes_copies(tmp_path: Path, other_volume: Path) -> None:
    (tmp_path / "a").write_text("content")
    assert place(tmp_path / "a", other_volume / "b") == "copy"
    assert (other_volume / "b").read_text() == "content"
    (tmp_path / "c").write_text("more")
    (other_volume / "c").write_text("more")
    assert place_tree(other_volume, tmp_path / "all", ["b", "c"]) == "copy"
    assert contents(tmp_path / "all") == {"b": "content", "c": "more"}


def test_placing_without_a_link_creates_a_separate_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    assert place(tmp_path / "a", tmp_path / "b", link=False) in ("reflink", "copy")
    (tmp_path / "a").write_text("edited")
    assert (tmp_path / "b").read_text() == "content"


def test_placing_never_replaces_a_file(tmp_path: Path, other_volume: Path) -> None:
    (tmp_path / "a").write_text("new")
    for target in (tmp_path / "b", other_volume / "b"):
        target.write_text("old")
        for link in (True, False):
            with pytest.raises(FileExistsError):
                place(tmp_path / "a", target, link=link)
        assert target.read_text() == "old"


# Locks


def test_one_process_holds_a_lock_and_its_death_releases_it(store: ModelStore) -> None:
    hold = "with exclusive(store.lock('x'), 'x'):\n  print('held', flush=True); time.sleep(100)"
    with start(hold, store.root) as holder:
        assert first_line(holder) == "held"
        with pytest.raises(Busy, match="x is in use"), exclusive(store.lock("x"), "x", wait=False):
            pass
        holder.kill()
    with exclusive(store.lock("x"), "x", wait=False):
        pass


def test_a_process_that_waits_for_a_lock_says_so(store: ModelStore) -> None:
    take = "with exclusive(store.lock('x'), 'the base'):\n  print('mine', flush=True)"
    with exclusive(store.lock("x"), "x"):
        waiter = start(take, store.root)
        assert waiter.stderr is not None
        assert waiter.stderr.readline() == "waiting: the base is in use by another process\n"
    with waiter:
        assert first_line(waiter) == "mine"


# Building


@pytest.mark.parametrize("target", TARGETS)
def test_a_directory_appears_complete(store: ModelStore, target: str) -> None:
    with store.building(store.path / target) as work:
        (work / "deep").mkdir()
        (work / "deep" / "x").write_text("1")
        assert not (store.path / target).exists()
    assert contents(store.path / target) == {"deep/x": "1"}
    assert list((store.path / ".building").glob("*/*")) == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_failed_build_leaves_the_old_directory_and_nothing_else(store: ModelStore, target: str) -> None:
    def build(text: str, *, fail: bool) -> None:
        with store.building(store.path / target) as work:
            assert list(work.iterdir()) == []
            (work / "x").write_text(text)
            if fail:
                raise KeyboardInterrupt

    build("old", fail=False)
    with pytest.raises(KeyboardInterrupt):
        build("new", fail=True)
    assert contents(store.path / target) == {"x": "old"}
    build("newer", fail=False)
    assert contents(store.path / target) == {"x": "newer"}


def test_a_resumed_build_finds_its_files_and_another_key_does_not(store: ModelStore) -> None:
    def build(key: str, *, fail: bool) -> set[str]:
        with store.building(store.base, resume=key) as work:
            found = {path.name for path in work.iterdir()}
            (work / f"of-{key}").write_text("")
            if fail:
                raise RuntimeError
        return found

    with pytest.raises(RuntimeError):
        build("one", fail=True)
    assert not store.base.exists()
    assert build("one", fail=False) == {"of-one"}
    with pytest.raises(RuntimeError):
        build("two", fail=True)
    assert build("three", fail=False) == set()
    assert contents(store.base) == {"of-three": ""}


@pytest.mark.parametrize("resume", ["", "key"])
def test_a_killed_build_leaves_the_old_directory(store: ModelStore, resume: str) -> None:
    with store.building(store.base) as work:
        (work / "x").write_text("old")
    build = (
        "with store.building(store.base, resume=sys.argv[2]) as work:\n"
        "  (work / 'y').write_text('new'); print('built', flush=True); time.sleep(100)"
    )
    with start(build, store.root, resume) as builder:
        assert first_line(builder) == "built"
        builder.send_signal(signal.SIGKILL)
    assert contents(store.base) == {"x": "old"}
    with store.building(store.base, resume=resume) as work:
        assert contents(work) == ({"y": "new"} if resume else {})


def test_what_was_left_of_building_is_cleared_but_for_what_can_be_resumed_or_is_in_work(store: ModelStore) -> None:
    work = store.path / ".building" / "base"
    for name in ("new", "commit-1", "commit-1.replaced-12345678"):
        (work / name).mkdir(parents=True)
    with exclusive(store.lock("base"), "base"):
        store.clear(store.base)
        assert len([*work.iterdir()]) == 3
    store.clear(store.base)
    assert [path.name for path in work.iterdir()] == ["commit-1"]
    store.clear(store.base, "commit-1")
    assert [*work.iterdir()] == []


def test_builders_of_one_target_take_turns(store: ModelStore) -> None:
    build = (
        "with store.building(store.base) as work:\n"
        "  (work / 'a').write_text(sys.argv[2]); time.sleep(0.1); (work / 'b').write_text(sys.argv[2])"
    )
    builders = [start(build, store.root, number) for number in range(3)]
    assert [builder.wait(120) for builder in builders] == [0, 0, 0]
    for builder in builders:
        builder.communicate()
    found = contents(store.base)
    assert found["a"] == found["b"]
    assert list((store.path / ".building").glob("*/*")) == []


def test_a_reader_never_finds_a_mixture_of_old_and_new(store: ModelStore) -> None:
    stop = threading.Event()

    def build(text: str) -> None:
        with store.building(store.base) as work:
            for name in "abcdef":
                (work / name).write_text(text)

    def rebuild() -> None:
        for number in itertools.count(1):
            if stop.is_set():
                return
            build(str(number))

    build("0")
    writer = threading.Thread(target=rebuild)
    writer.start()
    seen: list[Any] = []
    try:
        while len(seen) < 30:
            with contextlib.suppress(FileNotFoundError), opened(store.base) as directory:
                seen.append({read_in(directory, name) for name in "abcdef"})
    finally:
        stop.set()
        writer.join()
    assert {len(texts) for texts in seen} == {1}


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_in(directory: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY, dir_fd=directory)) as file:  # noqa: PTH123 — relative to a descriptor
        return file.read()


def test_a_volume_that_fills_up_while_building_leaves_the_old_directory(other_volume: Path) -> None:
    store = ModelStore(other_volume, "org/tiny")
    with store.building(store.base) as work:
        (work / "x").write_text("old")

    def build() -> None:
        with store.building(store.base) as work:
            (work / "x").write_bytes(bytes(2 << 20))

    with pytest.raises(NotEnoughSpace, match=f"no space left on the volume of {store.path}"):
        build()
    assert contents(store.base) == {"x": "old"}


def test_every_model_has_its_own_paths(tmp_path: Path) -> None:
    store = ModelStore(tmp_path, "org/tiny")
    folder = tmp_path / "org--tiny"
    assert store.base == folder / "base"
    assert store.optimized("awq") == folder / "optimized" / "awq"
    assert store.evaluation("awq") == folder / "evaluations" / "awq.json"
    assert store.run("r1") == folder / "runs" / "r1"
    assert (store.releases, store.production) == (folder / "releases", folder / "production")


def test_the_environment_names_the_folder_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_STORE", "/somewhere")
    assert store_root() == Path("/somewhere")
    monkeypatch.delenv("SLIPWAY_STORE")
    with pytest.raises(ConfigError, match="SLIPWAY_STORE is not set"):
        store_root()


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_the_holder_of_a_lock_is_ended_unless_it_is_on_another_host(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with (
        subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE) as holds,
        subprocess.Popen(["sleep", "60"]) as other,
    ):
        assert holds.stdout.readline() == b"held\n"
        lock.write_text(str(other.pid))  # the id that the holder has on its own host
        with pytest.raises(ConfigError, match="run 1 runs on another host"):
            end_holder(lock, other.pid, "run 1")
        assert other.poll() is None
        lock.write_text(str(holds.pid))
        end_holder(lock, holds.pid, "run 1")
        assert holds.wait(10) == -signal.SIGTERM
        end_holder(lock, holds.pid, "what has ended meanwhile")
        other.kill()
