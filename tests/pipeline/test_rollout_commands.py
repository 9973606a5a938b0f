"""``slipway releases``, ``rollback`` and ``rollout`` as a person calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from stages.parts.base.errors import RolledBack
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import being_served
from stages.parts.machine.environment import installed
from stages.parts.releases import release as releases
from stages.rollout.commands import publish
from stages.rollout.state_machine import roll_out
from tests.serving import REPOSITORY
from tests.stages.rollout.stage import GOOD, MODEL, NEXT, SETTINGS, Stage

VLLM = installed("vllm").partition("+")[0]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.target.stop_all()


def slipway(store: ModelStore, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments, "--store", str(store.root)],
        cwd=REPOSITORY,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def published(stage: Stage, *names: str) -> None:
    for name in names:
        stage.make(name)
        stage.nominate(name)
        releases.settle(stage.store, name, "candidate" if being_served(stage.store) else "production")


def test_releases_are_listed_and_rolled_back_without_anything_being_served(stage: Stage) -> None:
    published(stage, GOOD, NEXT)
    table = slipway(stage.store, "releases", MODEL).stdout.splitlines()
    assert [line.split()[0] for line in table] == ["Release", "2", "1"]
    assert table[1].endswith("production")
    said = slipway(stage.store, "rollback", MODEL)
    assert (said.returncode, said.stdout) == (
        0,
        f"{GOOD} is in production; nothing was being served: slipway serve {MODEL}\n",
    )
    listed = json.loads(slipway(stage.store, "releases", MODEL, "--json").stdout)
    assert [(each["number"], each["state"]) for each in listed] == [(2, "earlier"), (1, "production")]
    again = slipway(stage.store, "rollback", MODEL, "--to", "2", "--json")
    assert json.loads(again.stdout) == {"model": MODEL, "release": NEXT, "served": False}
    assert stage.reasons() == NEXT


def test_the_history_tells_every_move_the_newest_first(stage: Stage) -> None:
    assert "published or rolled out yet" in slipway(stage.store, "releases", MODEL, "--history").stdout
    stage.served()
    stage.make(NEXT, first_s=0.5)
    with pytest.raises(RolledBack):
        roll_out(stage.store, stage.target, NEXT, SETTINGS)
    shown = slipway(stage.store, "releases", MODEL, "--history").stdout.splitlines()
    assert [line.split()[2:8] for line in shown if line[0].isdigit()] == [
        ["rollout", "1", "2", "10", "%", "rolled"],
        ["rollout", "–", "1", "100", "%", "promoted"],
    ]
    assert "time to first token" in shown[1]
    told = json.loads(slipway(stage.store, "releases", MODEL, "--history", "--json").stdout)
    assert [(each["before"], each["release"]) for each in told] == [(GOOD, NEXT), (None, GOOD)]
    assert told[0]["analysis"]["verdict"] == "rollback"
    listed = json.loads(slipway(stage.store, "releases", MODEL, "--json").stdout)
    assert [each["moves"] for each in listed] == [[told[0]], [told[1]]]


def test_what_a_run_kept_is_promoted_by_a_person_with_a_reason(stage: Stage) -> None:
    published(stage, GOOD)
    stage.make(NEXT)
    releases.settle(stage.store, NEXT, "unpublished")
    listed = json.loads(slipway(stage.store, "releases", MODEL, "--json").stdout)
    assert [each["state"] for each in listed] == ["kept", "production"]
    assert "Missing option '--reason'" in slipway(stage.store, "release", "promote", MODEL).stderr
    assert stage.reasons() == GOOD
    said = slipway(stage.store, "release", "promote", MODEL, "--reason", "its tone was wanted")
    text = f"{NEXT} is in production; nothing was being served: slipway serve {MODEL}\n"
    assert (said.stdout, said.stderr) == (text, "")
    assert stage.reasons() == NEXT
    (move, _) = json.loads(slipway(stage.store, "releases", MODEL, "--history", "--json").stdout)
    (act,) = move["acts"]
    assert (act["by"], act["reason"]) == (releases.user(), "its tone was wanted")
    assert "its tone was wanted" in slipway(stage.store, "releases", MODEL, "--history").stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), f"error: {GOOD} is served by vLLM {VLLM} already: there is nothing to compare"),
        (("--set", "engine.version=one"), "engine.version: String should match pattern"),
        (("--set", "engine.version=0.0.99"), "error: uv could not make the environment of vllm-0.0.99: "),
        (("--engine", "argo", "--platform", "kind"), "error: a pod has one version of vLLM"),
    ],
)
def test_nothing_is_requalified_that_can_not_be_compared(stage: Stage, arguments: tuple[str, ...], error: str) -> None:
    assert f"no release of {MODEL} is in production" in slipway(stage.store, "requalify", MODEL).stderr
    published(stage, GOOD)
    ended = slipway(stage.store, "requalify", MODEL, *arguments)
    assert ended.returncode == 2 or "0.0.99" in error
    assert error in ended.stderr
    assert "hint: " in ended.stderr
    assert not stage.store.runs.exists()


def test_only_requalify_takes_an_engine(stage: Stage) -> None:
    ended = slipway(stage.store, "run", MODEL, "--set", "engine.version=0.31.0")
    assert "error: engine: only slipway requalify takes it" in ended.stderr


def test_a_kept_release_is_rolled_out_beside_what_is_served(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    assert publish(stage.store, stage.target, SETTINGS, NEXT, "asked for by a client")
    assert stage.reasons() == NEXT
    last = releases.history(stage.store)[-1]
    assert (last.kind, last.release, last.acts[0].reason) == ("rollout", NEXT, "asked for by a client")
    assert last.analyses


def test_a_rollback_without_an_earlier_release_is_a_clear_error(stage: Stage) -> None:
    published(stage, GOOD)
    said = slipway(stage.store, "rollback", MODEL)
    assert said.returncode == 33
    assert said.stderr == f"error: {MODEL} has no release before {GOOD}\n  hint: slipway releases {MODEL}\n"
    assert "unknown release '9'" in slipway(stage.store, "rollback", MODEL, "--to", "9").stderr


def test_the_status_shows_state_figures_and_the_next_commands(stage: Stage) -> None:
    assert slipway(stage.store, "rollout", "status", MODEL).stdout == f"there was no rollout of {MODEL} yet\n"
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS.model_copy(update={"approval": True}), until="90")
    shown = slipway(stage.store, "rollout", "status", MODEL).stdout
    for line in (
        f"{NEXT} against {GOOD}",
        "state     awaiting approval",
        "steps     10 % 50 % [90 %] 100 %",
        "last look, at 90 %: promote",
        f"approve: slipway rollout promote {MODEL}",
    ):
        assert line in shown
    assert [line.split()[0] for line in shown.splitlines() if line.rstrip().endswith(" pass")] == [
        *("requests", "errors", "own", "refused", "ttft", "tpot", "quality"),
    ]
    document = json.loads(slipway(stage.store, "rollout", "status", MODEL, "--json").stdout)
    assert document["rollout"]["state"] == "awaiting approval"
    assert [each["percent"] for each in document["rollout"]["analyses"]] == [10, 50, 90]
    assert "window" not in document["rollout"]


LITERAL = {"max_model_len": 4096, "tensor_parallel_size": 1, "startup_timeout_s": 900}


@pytest.mark.parametrize("mode", ["standard", "knative", "route", "llm"])
def test_render_shows_what_a_rollout_applies_without_a_cluster(stage: Stage, mode: str) -> None:
    published(stage, GOOD)
    # These releases were never measured, so that auto has no answer.
    literal = [f"--set=serving.{name}={value}" for name, value in LITERAL.items()]
    shown = slipway(stage.store, "rollout", "render", MODEL, "--platform", "gke", "--mode", mode, *literal).stdout
    first = list(yaml.safe_load_all(shown))
    assert {each["metadata"]["namespace"] for each in first} == {"slipway"}
    services = [each["spec"] for each in first if each["kind"].endswith("InferenceService")]
    assert [each.get("predictor", each)["labels"]["slipway/release"] for each in services] == [GOOD]
    (pods,) = [each["template"] if mode == "llm" else each["predictor"] for each in services]
    assert pods["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    stage.make(NEXT)
    said = slipway(
        stage.store, "rollout", "render", MODEL, "--platform", "gke", "--mode", mode, "--release", "2", *literal
    )
    assert said.stdout.count(f"slipway/release: {GOOD}") == (
        0 if mode == "knative" else 2
    )  # and the spread of its pods
    assert said.stdout.count(f"slipway/release: {NEXT}") == (1 if mode == "knative" else 2)
    assert "10" in said.stdout


def test_render_refuses_a_local_platform_and_an_unknown_mode(stage: Stage) -> None:
    published(stage, GOOD)
    local = slipway(stage.store, "rollout", "render", MODEL, "--mode", "route")
    assert (local.returncode, local.stdout) == (2, "")
    assert "serves on this machine" in local.stderr
    asked = slipway(stage.store, "rollout", "render", MODEL, "--platform", "gke")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "known: knative, llm, route, standard" in asked.stderr


def test_an_impossible_command_says_what_to_do_instead(stage: Stage) -> None:
    promoted = slipway(stage.store, "rollout", "promote", MODEL)
    assert promoted.returncode == 33
    assert f"slipway rollout start {MODEL}" in promoted.stderr
    assert slipway(stage.store, "rollout", "abort", MODEL).stdout == f"no rollout of {MODEL} is in progress\n"
    assert slipway(stage.store, "rollout", "start", MODEL).returncode == 33
    unknown = slipway(stage.store, "store", "prune", MODEL, "--platform", "lokal")
    assert unknown.returncode == 2
    assert "did you mean 'local'?" in unknown.stderr
