"""``slipway apply`` and ``models`` on one machine, as processes: real runs that end at check, and a real endpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.local.folder import STATE, WORKFLOW
from stages.parts.base.store import ModelStore
from tests.hub.models import tiny_model
from tests.hub.server import HubServer
from tests.serving import REPOSITORY, SERVING, environment, publish, stage, stand_in_variant

NAMES = ("org/chat", "org/code", "org/search")
FLEET = """
defaults:
  optimize: {variants: [fp16]}
  workload:
    {name: mine, quality_tasks: [mine], tasks_path: /nowhere, concurrency: 1, prompt_tokens: 8, output_tokens: 4}
models:
  - {model: org/chat, owner: team-chat, profile: chatbot, serving: {port: 18071}}
  - {model: org/code, owner: team-code, profile: quality, serving: {port: 18072}}
  - {model: org/search, owner: team-search, serving: {port: 18073}}
"""
Slipway = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def models() -> Iterator[HubServer]:
    with HubServer() as hub:
        for name in NAMES:
            hub.add_repo(name, tiny_model())
        yield hub


@pytest.fixture
def slipway(models: HubServer, tmp_path: Path) -> Slipway:
    return lambda *words: subprocess.run(
        [sys.executable, "-m", "pipeline", *words],
        env=os.environ | {"HF_ENDPOINT": models.url, "SLIPWAY_STORE": str(tmp_path / "store"), "COLUMNS": "200"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def fleet(tmp_path: Path, text: str = FLEET) -> str:
    (tmp_path / "fleet.yaml").write_text(text)
    return str(tmp_path / "fleet.yaml")


def runs(tmp_path: Path) -> dict[str, dict[str, str]]:
    """The arguments of the last run of each model."""
    paths = sorted((tmp_path / "store").glob(f"*/runs/*/{WORKFLOW}"))
    kept = [json.loads(path.read_text())["arguments"] for path in paths]
    return {arguments["model"]: arguments for arguments in kept}


def made_to_succeed(tmp_path: Path) -> None:
    for path in (tmp_path / "store").glob(f"*/runs/*/{STATE}"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"phase": "Succeeded"}))


def test_three_models_are_run_one_after_the_other_and_then_only_what_changed(slipway: Slipway, tmp_path: Path) -> None:
    file = fleet(tmp_path)
    dry = slipway("apply", file, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.splitlines()[0] == "org/chat (team-chat): would run: it was not run yet"
    assert not (tmp_path / "store").exists()

    ended = slipway("apply", file)
    assert ended.returncode == 2, ended.stderr  # each ends at check, which refuses a folder that is not there
    assert "tasks_path" in ended.stderr
    assert [line.partition(":")[0] for line in ended.stdout.splitlines() if line.startswith("org/")] == [*NAMES]
    first = runs(tmp_path)
    assert [json.loads(first[name]["profile"])["name"] for name in NAMES] == ["chatbot", "quality", "balanced"]
    assert all(re.fullmatch("[0-9a-f]{40}", arguments["revision"]) for arguments in first.values())

    again = slipway("apply", file)
    assert again.returncode == 0
    assert again.stdout.count("failed; again: slipway retry ") == 3
    made_to_succeed(tmp_path)
    assert slipway("apply", file).stdout.splitlines()[-1] == f"nothing to do: what {file} says is in force"
    changed = fleet(tmp_path, FLEET.replace("profile: quality", "profile: batch"))
    steps = {each["model"]: each for each in json.loads(slipway("apply", changed, "--dry-run", "--json").stdout)}
    assert [name for name in NAMES if steps[name]["starts"]] == ["org/code"]
    assert steps["org/code"]["changes"]["profile.name"] == ["quality", "batch"]
    rows = json.loads(slipway("models", file, "--json").stdout)
    assert [(row["model"], row["owner"], row["health"]) for row in rows] == [
        (name, owner, "not served")
        for name, owner in zip(NAMES, ("team-chat", "team-code", "team-search"), strict=True)
    ]
    assert all(row["run"] and row["page"].endswith("/report.html") for row in rows)


def test_a_push_runs_the_model_with_its_settings_in_the_file(slipway: Slipway, models, tmp_path: Path) -> None:
    pushed = models.add_repo("org/code", tiny_model(**{"README.md": b"pushed"}))
    event: dict[str, Any] = {"event": {"action": "update", "scope": "repo.content"}}
    event |= {
        "repo": {"type": "model", "name": "org/code"},
        "updatedRefs": [{"ref": "refs/heads/main", "newSha": pushed}],
    }
    (tmp_path / "event.json").write_text(json.dumps(event))
    words = ("trigger", "--payload", str(tmp_path / "event.json"), "--fleet")
    assert slipway(*words, fleet(tmp_path)).returncode == 2  # as above
    (arguments,) = runs(tmp_path).values()
    assert (arguments["revision"], json.loads(arguments["profile"])["name"]) == (pushed, "quality")
    pinned = slipway(*words, fleet(tmp_path, FLEET.replace("owner: team-code", "revision: v1")))
    assert pinned.returncode == 52
    assert "the fleet file has org/code at revision v1, not at main" in pinned.stderr


def test_the_example_of_the_docs_can_be_applied(slipway: Slipway, models: HubServer, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "fleet.md").read_text()
    (example,) = [text for text in re.findall(r"```yaml\n(.+?)```", page, re.DOTALL) if text.startswith("defaults:")]
    models.tag("org/code", "v1.2", models.add_repo("org/code", tiny_model()))
    ended = slipway("apply", fleet(tmp_path, example), "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("would run: it was not run yet") == 3


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ModelStore]:
    store = ModelStore(tmp_path / "store", "org/name")
    publish(store, 1, stand_in_variant(store, "fp16"))
    said = stage("serve", "--serving", json.dumps(SERVING), variables=environment(store, stand_in=True))
    assert said.returncode == 0, said.stderr
    yield store
    stage("serve", "--stop", variables=environment(store))


def test_what_serves_is_shown_and_goes_on_serving_without_an_entry(slipway: Slipway, served, tmp_path: Path) -> None:
    (row,) = json.loads(slipway("models", "--json").stdout)
    assert (row["model"], row["health"], row["up"], row["servers"]) == ("org/name", "up", 1, 1)
    assert row["release"].startswith("0001-fp16-")
    ended = slipway("apply", fleet(tmp_path), "--dry-run")
    assert "org/name is not in " in ended.stdout
    assert ended.stdout.splitlines()[-1].endswith("to end that: slipway serve org/name --stop")
