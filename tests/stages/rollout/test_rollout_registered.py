"""What MLflow's model registry gets of the moves of production. The stand-in for it was compared with MLflow 3.17.2:
the same moves led to the same models, versions, tags and aliases there, and to the same refusals."""

from __future__ import annotations

import base64
import socket
import time

import pytest

from stages.parts.base import notify
from stages.parts.base.errors import RolledBack
from stages.parts.base.notify import MLFLOW
from stages.parts.base.program import RUN_VARIABLE
from stages.parts.releases import release as releases
from stages.rollout.commands import roll_back
from stages.rollout.state_machine import roll_out
from tests.model_registry import API, model_registry
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS, Stage

NAME = "org--name"
URI, TOKEN, USERNAME, PASSWORD = MLFLOW


def settled(stage: Stage, *names: str) -> None:
    """These releases, in production one after the other while nothing is served."""
    for name in names:
        stage.make(name)
        releases.settle(stage.store, name, "production")


def test_production_has_a_version_and_the_alias_and_a_rollback_moves_the_alias_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "run-1")
    with model_registry() as registry:
        monkeypatch.setenv(URI, f"{registry.url}/")
        settled(stage, GOOD)
        tags = {"release": GOOD, "variant": "fp16", "digest": "000000000001", "run": "run-1", "decision": ""}
        new = {"name": NAME, "source": f"slipway:{stage.store.releases / GOOD}"}
        assert registry.requests == [
            ("POST", f"{API}registered-models/create", {"name": NAME}),
            ("GET", f"{API}model-versions/search", {"filter": f"name='{NAME}' AND tags.release='{GOOD}'"}),
            ("POST", f"{API}model-versions/create", {**new, "tags": [{"key": k, "value": tags[k]} for k in tags]}),
            ("POST", f"{API}registered-models/alias", {"name": NAME, "alias": "production", "version": "1"}),
        ]
        settled(stage, NEXT)
        assert registry.aliases == {NAME: {"production": "2"}}
        assert roll_back(stage.store, stage.target, SETTINGS) == (GOOD, False)
        assert registry.aliases == {NAME: {"production": "1"}}
        assert len(registry.versions[NAME]) == 2


def test_a_rollout_that_ends_well_is_entered_and_one_that_goes_back_is_not(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_registry() as registry:
        monkeypatch.setenv(URI, registry.url)
        stage.served()
        asked = len(registry.requests)
        stage.make(NEXT, fails_every=2)
        with pytest.raises(RolledBack):
            roll_out(stage.store, stage.target, NEXT, SETTINGS)
        assert len(registry.requests) == asked
        third = stage.make("0003-gptq-4bit-000000000003")
        roll_out(stage.store, stage.target, third, SETTINGS)
    assert registry.aliases == {NAME: {"production": "2"}}
    tags = {tag["key"]: tag["value"] for tag in registry.versions[NAME][0]["tags"]}
    assert (tags["release"], tags["variant"], tags["digest"]) == (third, "gptq-4bit", "000000000003")


@pytest.mark.parametrize(
    ("variables", "login"),
    [
        ({}, None),
        ({TOKEN: "secret"}, "Bearer secret"),
        ({USERNAME: "me"}, None),
        ({TOKEN: "secret", USERNAME: "me", PASSWORD: "mine"}, "Basic " + base64.b64encode(b"me:mine").decode()),
    ],
)
def test_it_logs_in_as_mlflows_own_clients_do(
    variables: dict[str, str], login: str | None, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_registry() as registry:
        for name, value in ({URI: registry.url} | variables).items():
            monkeypatch.setenv(name, value)
        settled(stage, GOOD)
    assert registry.logins == {login}


def test_a_registry_that_refuses_or_is_none_hinders_no_move_and_is_named_in_the_log(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with model_registry((403, {"error_code": "PERMISSION_DENIED"})) as registry:
        monkeypatch.setenv(URI, registry.url)
        monkeypatch.setenv(TOKEN, "secret")
        settled(stage, GOOD)
    refusal = """403 '{"error_code": "PERMISSION_DENIED"}'"""
    assert f"warning: {GOOD} is not in MLflow's registry: {refusal}" in capsys.readouterr().err
    settled(stage, NEXT)
    assert f"warning: {NEXT} is not in MLflow's registry: ConnectError" in capsys.readouterr().err
    assert releases.current_release(stage.store) == NEXT
    with model_registry((200, {"model_versions": [None]})) as registry:
        for address in (
            registry.url,
            "sqlite:///mlflow.db",
            "nonsense",
            f"http://me:secret@127.0.0.1:{registry.server_port}",
        ):
            monkeypatch.setenv(URI, address)
            notify.register(stage.store.releases / NEXT, {})
    log = capsys.readouterr().err
    assert log.count(f"warning: {NEXT} is not in MLflow's registry: ") == 4
    assert "secret" not in log


def test_a_registry_that_does_not_answer_delays_no_rollback_for_long(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settled(stage, GOOD, NEXT)
    monkeypatch.setattr(notify, "REGISTRY_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(URI, f"http://127.0.0.1:{silent.getsockname()[1]}")
        began_s = time.monotonic()
        assert roll_back(stage.store, stage.target, SETTINGS) == (GOOD, False)
        assert time.monotonic() - began_s < 3
    assert f"warning: {GOOD} may not be in MLflow's registry: no answer within 0.2 s" in capsys.readouterr().err
    assert releases.current_release(stage.store) == GOOD
