"""What the pages name is there: commands, options, settings, targets of make, links, exit codes, versions, folders."""

from __future__ import annotations

import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from typer.main import get_command

from pipeline.cli import app
from pipeline.cluster.doctor import OLDEST
from pipeline.settings.config import RunConfig, load, names
from stages.parts.base import errors
from stages.parts.base.workload import PROTOCOLS
from tests.serving import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md")), REPOSITORY / "manifests" / "README.md"]
COMMAND = re.compile(r"(?:^|[`|(] ?|; |\$ )slipway ([a-z][^`#|;\n]*)", re.MULTILINE)
SETTING = re.compile(r"`(?:--set )?((?:serving|kserve|optimize|rollout|workload|profile|cluster|stages)\.[a-z_.]+)")
LINK = re.compile(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)")
EXIT_CODE = re.compile(r"(?:exit code|exits? with) (\d+)\b")

on_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands(text: str) -> Iterator[list[str]]:
    """The words after each ``slipway``, those after a backslash at the end of a line included."""
    for match in COMMAND.finditer(text.replace("\\\n", " ")):
        yield shlex.split(match[1].replace("'", "").replace('"', ""))


def settings(model: type[BaseModel], within: str = "") -> Iterator[str]:
    """The path of every field of *model*; those of ``platform`` without that word."""
    for name, field in model.model_fields.items():
        yield f"{within}{name}"
        for kind in typing.get_args(field.annotation) or (field.annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from settings(kind, "" if name == "platform" else f"{within}{name}.")


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@on_every_page
def test_commands_and_their_options_are_there(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        command: Any = get_command(app)
        for word in words:
            if not hasattr(command, "commands"):
                break
            assert word in command.commands, words
            command = command.commands[word]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= options | {"--help"}, words


@on_every_page
def test_commands_for_a_cluster_can_be_typed_as_they_stand(page: Path) -> None:
    """They name a platform, or the page exports it before."""
    before, named = "", {"clients", "doctor", "install", "rollout", "run", "uninstall"}
    for line in page.read_text(encoding="utf-8").splitlines():
        before += line
        words = line.partition("  #")[0].split()
        if words[:2] == ["$", "slipway"] and words[2] in named and (words[2].endswith("install") or "argo" in words):
            assert "--platform" in words or "export SLIPWAY_PLATFORM=" in before, line


@on_every_page
def test_settings_are_there(page: Path) -> None:
    named = {name.rstrip(".") for name in SETTING.findall(page.read_text(encoding="utf-8"))}
    assert named - set(settings(RunConfig)) - {"rollout.json"} == set()


@on_every_page
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), (path, anchor)


@on_every_page
def test_targets_of_make_and_exit_codes_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"[`$] ?make ([a-z0-9-]+)", text)) <= targets
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.SlipwayError)}
    assert {int(code) for code in EXIT_CODE.findall(text)} <= codes


def test_the_page_for_operations_has_every_alert_and_every_exit_code_with_its_errors() -> None:
    text = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")
    files = ("monitoring/alerts.yaml", "envoy-gateway/clients/budgets.yaml")
    documents = [each for file in files for each in yaml.safe_load_all((REPOSITORY / "manifests" / file).read_text())]
    groups = [group for each in documents for group in each["spec"].get("groups", [])]
    alerts = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert re.findall(r"^\| `(Slipway\w+)` \|", text, re.MULTILINE) == alerts
    listed: dict[str, int] = {}
    for code, kinds in re.findall(r"^\| (\d+) \| ([\w, ]+) \|", text, re.MULTILINE):
        listed |= dict.fromkeys(kinds.split(", "), int(code))
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.SlipwayError)]
    assert listed == {each.__name__: each.exit_code for each in kinds if each is not errors.PermanentError}


@pytest.mark.parametrize("page", ["docs/argo.md", "manifests/README.md"])
def test_a_cluster_needs_the_argo_workflows_that_doctor_accepts(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    assert re.findall(r"\(https://argo-workflows\.readthedocs\.io\) ([\d.]+) or newer", text) == [OLDEST]


@pytest.mark.parametrize("folder", ["pipeline", "stages", "stages/parts"])
def test_the_map_of_the_code_has_every_folder(folder: str) -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (REPOSITORY / "docs" / "code.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name.strip("`") for row in rows for name in row.split(", ")}
    there = {path.parent.name for path in (REPOSITORY / folder).glob("*/__init__.py")}
    assert there - {"parts"} - named == set()


def test_the_profiles_are_those_of_configs() -> None:
    text = (REPOSITORY / "docs" / "choice.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \|((?: [\d–]+(?: %)? \|){4}) ≥ (\d+) % \|$", text, re.MULTILINE)
    assert {name for name, *_ in rows} == set(names("profile"))
    for name, cells, recovery in rows:
        profile = load(chosen={"profile": name}).profile
        shares = [int(cell.strip(" %").replace("–", "0")) / 100 for cell in cells.split("|")[:-1]]
        assert list(profile.weights.shares().values()) == pytest.approx(shares)
        assert profile.constraints.limits()["quality_recovery"] == int(recovery) / 100


def test_the_protocols_are_those_of_the_code() -> None:
    text = (REPOSITORY / "docs" / "choice.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \| (\d+) minutes \| (\d+) % \|$", text, re.MULTILINE)
    assert {name: (float(minutes), int(percent) / 100) for name, minutes, percent in rows} == dict(PROTOCOLS)
