"""A fixed part of what ``make fuzz`` does for long: altered input ends in a result or in one of our errors."""

from __future__ import annotations

import subprocess
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.feeding import Forbidden, bounded_memory, feed, watched
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_what_can_not_be_read_is_refused_and_nothing_else_is_touched(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    target.prepare(tmp_path)
    with bounded_memory():
        for seed in range(target.inputs):
            feed(target, target.make(Random(seed)), tmp_path)


@pytest.mark.parametrize(
    ("name", "seed"),
    [("records", 20261141), ("access log", 20261237), ("decisions", 20261598), ("door", 20350944)],
)
def test_what_long_runs_have_found_stays_mended(name: str, seed: int, tmp_path: Path) -> None:
    """A release's date that is none, more tokens than a database counts, a report whose evaluations are texts, and half
    a character in a model's name."""
    TARGETS[name].prepare(tmp_path)
    feed(TARGETS[name], TARGETS[name].make(Random(seed)), tmp_path)


def test_a_path_elsewhere_a_program_and_an_endless_parser_are_noticed(tmp_path: Path) -> None:
    for act in (
        lambda: Path("/etc/hostname").read_bytes(),
        lambda: (tmp_path.parent / "beside").write_text("x"),
        lambda: subprocess.run(["true"], check=False),
    ):
        with pytest.raises(Forbidden), watched(tmp_path, names_files=False):
            act()
    (tmp_path / "inside").write_text("x")
    with watched(tmp_path, names_files=False):
        assert (tmp_path / "inside").read_text() == "x"
