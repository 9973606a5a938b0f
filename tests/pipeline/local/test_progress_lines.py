"""What a run prints where there is no terminal."""

from __future__ import annotations

import re

import pytest
from hera.workflows import Task

from pipeline.runs.progress import duration
from tests.pipeline.local.local_bench import Bench, dag

TIME = r"\d\d:\d\d:\d\d"
TOOK = r"\d+\.\d s"


def test_each_change_is_one_plain_line_on_stderr(bench: Bench) -> None:
    with bench.workflow() as workflow:
        good = bench.program("good", "print('not for the terminal')")
        bad = bench.program("bad", "fail(3, 'told to', 'do not')")
        with dag(name="main"):
            Task(name="resolve", template=good) >> Task(name="evaluate-awq", template=bad)
    engine = bench.start(workflow)
    said = engine.communicate()[1]
    assert engine.returncode == 1
    expected = [
        rf"{TIME} run-1         Running    {TOOK}",
        rf"{TIME} resolve       Running",
        rf"{TIME} resolve       Succeeded  {TOOK}",
        rf"{TIME} evaluate-awq  Running",
        rf"{TIME} evaluate-awq  Failed     {TOOK}  told to",
        r"         hint: do not",
        rf"{TIME} run-1         Failed     {TOOK}  evaluate-awq: told to",
    ]
    lines = said.splitlines()
    assert len(lines) == len(expected), said
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (41.23, "41.2 s"), (59.96, "1:00"), (187, "3:07"), (3731, "1:02:11"), (86400, "24:00:00")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
