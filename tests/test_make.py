"""What ``make test`` leaves out is said where it is promised, and run by the schedule."""

from __future__ import annotations

import subprocess

import yaml

from tests.serving import REPOSITORY


def make(*arguments: str) -> str:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout


def pytest_of(target: str) -> str:
    (command,) = [line for line in make("--dry-run", target).splitlines() if "-m pytest" in line]
    return command


def test_make_test_leaves_out_the_slow_tests_and_says_so_and_test_all_runs_every_test() -> None:
    assert pytest_of("test").endswith(' -m "not slow"')
    assert pytest_of("test") == f'{pytest_of("test-all")} -m "not slow"'
    described = dict(line.split(maxsplit=1) for line in make("help").splitlines())
    assert "but for those marked slow" in described["test"]
    assert described["test-all"].startswith("the slow tests too")


def test_the_schedule_runs_every_test() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow[True]["schedule"]  # YAML reads `on` as true
    steps = workflow["jobs"]["test"]["steps"]
    assert steps[-1]["run"] == "make ${{ github.event_name == 'schedule' && 'test-all' || 'test' }}"
