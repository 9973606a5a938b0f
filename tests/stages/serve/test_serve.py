"""The endpoint: what it serves, that it stays up, and that nothing is left when it is stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionMessage

from stages.parts.base.errors import Interrupted, ServerFailed
from stages.parts.base.files import write_json
from stages.parts.base.program import OUTPUTS_VARIABLE, RUN_VARIABLE, outcomes
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.endpoint import supervised_server
from stages.parts.endpoint.clients import OWN, UNATTRIBUTED
from stages.parts.endpoint.endpoint import WANTED, Endpoint, Wanted, endpoint
from stages.parts.endpoint.supervisor import supervise
from stages.parts.records.rollout import journal_path, read_journal
from stages.parts.releases.release import METRICS
from stages.parts.vllm.client import A_TOOL, answer, credentials, healthy
from stages.rollout.one_machine import OneMachine
from tests.campaign.faults import small_disk
from tests.mixed_requests import check_usage, clients, sums_since
from tests.routes import unexpected_answers
from tests.serving import (
    MODEL,
    ROLLOUT,
    SERVING,
    STAND_IN,
    Said,
    arguments_of,
    environment,
    living,
    processes_with,
    publish,
    stage,
    stand_in_variant,
    variant_of,
    wait_until,
)
from tests.tool_models import calling, qwen_like

API_KEY = "key-that-nobody-may-see"
OFFER: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What time is it in Oslo?"}],
    "tools": [A_TOOL],
    "tool_choice": "auto",
    "max_tokens": 8,
}
HASTY = {"HEALTH_INTERVAL_S": 0.3, "UNHEALTHY_CHECKS": 2, "CRASHES": 2, "STABLE_S": 60, "FIRST_PAUSE_S": 0.1}
"""When a server is restarted, and when it is given up."""


def serve(store: ModelStore, *arguments: str, serving: Any = None, **variables: str) -> Said:
    flags = ["--serving", json.dumps(SERVING | (serving or {})), "--rollout", json.dumps(ROLLOUT), *arguments]
    return stage("serve", *flags, variables=environment(store, stand_in=True, **variables))


def server_of(store: ModelStore) -> list[psutil.Process]:
    """vLLM (or its stand-in) on a release of this store, with its guard and everything below."""
    return processes_with(str(store.releases))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ModelStore]:
    place = ModelStore(tmp_path / "store", MODEL)
    yield place
    if place.path.exists():
        serve(place, "--stop")
    assert not living(server_of(place)), "a server is left"


def test_without_a_published_release_there_is_nothing_to_serve(store: ModelStore) -> None:
    said = serve(store)
    assert said.returncode == 33
    assert f"slipway run {MODEL}" in said.stderr


def test_a_link_to_a_release_that_is_gone_is_nothing_to_serve(store: ModelStore) -> None:
    store.path.mkdir(parents=True)
    store.production.symlink_to("releases/0001-fp16-0123456789ab")
    assert serve(store).returncode == 33


def test_the_endpoint_outlives_the_stage_and_a_second_call_finds_it(store: ModelStore, tmp_path: Path) -> None:
    release = publish(store, 1, stand_in_variant(store, "fp16"))
    first = serve(store, **{RUN_VARIABLE: "run-1", OUTPUTS_VARIABLE: str(tmp_path / "outputs")})
    assert first.returncode == 0, first.stderr
    found = endpoint(store)
    assert found
    assert (found.model, found.release, found.protected) == (MODEL, release, False)
    assert first.stdout.strip() == found.url == (tmp_path / "outputs" / "url").read_text()
    assert healthy(found.url)
    second = serve(store, **{RUN_VARIABLE: "run-1"})
    assert second.stdout == first.stdout
    assert "reused: already serving" in second.stderr
    assert endpoint(store) == found
    assert [each.result for each in outcomes(store.run("run-1"))] == ["reused"]


def test_a_rollout_interrupted_after_its_promotion_is_ended_by_the_next_serve(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16"))
    assert serve(store).returncode == 0
    before, served = read_journal(store), endpoint(store)
    assert before
    write_json(journal_path(store), before.model_copy(update={"state": "promoting"}))
    assert serve(store).returncode == 0
    after = read_journal(store)
    assert after
    assert (after.id, after.state) == (before.id, "promoted")
    assert endpoint(store) == served


def test_the_release_is_served_by_its_own_path_and_not_through_the_link(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16"))
    assert serve(store).returncode == 0
    assert server_of(store)
    assert not processes_with(str(store.production))


def test_another_release_is_rolled_out_beside_the_served_one(store: ModelStore) -> None:
    old = publish(store, 1, stand_in_variant(store, "fp16", token_s=0.01))
    assert serve(store).returncode == 0
    before = endpoint(store)
    new = publish(store, 2, stand_in_variant(store, "awq", token_s=0.01, another="model"))
    said = serve(store)
    assert said.returncode == 0, said.stderr
    after = endpoint(store)
    assert before
    assert after
    assert (after.pid, after.url) == (before.pid, before.url)
    assert (before.release, after.release, after.canary, after.standby) == (old, new, None, old)
    assert {each.release: each.state for each in after.servers} == {old: "up", new: "up"}


@pytest.mark.parametrize("change", ["serving", pytest.param("api key", marks=pytest.mark.slow)])
def test_another_setting_or_key_replaces_the_endpoint(store: ModelStore, change: str) -> None:
    publish(store, 1, stand_in_variant(store, "fp16"))
    assert serve(store).returncode == 0
    before = endpoint(store)
    assert before
    old = [psutil.Process(before.pid), *server_of(store)]
    if change == "serving":
        said = serve(store, serving={"max_model_len": 512})
    else:
        said = serve(store, SLIPWAY_API_KEY=API_KEY)
    assert said.returncode == 0, said.stderr
    after = endpoint(store)
    assert after
    assert after.pid != before.pid
    assert not living(old)
    assert after.release == store.production.readlink().name
    assert after.protected == (change == "api key")


def test_settings_that_cannot_be_served_leave_what_was_served_before_with_its_key(store: ModelStore) -> None:
    release = publish(store, 1, stand_in_variant(store, "fp16"))
    assert serve(store, SLIPWAY_API_KEY=API_KEY).returncode == 0
    before = endpoint(store)
    said = serve(store, serving={"max_model_len": 4096}, SLIPWAY_API_KEY="another key")
    assert said.returncode == 30
    error, hint = said.stderr.splitlines()[-2:]
    assert "max_model_len (4096) is greater than 1024" in error
    assert error.endswith(f"{release} is served again as before")
    assert "max_model_len (4096)" in Path(hint.split()[2].rstrip(",")).read_text()
    after = endpoint(store)
    assert before
    assert after
    assert (after.release, after.serving, after.protected) == (release, before.serving, True)
    assert answer(after.url, MODEL, API_KEY) == "!"


def test_a_new_release_is_not_tried_with_settings_that_the_served_one_cannot_use(store: ModelStore) -> None:
    old = publish(store, 1, stand_in_variant(store, "fp16"))
    assert serve(store).returncode == 0
    publish(store, 2, stand_in_variant(store, "awq", another="model"))
    said = serve(store, serving={"max_model_len": 4096})
    assert said.returncode == 30
    assert f"{old} is served again as before" in said.stderr
    found = endpoint(store)
    assert found
    assert (found.release, found.canary, found.serving["max_model_len"]) == (old, None, 1024)


@pytest.mark.slow
def test_a_fixed_port_is_used_again_by_the_next_endpoint(store: ModelStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    publish(store, 1, stand_in_variant(store, "fp16"))
    assert serve(store, serving={"port": port}).returncode == 0
    said = serve(store, serving={"port": port, "max_model_len": 512})
    assert said.stdout.strip() == f"http://127.0.0.1:{port}"


def test_a_port_in_use_is_reported_and_nothing_is_started(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = serve(store, serving={"port": taken.getsockname()[1]})
    assert said.returncode == 32
    assert "serving.port" in said.stderr
    assert endpoint(store) is None


def test_a_release_that_cannot_be_served_fails_the_stage_with_the_reason(store: ModelStore) -> None:
    release = publish(store, 1, stand_in_variant(store, "fp16", refuses="out of kernels"))
    said = serve(store)
    assert said.returncode == 30
    assert "out of kernels" in said.stderr.splitlines()[-2]
    assert f"see {store.path / 'serving' / release}.log" in said.stderr
    assert endpoint(store) is None
    assert not (store.path / "endpoint.json").exists()


def test_an_api_key_is_required_and_appears_in_no_argument_log_or_record(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16"))
    said = serve(store, SLIPWAY_API_KEY=API_KEY)
    assert said.returncode == 0
    assert httpx.get(f"{said.stdout.strip()}/v1/models").status_code == 401
    assert httpx.get(f"{said.stdout.strip()}/v1/models", headers={"Authorization": f"Bearer {API_KEY}"}).is_success
    assert not processes_with(API_KEY)
    written = [*store.path.glob("*.json"), *store.path.glob("*.log"), *store.path.glob("serving/*[!k]")]
    texts = [path.read_text() for path in written]
    assert len(texts) >= 7, "the endpoint's, Envoy's and the server's"
    assert not [text for text in [said.stdout, said.stderr, *texts] if API_KEY in text]


def test_only_one_supervisor_serves_a_model(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16"))
    assert serve(store).returncode == 0
    said = serve(store, "--foreground")
    assert said.returncode == 75
    assert f"slipway serve {MODEL} --stop" in said.stderr


def test_stopping_ends_everything_and_says_whether_there_was_anything(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16"))
    assert "nothing was serving" in serve(store, "--stop").stderr
    assert serve(store).returncode == 0
    family = server_of(store)
    said = serve(store, "--stop")
    assert (said.returncode, said.stderr) == (0, "stopped\n")
    assert not living(family)
    assert endpoint(store) is None
    assert not (store.path / "endpoint.json").exists()


def test_the_server_of_a_killed_supervisor_ends_and_the_endpoint_does_not_count_as_running(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16"))
    assert serve(store).returncode == 0
    found, family = endpoint(store), server_of(store)
    assert found
    os.kill(found.pid, signal.SIGKILL)
    wait_until(lambda: not living(family), "the server's end")
    assert (store.path / "endpoint.json").exists()
    assert endpoint(store) is None
    again = serve(store)
    assert "done: serving" in again.stderr


def test_a_server_that_dies_while_the_disk_is_full_is_restarted_and_answers(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as change:
        if change is None:
            pytest.skip("needs the right to mount a small file system")
        store = ModelStore(tmp_path / "disk" / "store", MODEL)
        publish(store, 1, stand_in_variant(store, "fp16"))
        assert serve(store).returncode == 0
        try:
            found = endpoint(store)
            assert found
            change(f"size={shutil.disk_usage(tmp_path / 'disk').used}")
            (server,) = [each for each in server_of(store) if each.children() == []]
            server.kill()
            wait_until(lambda: not living([server]), "the server's end")
            wait_until(lambda: healthy(found.url), "another one")
            assert psutil.pid_exists(found.pid)
        finally:
            change("size=1g")
            serve(store, "--stop")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_endpoint_interrupted_while_it_starts_leaves_nothing(
    store: ModelStore, number: signal.Signals, status: int
) -> None:
    publish(store, 1, stand_in_variant(store, "fp16", never_ready=True))
    command = [sys.executable, "-m", "stages.serve", "--model", MODEL, "--serving", json.dumps(SERVING)]
    with subprocess.Popen(command, env=environment(store, stand_in=True)) as process:
        family = wait_until(lambda: server_of(store), "the server's start")
        process.send_signal(number)
        assert process.wait(60) == status
    assert not living(family)
    assert endpoint(store) is None


def test_in_the_foreground_ctrl_c_ends_successfully(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16"))
    command = [sys.executable, "-m", "stages.serve", "--foreground", "--model", MODEL, "--serving", json.dumps(SERVING)]
    with subprocess.Popen(command, env=environment(store, stand_in=True)) as process:
        found: Endpoint = wait_until(lambda: endpoint(store), "the endpoint")
        assert found.pid == process.pid
        family = server_of(store)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert not living(family)


@pytest.mark.parametrize(
    ("behaviour", "limits", "message"),
    [
        (
            {"ends_when_checked": True},
            HASTY | {"UNHEALTHY_CHECKS": 1000},
            "vLLM failed 3 times in a row; the last failure: vLLM ended: RuntimeError: out of luck",
        ),
        (
            {"ends_when_checked": "engine", "engine": "sleep 1000"},
            HASTY | {"UNHEALTHY_CHECKS": 1000},
            "vLLM failed 3 times in a row; the last failure: vLLM's EngineCore was ended by SIGKILL while it served",
        ),
        ({"unhealthy": True}, HASTY, "vLLM failed 3 times in a row; .* failed 2 health checks in a row"),
    ],
    ids=["dies", "loses its engine", "hangs"],
)
def test_a_server_that_dies_or_hangs_is_restarted_but_not_for_ever(
    store: ModelStore,
    behaviour: dict[str, object],
    limits: dict[str, float],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    for name, limit in limits.items():
        monkeypatch.setattr(supervised_server, name, limit)
    release = publish(store, 1, stand_in_variant(store, "fp16", **behaviour))
    Wanted(stable=release).write(store.path / WANTED)
    with pytest.raises(ServerFailed, match=message):
        supervise(store, Serving.model_validate(SERVING))
    said = capsys.readouterr().err
    assert said.count(f"{release} is up") == 3
    assert said.count("/v1") == 1, "clients keep their address"
    assert "restarting it in 0.1 s (failure 1 in a row)" in said
    assert "restarting it in 0.2 s (failure 2 in a row)" in said


@pytest.mark.slow
def test_old_crashes_of_a_server_that_was_healthy_for_long_do_not_count(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    Wanted(stable=publish(store, 1, stand_in_variant(store, "fp16", ends_when_checked=True))).write(store.path / WANTED)
    for name, limit in (HASTY | {"UNHEALTHY_CHECKS": 1000, "CRASHES": 1, "STABLE_S": 0.01}).items():
        monkeypatch.setattr(supervised_server, name, limit)
    said = ""

    def look(number: int, _: object) -> None:
        nonlocal said
        said += capsys.readouterr().err
        if said.count("(failure 1 in a row)") >= 2:
            raise Interrupted("enough")
        signal.setitimer(signal.ITIMER_REAL, 0.5)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Interrupted):
            supervise(store, Serving.model_validate(SERVING))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Served:
    store: ModelStore
    endpoint: Endpoint


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model with tools, served by the real vLLM under an API key."""
    store = ModelStore(tmp_path_factory.mktemp("served") / "store", MODEL)
    release = publish(store, 1, variant_of(store, "fp16", qwen_like(tmp_path_factory.mktemp("model") / "qwen")))
    measured = {"prompt_tokens_per_s": 100, "workload": {"slo": {"ttft_ms": 1000, "tpot_ms": 100}}}
    (store.releases / release / METRICS).write_text(json.dumps(measured))
    variables = environment(store, SLIPWAY_API_KEY=API_KEY)
    said = stage("serve", "--serving", json.dumps(SERVING), variables=variables)
    assert said.returncode == 0, said.stderr
    found = endpoint(store)
    assert found
    yield Served(store, found)
    family = server_of(store)
    stopped = stage("serve", "--stop", variables=variables)
    assert (stopped.returncode, stopped.stderr) == (0, "stopped\n")
    assert len(family) >= 4, "the guard, vLLM's API server, engine and worker"
    assert not living(family)


@pytest.mark.slow
@pytest.mark.e2e
def test_an_openai_client_gets_a_chat_completion(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.endpoint.url}/v1", api_key=API_KEY) as client:
        reply = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "What is a list?"}], max_tokens=8
        )
        assert reply.usage
        assert 1 <= reply.usage.completion_tokens <= 8
        assert [model.id for model in client.models.list()] == [MODEL]


@pytest.mark.slow
@pytest.mark.e2e
def test_an_openai_client_offers_tools_to_a_model_that_writes_calls_as_qwen_does(served: Served) -> None:
    offer_tools(served.endpoint)
    with openai.OpenAI(base_url=f"{served.endpoint.url}/v1", api_key=API_KEY) as client:
        events = client.chat.completions.create(**OFFER, stream=True)
        assert [each for event in events for each in event.choices if each.finish_reason]


@pytest.mark.slow
@pytest.mark.e2e
def test_an_openai_client_gets_a_call_of_a_tool_from_a_model_that_writes_it_as_llama_does(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store", MODEL)
    publish(store, 1, variant_of(store, "fp16", calling(tmp_path / "model")))
    variables = environment(store, SLIPWAY_API_KEY=API_KEY)
    said = stage("serve", "--serving", json.dumps(SERVING), variables=variables)
    try:
        assert said.returncode == 0, said.stderr
        found = endpoint(store)
        assert found
        calls = [call.function for call in offer_tools(found).tool_calls or () if call.type == "function"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("get_time", {"city": "Oslo"})]
    finally:
        stage("serve", "--stop", variables=variables)


def offer_tools(served: Endpoint) -> ChatCompletionMessage:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=API_KEY) as client:
        reply = client.chat.completions.create(**OFFER)
    assert reply.choices[0].finish_reason in ("length", "stop", "tool_calls")
    assert reply.usage
    assert reply.usage.prompt_tokens > 50, "the model was shown the tools"
    return reply.choices[0].message


@pytest.mark.slow
@pytest.mark.e2e
def test_what_2000_mixed_requests_used_is_what_vllm_counted(served: Served) -> None:
    before = datetime.now(UTC) - timedelta(hours=1)
    sums = check_usage(served.store, 2000)
    print({name: each.model_dump(exclude={"group"}) for name, each in sums.items()})
    assert sums["mixed"].requests > 1000
    assert sums[UNATTRIBUTED].output_tokens > 0
    assert sums_since(served.store, before)[OWN].requests == 3, "the completions that showed that it is up"


@pytest.mark.slow
@pytest.mark.e2e
def test_what_vllm_cannot_read_in_time_is_refused_at_once_and_the_rollout_counts_it(served: Served) -> None:
    release, target = served.endpoint.release, OneMachine(served.store, MODEL, Serving())
    before = target.counters(release)

    def ask(number: int) -> httpx.Response:
        body = {"model": MODEL, "prompt": random.Random(number).choices(range(100, 1000), k=600), "max_tokens": 1}
        url = f"{served.endpoint.url}/v1/completions"
        return httpx.post(url, json=body, headers=credentials(API_KEY), timeout=60)

    assert ask(0).status_code == 200
    with ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(ask, range(1, 65)))
    refused = [each for each in replies if each.status_code == 503]
    assert {each.status_code for each in replies} == {200, 503}
    assert {each.headers["retry-after"] for each in refused} == {"2"}
    assert {each.json()["error"]["code"] for each in refused} == {503}, "vLLM's own answer, not Envoy's"
    done = target.counters(release).since(before)
    assert (done.failed, done.answered) == (len(refused), 65 - len(refused))


@pytest.mark.slow
@pytest.mark.e2e
def test_no_route_of_vllm_answers_without_the_key_but_whether_it_is_healthy(served: Served) -> None:
    with clients(served.store) as keys:
        assert unexpected_answers(served.endpoint.url, keys["elsewhere"]) == []


@pytest.mark.slow
@pytest.mark.e2e
def test_vllm_requires_the_key_and_shows_it_nowhere(served: Served) -> None:
    with (
        openai.OpenAI(base_url=f"{served.endpoint.url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    assert not processes_with(API_KEY)
    (text,) = [path.read_text() for path in (served.store.path / "serving").glob("*.log")]
    log = text + Path(served.endpoint.log).read_text()
    assert "Starting vLLM server" in log
    assert API_KEY not in log


@pytest.mark.slow
@pytest.mark.e2e
def test_when_vllm_is_killed_the_endpoint_answers_again_at_the_same_address(served: Served) -> None:
    (api_server,) = [each for each in server_of(served.store) if arguments_of(each)[1:2] == ["-m"]]
    api_server.kill()
    wait_until(lambda: endpoint(served.store) not in (None, served.endpoint), "the death")
    assert not healthy(served.endpoint.url)
    wait_until(lambda: healthy(served.endpoint.url), "the restart")
    with openai.OpenAI(base_url=f"{served.endpoint.url}/v1", api_key=API_KEY) as client:
        assert client.completions.create(model=MODEL, prompt="A list", max_tokens=2).choices
    said = "API server was ended by SIGKILL while it served LlamaForCausalLM; restarting it in 1 s (failure 1 in a row)"
    assert said in Path(served.endpoint.log).read_text()
    found = endpoint(served.store)
    assert found
    assert (found.pid, found.url) == (served.endpoint.pid, served.endpoint.url)
