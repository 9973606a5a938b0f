"""One address for all models of a store: the real Envoys, doors and supervisors, before stand-ins of vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import psutil
import pytest

from stages.parts.base.files import holder
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.activity import ActivityReader
from stages.parts.endpoint.clients import Client, add
from stages.parts.endpoint.database import opened
from stages.parts.endpoint.endpoint import LOCK, SERVERS, endpoint
from stages.parts.endpoint.routing import OFFERED
from stages.parts.endpoint.shared import FOLDER
from stages.parts.endpoint.usage import Sum, sums, take_in
from stages.parts.vllm.client import credentials, http
from stages.parts.vllm.server import reserved_port
from tests.routes import METHODS, ask, spellings
from tests.serving import (
    ROLLOUT,
    SERVING,
    Said,
    ended,
    environment,
    living,
    processes_with,
    publish,
    stand_in_variant,
    wait_until,
)

VARIANTS: Final = {"org/chat": "fp16", "org/code": "awq", "org/search": "gptq"}
MIB: Final = 1 << 20


class Machine:
    """A store whose models share an address."""

    def __init__(self, root: Path, **serving: Any) -> None:
        self.root, self.serving = root, serving
        with reserved_port("127.0.0.1", 0) as self.port, reserved_port("127.0.0.1", 0) as self.metrics_port:
            self.url = f"http://127.0.0.1:{self.port}"
        self.key = add(root, Client(name="first", key_sha256=""))

    def store(self, model: str) -> ModelStore:
        return ModelStore(self.root, model)

    def stage(self, model: str, *arguments: str, **serving: Any) -> Said:
        addresses = {"shared_port": self.port, "metrics_address": f"127.0.0.1:{self.metrics_port}"}
        flags = ["--serving", json.dumps(SERVING | addresses | serving), "--rollout", json.dumps(ROLLOUT), *arguments]
        command = [sys.executable, "-m", "stages.serve", "--model", model, *flags]
        return ended(command, environment(self.store(model), stand_in=True))

    def serve(self, *models: str) -> None:
        for model in models:
            publish(self.store(model), 1, stand_in_variant(self.store(model), VARIANTS[model], token_s=0.02))
            said = self.stage(model)
            assert said.returncode == 0, said.stderr
        self.wait_for(*models)

    def wait_for(self, *models: str) -> None:
        def shares() -> bool:
            try:
                return self.names(self.key) == [*models]
            except (openai.APIConnectionError, openai.InternalServerError):  # it starts
                return False

        wait_until(shares, f"{models} at the address")

    def stop(self, *models: str) -> None:
        for model in models:
            assert self.stage(model, "--stop").returncode == 0

    def end(self) -> None:
        self.stop(*(model for model in VARIANTS if self.store(model).path.exists()))
        wait_until(lambda: not living(processes_with(str(self.root))), "the end of all processes")
        assert self.process() is None

    def client(self, key: str, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0} | options)

    def names(self, key: str) -> list[str]:
        return [model.id for model in self.client(key).models.list()]

    def post(self, key: str, content: bytes | str, kind: str = "application/json") -> httpx.Response:
        headers = {"content-type": kind} | credentials(key)
        return http().post(f"{self.url}/v1/completions", content=content, headers=headers, timeout=60)

    def process(self) -> int | None:
        return holder(self.root / FOLDER / LOCK)

    def used(self) -> dict[tuple[Any, ...], Sum]:
        """What each client has used of each model."""
        with opened(self.root) as database:
            for folder in self.root.glob(f"*/{SERVERS}"):
                take_in(database, folder)
            every = sums(database, datetime(2000, 1, 1, tzinfo=UTC), ["client", "model"])
        return {tuple(each.group.values()): each for each in every}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("machine") / "store")
    try:
        made.serve(*VARIANTS)
        yield made
    finally:
        made.end()


def error_of(reply: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_the_official_client_reaches_all_models_by_one_address_with_one_key(machine: Machine) -> None:
    client, before = machine.client(machine.key), machine.used()
    for number, model in enumerate(VARIANTS, 1):
        answer = client.completions.create(model=model, prompt="x", max_tokens=number)
        assert answer.usage
        assert answer.usage.completion_tokens == number
        stream = client.completions.create(model=model, prompt="x", max_tokens=number + 1, stream=True)
        assert len([event for event in stream if event.choices]) == number + 1

    def counted() -> bool:
        after = machine.used()
        return all(
            after[key].output_tokens - (before[key].output_tokens if key in before else 0) == 2 * number + 1
            for number, key in enumerate((("first", model) for model in VARIANTS), 1)
            if key in after
        ) and all(("first", model) in after for model in VARIANTS)

    wait_until(counted, "each model's own usage of the client")


def test_a_client_without_a_model_gets_404_for_it_and_does_not_see_it(machine: Machine) -> None:
    key = add(machine.root, Client(name="guest", key_sha256="", models=("org/chat", "org/chart")))
    assert machine.names(key) == ["org/chat"]
    client = machine.client(key)
    assert client.completions.create(model="org/chat", prompt="x").choices
    with pytest.raises(openai.NotFoundError) as hidden:
        client.completions.create(model="org/code", prompt="x")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="something else", prompt="x")
    assert hidden.value.body == unknown.value.body
    assert hidden.value.code == "model_not_found"
    assert hidden.value.type == "invalid_request_error"
    own = endpoint(machine.store("org/code"))
    assert own
    body = {"model": "org/code", "prompt": "x"}
    refused = http().post(f"{own.url}/v1/completions", json=body, headers=credentials(key))
    assert refused.status_code == 403, "at its own address as ever"


def test_an_unknown_model_is_told_with_the_nearest_that_the_client_may_use(machine: Machine) -> None:
    guest = add(machine.root, Client(name="near", key_sha256="", models=("org/search",)))
    for key, near in ((machine.key, "org/code"), (guest, None)):
        with pytest.raises(openai.NotFoundError) as error:
            machine.client(key).chat.completions.create(model="org/cod", messages=[{"role": "user", "content": "x"}])
        assert ("did you mean" in error.value.message) == bool(near)
        assert (near or "") in error.value.message


def test_limits_are_those_of_each_model(machine: Machine) -> None:
    key = add(machine.root, Client(name="limited", key_sha256="", requests_per_minute=1))
    client = machine.client(key)
    for model in ("org/chat", "org/code"):
        assert machine.names(key) == [*VARIANTS], "the list counts as no request"
        assert client.completions.create(model=model, prompt="x").choices
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(model=model, prompt="x")
        assert int(error.value.response.headers["retry-after"]) > 0


@pytest.mark.parametrize("header", [{}, credentials("sk-of-nobody")])
def test_without_a_right_key_nothing_is_told(machine: Machine, header: dict[str, str]) -> None:
    for model in ("org/chat", "unknown"):
        reply = http().post(f"{machine.url}/v1/completions", json={"model": model, "prompt": "x"}, headers=header)
        assert (reply.status_code, error_of(reply)["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert http().get(f"{machine.url}/v1/models", headers=header).status_code == 401
    assert http().get(f"{machine.url}/health", headers=header).status_code == 200


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"prompt": "x"}', '{"model": 7}', '{"model": null}'])
def test_a_request_that_names_no_model_is_refused(machine: Machine, content: str) -> None:
    reply = machine.post(machine.key, content)
    assert reply.status_code == 400
    assert "names a model" in error_of(reply)["message"]


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", ""])
def test_the_model_is_read_wherever_it_stands_in_a_long_body(machine: Machine, kind: str) -> None:
    text = "ü{" + "x" * (20 * MIB)
    for body in (
        {"model": "org/code", "prompt": text},
        {"prompt": text, "nested": {"model": "x"}, "model": "org/code"},
    ):
        reply = machine.post(machine.key, json.dumps(body, ensure_ascii=False).encode(), kind)
        assert reply.status_code == 200, reply.text


def test_a_body_beyond_the_limit_is_refused_with_413(machine: Machine) -> None:
    reply = machine.post(machine.key, json.dumps({"prompt": "x" * (65 * MIB), "model": "org/code"}))
    assert reply.status_code == 413
    assert error_of(reply)["message"] == "a request may have 64 MiB"


def test_only_what_is_offered_is_reached(machine: Machine) -> None:
    key = f"Authorization: Bearer {machine.key}"
    for path in ("/metrics", "/invocations", "/tokenize", "/x-slipway-under-way", "/v1/embeddings", *OFFERED):
        for spelled in (path, *spellings(path)):
            for method in METHODS:
                status, _ = ask(machine.port, method, spelled, key)
                offered = OFFERED.get(spelled) == method
                assert status in ({200, 400} if offered else {400, 404}), (method, spelled, status)
    assert ask(machine.port, "GET", "/v1/models?x=/y", key)[0] == 200


@pytest.mark.parametrize("accepted", ["*/*", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"])
def test_the_metrics_of_all_servers_have_their_model_and_release(machine: Machine, accepted: str) -> None:
    reply = http().get(f"http://127.0.0.1:{machine.metrics_port}/metrics", headers={"Accept": accepted})
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in reply.text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    for model in VARIANTS:
        running = endpoint(machine.store(model))
        assert running
        assert len([line for line in lines if f'model="{model}"' in line and running.release in line]) == 1
    assert len(lines) == len(VARIANTS)
    assert reply.text.count("# TYPE vllm:time_to_first_token_seconds histogram") == 1


@pytest.mark.parametrize("killed", ["the process", "Envoy"])
def test_what_is_killed_is_there_again_and_leaves_nothing_behind(machine: Machine, killed: str) -> None:
    pid = machine.process()
    assert pid
    below = psutil.Process(pid).children(recursive=True)
    envoys = [process for process in below if "envoy" in process.name()]
    assert len(envoys) == 1
    os.kill(pid if killed == "the process" else envoys[0].pid, signal.SIGKILL)
    wait_until(lambda: not living(below), "the end of what it had started")
    machine.wait_for(*VARIANTS)
    assert machine.process() not in (None, pid)


def test_an_address_that_others_of_the_store_do_not_have_is_refused(machine: Machine) -> None:
    machine.stop("org/chat")
    with reserved_port("127.0.0.1", 0) as another:
        refused = machine.stage("org/chat", "--foreground", shared_port=another)
    assert refused.returncode == 42, refused.stderr
    assert f'"shared_port":{machine.port}' in refused.stderr
    assert machine.stage("org/chat").returncode == 0
    machine.wait_for(*VARIANTS)


@pytest.mark.parametrize("used", ["port", "metrics_port"])
def test_a_port_that_something_else_uses_is_refused_before_a_server_starts(tmp_path: Path, used: str) -> None:
    place = Machine(tmp_path / "store")
    publish(place.store("org/chat"), 1, stand_in_variant(place.store("org/chat"), "fp16"))
    with socket.create_server(("127.0.0.1", getattr(place, used))):
        refused = place.stage("org/chat", "--foreground")
    assert refused.returncode == 32
    assert f"port {getattr(place, used)} on 127.0.0.1 is in use" in refused.stderr


def test_top_shows_requests_as_they_run_by_release_and_client(machine: Machine) -> None:
    stream = iter(
        machine.client(machine.key).completions.create(model="org/code", prompt="x", max_tokens=600, stream=True)
    )
    next(stream)
    command = [sys.executable, "-m", "pipeline", "top", "--every", "1", "--store", str(machine.root)]
    seen = json.loads(ended([*command, "--json"], os.environ).stdout)
    releases, clients = (
        {row["model"]: row for row in seen[kind] if row.get("client", "first") == "first"} for kind in seen
    )
    assert [*releases] == [*VARIANTS]
    assert 20 < releases["org/code"]["tokens_out_per_s"] <= 60
    assert releases["org/chat"]["tokens_out_per_s"] == 0
    assert releases["org/code"]["up"] == "1/1"
    assert clients["org/code"]["at_once"] == 1
    printed = ended([*command, "--once"], os.environ).stdout
    assert "tokens out/s" in printed
    assert "org/search" in printed
    assert len([event for event in stream if event.choices]) == 599
    wait_until(lambda: _client_row(machine)["tokens_out_per_min"] >= 600, "the end of the request")
    assert _client_row(machine)["at_once"] == 0


def _client_row(machine: Machine) -> dict[str, Any]:
    (row,) = (
        row
        for row in ActivityReader(machine.root).look()["clients"]
        if (row["model"], row["client"]) == ("org/code", "first")
    )
    return row


def test_a_model_that_stops_takes_nobody_elses_answers_along(machine: Machine) -> None:
    """One that is started again is unavailable meanwhile, one that was stopped is unknown; the last one takes the
    address along."""
    client = machine.client(machine.key)
    stream = iter(client.completions.create(model="org/code", prompt="x", max_tokens=400, stream=True))
    next(stream)
    process, running = machine.process(), endpoint(machine.store("org/chat"))
    assert running
    os.kill(running.pid, signal.SIGKILL)
    with pytest.raises(openai.InternalServerError) as away:
        wait_until(lambda: not client.completions.create(model="org/chat", prompt="x"), "the end of the model")
    assert away.value.status_code == 503
    assert away.value.response.headers["retry-after"]
    machine.stop("org/chat")
    machine.wait_for("org/code", "org/search")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="org/chat", prompt="x")
    assert len([event for event in stream if event.choices]) == 399
    assert machine.process() == process
    machine.stop("org/code", "org/search")
    wait_until(lambda: machine.process() is None, "the end of the address")
    with reserved_port("127.0.0.1", machine.port):
        pass
