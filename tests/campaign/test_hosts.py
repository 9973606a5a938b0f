"""A folder that two hosts have mounted: what each of them sees late, and what at once."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.store import Record
from tests.campaign import hosts

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "nothing")
LATE_S = 0.6
TAKE = "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); print('taken')"


class Stamp(Record):
    number: int


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    with hosts.mounted_twice(tmp_path_factory.mktemp("hosts") / "volume", LATE_S) as mounted:
        yield mounted


def seen_after(see: Callable[[], bool]) -> float:
    """How long it takes until something is seen, which is not seen at once."""
    assert not see()
    started = time.monotonic()
    while not see():
        assert time.monotonic() < started + 10 * LATE_S
        time.sleep(0.01)
    return time.monotonic() - started


def test_what_was_not_there_is_not_there_for_a_while(mounts: tuple[Path, Path]) -> None:
    a, b = mounts
    assert not (b / "made").exists()
    (a / "made").write_text("")
    assert 0.5 * LATE_S < seen_after((b / "made").exists) < 2 * LATE_S


def test_a_file_that_was_replaced_is_the_old_one_for_a_while_if_that_is_still_somewhere(
    mounts: tuple[Path, Path],
) -> None:
    a, b = mounts
    (a / "replaced").write_text("old")
    os.link(a / "replaced", a / "kept")
    assert (b / "replaced").read_text() == "old"
    (a / "new").write_text("newer")
    (a / "new").rename(a / "replaced")
    assert (b / "replaced").stat().st_size == 3
    assert 0.5 * LATE_S < seen_after(lambda: (b / "replaced").read_text() == "newer") < 2 * LATE_S


def test_a_link_leads_for_a_while_where_it_led(mounts: tuple[Path, Path]) -> None:
    a, b = mounts
    (a / "link").symlink_to("old")
    assert (b / "link").is_symlink()
    assert (b / "link").readlink() == Path("old")
    (a / "other").symlink_to("new")
    (a / "other").rename(a / "link")
    assert (b / "link").is_symlink()
    assert 0.5 * LATE_S < seen_after(lambda: (b / "link").readlink() == Path("new")) < 2 * LATE_S


def test_an_open_asks_for_the_file_itself_and_for_another_one_once_it_is_gone(mounts: tuple[Path, Path]) -> None:
    a, b = mounts
    (a / "grown").write_text("ten bytes.")
    assert (b / "grown").stat().st_size == 10
    with (a / "grown").open("a") as file:
        file.write("and more")
    assert (b / "grown").stat().st_size == 10
    assert (b / "grown").read_text() == "ten bytes.and more"
    (a / "new").write_text("another")
    (a / "new").rename(a / "grown")
    assert (b / "grown").stat().st_size == 18
    assert (b / "grown").read_text() == "another"


def test_what_is_read_of_a_file_that_another_host_removed_is_stale(mounts: tuple[Path, Path]) -> None:
    a, b = mounts
    (a / "removed").write_text("text")
    (b / "own").write_text("text")
    with (b / "removed").open() as removed, (b / "own").open() as own:
        (a / "removed").unlink()
        (b / "own").unlink()
        assert own.read() == "text"
        with pytest.raises(OSError, match="Stale file handle"):
            removed.read()


def test_the_names_in_a_directory_are_asked_for_when_it_is_opened(mounts: tuple[Path, Path]) -> None:
    a, b = mounts
    (a / "folder").mkdir()
    assert not (b / "folder" / "made").exists()
    (a / "folder" / "made").write_text("")
    assert not (b / "folder" / "made").exists()
    assert [path.name for path in (b / "folder").iterdir()] == ["made"]
    assert (b / "folder" / "made").exists()


def test_a_lock_of_one_host_keeps_the_other_out(mounts: tuple[Path, Path]) -> None:
    a, b = mounts
    with (a / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with (b / "lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        waiting = subprocess.Popen([sys.executable, "-c", TAKE, b / "lock"], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.communicate(timeout=0.3)
    assert waiting.communicate(timeout=10) == ("taken\n", None)
    with (b / "lock").open() as file, pytest.raises(OSError, match="Bad file descriptor"):
        fcntl.flock(file, fcntl.LOCK_EX)


def test_a_program_that_waits_for_the_lock_of_another_host_can_be_killed(mounts: tuple[Path, Path]) -> None:
    a, b = mounts
    with (a / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = subprocess.Popen([sys.executable, "-c", TAKE, b / "lock"])
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.3)
        waiting.kill()
        assert waiting.wait(10) == -9


def test_a_record_that_is_replaced_between_its_open_and_its_reading_is_read_anew(
    mounts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = mounts
    Stamp(number=1).write(a / "record")
    usual, replaced = io.open, list[Path]()

    def opening(path: Path, *arguments: Any, **options: Any) -> Any:
        file = usual(path, *arguments, **options)
        if path == b / "record" and not replaced:
            replaced.append(path)
            Stamp(number=2).write(a / "record")
        return file

    monkeypatch.setattr(io, "open", opening)
    assert Stamp.read(b / "record") == Stamp(number=2)
    assert replaced
