"""What ``make test`` leaves out is said where it is promised, and run by the schedule."""

from __future__ import annotations

import re
import subprocess

import yaml

from stages.evaluate.questions.question import DATA
from tests.serving import REPOSITORY


def make(*arguments: str) -> str:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout


def pytest_of(target: str) -> str:
    (command,) = [line for line in make("--dry-run", target).splitlines() if "-m pytest" in line]
    return command


def test_make_test_leaves_out_the_slow_tests_and_says_so_and_test_all_runs_every_test() -> None:
    fast = '-m "not slow"'
    assert pytest_of("test").count(fast) == 2  # of all, and of those that failed, alone
    assert pytest_of("test").replace(fast, "").split() == pytest_of("test-all").split()
    described = dict(line.split(maxsplit=1) for line in make("help").splitlines())
    assert "but for those marked slow" in described["test"]
    assert described["test-all"].startswith("the slow tests too")


def test_the_schedule_runs_every_test() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow[True]["schedule"]  # YAML reads `on` as true
    steps = workflow["jobs"]["test"]["steps"]
    assert steps[-1]["run"] == "make ${{ github.event_name == 'schedule' && 'test-all' || 'test' }}"


def test_a_release_is_built_listed_and_signed_by_one_command() -> None:
    commands = make("--dry-run", "release", "REGISTRY=registry.example.com/ml", "KEY=signing.pem").splitlines()
    steps = (
        "uv build --wheel",
        "sbom.py > dist/",
        "images/build --registry registry.example.com/ml --push",
        "sign key dist",
    )
    assert [step for line in commands for step in steps if step in line] == [*steps]
    refused = subprocess.run(["make", "release"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "REGISTRY=registry.example.com/ml KEY=signing.pem" in refused.stdout


def test_the_list_of_what_to_mirror_has_all_that_is_locked_named_and_read() -> None:
    lines = make("mirror-list").splitlines()
    locks = "\n".join(path.read_text() for path in REPOSITORY.glob("requirements*.lock"))
    pins = re.findall(r"^(\S+==[^ ]+) \\$", locks, re.MULTILINE)
    assert {line.split()[1] for line in lines if line.startswith("pypi ")} == {*pins}
    files = [*REPOSITORY.glob("manifests/images/*/Containerfile"), *REPOSITORY.glob("manifests/**/*.yaml")]
    named = {
        image for path in files for image in re.findall(r"docker\.io/[^\s'\"]+", path.read_text()) if "{" not in image
    }
    assert {line.split()[1] for line in lines if line.startswith("image ")} == named
    assert {line.split()[1] for line in lines if line.startswith("apt ")} >= {"g++", "gcc", "libnuma1"}
    assert {line.removeprefix("dataset ") for line in lines if line.startswith("dataset ")} == {
        f"{each.dataset}@{each.commit} {each.path}" for each in DATA.values()
    }
