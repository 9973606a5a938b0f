"""A fleet file: what is read of it, what is refused, and what has to be run for it to be in force."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipeline.planning.fleet import FleetModel, FleetStep, find, read_fleet, step_of
from pipeline.runs.state import Node, RunPhase, RunState
from pipeline.workflow.parameters import arguments
from stages.parts.base.errors import ConfigError, EventRefused, UnknownName

COMMIT, LATER = "c" * 40, "d" * 40
FLEET = """
defaults:
  profile: chatbot
  optimize: {variants: [fp16], group_size: 64}
  owner: platform
models:
  - {model: org/chat, owner: team-chat, schedule: nightly, serving: {port: 8001}}
  - {model: org/code, profile: quality, revision: v1, serving: {port: 8002}, optimize: {variants: [fp16, int8]}}
  - {model: org/search, owner: team-search, serving: {port: 8003}, rollout: {approval: true}}
"""
Fleet = dict[str, FleetModel]
Read = Callable[..., Fleet]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(text: str = FLEET, platform: str | None = None, *, on_cluster: bool = False) -> Fleet:
        (tmp_path / "fleet.yaml").write_text(text)
        return read_fleet(tmp_path / "fleet.yaml", platform, on_cluster=on_cluster)

    return read


def ran(fleet: Fleet, name: str, phase: RunPhase = "Succeeded", commit: str = COMMIT, **changed: str) -> RunState:
    given = arguments(fleet[name].config, name, commit, serve=True) | changed
    return RunState(name="20261126-1", workflow="slipway", phase=phase, arguments=given, nodes=[])


def step(fleet: Fleet, name: str, last: RunState | None, *, commit: str = COMMIT, nightly: bool = False) -> FleetStep:
    return step_of(fleet[name], commit, last, nightly=nightly)


def refused(read: Read, text: str, **given: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, **given)
    return str(caught.value)


def test_each_model_has_the_defaults_under_what_is_its_own(read: Read) -> None:
    chat, code, search = read().values()
    assert [model.config.profile.name for model in (chat, code, search)] == ["chatbot", "quality", "chatbot"]
    assert (code.config.optimize.variants, code.config.optimize.group_size) == (("fp16", "int8"), 64)
    assert [model.policy.owner for model in (chat, code, search)] == ["team-chat", "platform", "team-search"]
    assert (code.policy.revision, chat.policy.schedule, search.config.rollout.approval) == ("v1", "nightly", True)


def test_the_same_file_is_good_for_a_cluster_whose_gateway_tells_models_apart(read: Read) -> None:
    fleet = read(platform="gke", on_cluster=True)
    assert {model.config.platform.name for model in fleet.values()} == {"gke"}
    assert {model.config.serving.port for model in fleet.values()} == {8000}
    own = FLEET.replace("owner: team-chat", "platform: eks").replace("team-search", "x, platform: eks")
    assert "in the same namespace slipway" in refused(read, own, platform="gke", on_cluster=True)
    assert "is one machine, not a cluster" in refused(read, FLEET, on_cluster=True)
    assert read(own)["org/chat"].config.platform.name == "local"


def test_paths_are_relative_to_the_file(read: Read, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("weights: {quality: 1, latency: 0, throughput: 0, memory: 0}\n")
    fleet = read("models: [{model: ./my-model, profile: mine.yaml}]")
    (model,) = fleet.values()
    assert (model.config.profile.name, model.name.directory) == ("mine", tmp_path / "my-model")
    assert (find(fleet, "./my-model", pushed=False), find(fleet, "local/my-model", pushed=False)) == (model, model)


def test_a_platform_that_the_command_line_names_is_where_the_command_runs(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.yaml").write_text("extends: gke\nnamespace: ml\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    fleet = read(FLEET.replace("owner: team-chat", "platform: eks"), platform="mine.yaml", on_cluster=True)
    assert [model.config.platform.namespace for model in fleet.values()] == ["slipway", "ml", "ml"]


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("{model: org/x, serving: {prot: 1}}", "org/x: serving.prot: unknown field, did you mean 'port'?"),
        ("{model: org/x, ownr: me}", "org/x: ownr: unknown field"),
        ("{model: org/x, schedule: weekly}", "org/x: schedule: Input should be 'nightly' (got 'weekly')"),
        ("{model: org/x, profile: chatbt}", "org/x: profile: unknown profile 'chatbt' (did you mean 'chatbot'?"),
        ("{model: 'org x'}", "org x: 'org x' is not a model's name"),
        ("{owner: me}", "models.3: model: Field required"),
        ("{model: org/chat}", "org/chat: there is another entry of this model"),
        ("{model: org/x, serving: {port: 8001}}", "org/x: serving.port: org/chat has 8001 already"),
    ],
)
def test_a_mistake_names_its_model_and_field(read: Read, entry: str, line: str) -> None:
    assert f"\n    {line}" in refused(read, FLEET + f"  - {entry}\n")


def test_all_mistakes_are_shown_at_once_and_one_in_the_defaults_once(read: Read) -> None:
    text = FLEET.replace("group_size: 64", "group_siz: 64") + "  - {model: org/x, serving: {prot: 1}}\n"
    lines = refused(read, text).splitlines()
    everywhere = "org/chat, org/code, org/search, org/x: optimize.group_siz: unknown field, did you mean 'group_size'?"
    assert [line.strip() for line in lines[1:]] == [
        everywhere,
        "org/x: serving.prot: unknown field, did you mean 'port'?",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [", "is not valid YAML"),
        ("- org/chat", "must hold fields with values"),
        ("default: {}\nmodels: []", "default: unknown field, did you mean 'defaults'?"),
        ("models: [org/chat]", "models.0: Input should be a valid dictionary"),
    ],
)
def test_a_file_of_another_form_is_refused(read: Read, text: str, message: str) -> None:
    assert message in refused(read, text)


def test_a_model_that_never_ran_is_run_and_one_that_ran_with_the_same_settings_is_not(read: Read) -> None:
    fleet = read()
    assert step(fleet, "org/chat", None).reason == "it was not run yet"
    for name in fleet:
        same = step(fleet, name, ran(fleet, name))
        assert (same.starts, same.reason, same.changes) == (False, "unchanged since run 20261126-1", {})


def test_a_change_of_one_profile_runs_that_model_alone_and_shows_the_setting(read: Read) -> None:
    before = {name: ran(read(), name) for name in read()}
    now = read(FLEET.replace("profile: quality", "profile: batch"))
    steps = [step(now, name, last) for name, last in before.items()]
    assert [each.model.name.id for each in steps if each.starts] == ["org/code"]
    assert steps[1].changes["profile.name"] == ("quality", "batch")
    lines = [*steps[1].lines("would run")]
    assert lines[0] == "org/code (platform): would run: its settings are not those of run 20261126-1"
    at = lines.index('  - profile.name: "quality"')
    assert lines[at + 1] == '  + profile.name: "batch"'


def test_who_owns_a_model_and_when_it_is_run_does_not_change_it(read: Read) -> None:
    before = ran(read(), "org/chat")
    now = read(FLEET.replace("owner: team-chat, schedule: nightly", "owner: others"))
    assert not step(now, "org/chat", before).starts


def test_a_new_commit_runs_the_model(read: Read) -> None:
    fleet = read()
    moved = step(fleet, "org/chat", ran(fleet, "org/chat"), commit=LATER)
    assert (moved.starts, moved.reason) == (True, "main is at dddddddddddd, not at cccccccccccc as in run 20261126-1")
    by_hand = ran(fleet, "org/chat", commit="main")
    by_hand.nodes.append(Node(name="resolve", template="resolve", outputs={"commit": LATER}))
    assert not step(fleet, "org/chat", by_hand, commit=LATER).starts


@pytest.mark.parametrize(
    ("phase", "nightly", "starts", "reason"),
    [
        ("Failed", False, False, "run 20261126-1 failed; again: slipway retry 20261126-1"),
        ("Failed", True, True, "its schedule is nightly"),
        ("Running", True, False, "run 20261126-1 is under way"),
        ("Interrupted", False, True, "run 20261126-1 was interrupted"),
        ("Succeeded", True, True, "its schedule is nightly"),
    ],
)
def test_how_the_last_run_ended_decides_whether_it_is_run_again(
    read: Read, phase: RunPhase, nightly: bool, starts: bool, reason: str
) -> None:
    fleet = read()
    decided = step(fleet, "org/chat", ran(fleet, "org/chat", phase), nightly=nightly)
    assert (decided.starts, decided.reason) == (starts, reason)
    others = step(fleet, "org/search", ran(fleet, "org/search"), nightly=True)
    assert not others.starts


def test_a_run_of_a_version_that_knew_fewer_settings_counts_as_the_same(read: Read) -> None:
    fleet = read()
    older = ran(fleet, "org/chat")
    serving = json.loads(older.arguments["serving"])
    del serving["affinity"]
    older.arguments["serving"] = json.dumps(serving)
    assert step(fleet, "org/chat", older).changes == {}
    older.arguments["serving"] = json.dumps(serving | {"affinity": "client"})
    assert step(fleet, "org/chat", older).changes == {"serving.affinity": ("client", "session")}


def test_a_run_that_was_not_to_serve_does_not_put_the_file_in_force(read: Read) -> None:
    fleet = read()
    assert step(fleet, "org/chat", ran(fleet, "org/chat", serve="false")).changes == {"serve": (False, True)}


def test_a_push_counts_for_models_that_follow_main(read: Read) -> None:
    fleet = read()
    assert find(fleet, "org/chat", pushed=True).policy.owner == "team-chat"
    with pytest.raises(EventRefused, match="at revision v1, not at main"):
        find(fleet, "org/code", pushed=True)
    with pytest.raises(EventRefused, match="has org/chap not in it"):
        find(fleet, "org/chap", pushed=True)
    with pytest.raises(UnknownName) as caught:
        find(fleet, "org/chap", pushed=False)
    assert "did you mean 'org/chat'?" in caught.value.hint


def test_a_revision_that_is_a_commit_is_not_looked_up(read: Read) -> None:
    fleet = read(yaml.safe_dump({"models": [{"model": "org/chat", "revision": COMMIT}]}))
    assert fleet["org/chat"].commit_now() == COMMIT
