from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.repeatability import decisions, finished, tell, verdict
from scoring.profile import Profile
from stages.errors import MissingRun
from stages.records import VARIANT, Variant
from stages.store import ModelStore
from tests.samples import evaluation, measured_store

BALANCED = Profile(name="balanced")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three repeats that came to the same, and a fourth that was killed."""
    for name in ("01", "02", "03", "04.unfinished"):
        measured_store(tmp_path / "repeats" / name)
    return tmp_path / "repeats"


def measured_anew(store: ModelStore, name: str, quality: float, latency_ms: float) -> None:
    made = Variant.read(store.optimized(name) / VARIANT)
    assert made is not None
    evaluation(store, made, quality=quality, latency_ms=latency_ms, throughput=100.0, weights_bytes=1000)


def test_repeats_that_come_to_the_same_say_so(folder, capsys):
    made = decisions(finished(folder), BALANCED)
    assert len(made) == 3
    assert verdict(made) == "same winner each time: awq, separated (3 of 3 separated)"
    assert tell({"balanced": made}) == 0
    shown = capsys.readouterr().out
    assert shown.count("awq     yes") == 3
    assert "fp16 0.5" in shown


def test_a_repeat_that_comes_to_another_winner_is_a_difference(folder, capsys):
    measured_anew(finished(folder)[1], "fp16", 1.0, 1.0)
    made = decisions(finished(folder), BALANCED)
    assert verdict(made) == "differs: awq 2, fp16 1 (3 of 3 separated)"
    assert tell({"balanced": made}) == 1


def test_nobody_is_no_winner(folder):
    strict = Profile.model_validate({"name": "strict", "constraints": {"e2el_p95_ms": {"max": 1}}})
    assert verdict(decisions(finished(folder), strict)) == "same winner each time: nobody, undecided (0 of 3 separated)"


def test_a_folder_is_decided_without_measuring(folder):
    command = [
        sys.executable,
        "-m",
        "benchmarks.repeatability",
        "--from",
        str(folder),
        "--profiles",
        "balanced,quality",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2].startswith("balanced  same winner each time: awq")
    assert ended.stdout.splitlines()[-1].startswith("quality   same winner each time: fp16")


def test_a_folder_without_repeats_is_a_clear_error(tmp_path):
    with pytest.raises(MissingRun, match="holds no repeats"):
        finished(tmp_path / "nothing")
