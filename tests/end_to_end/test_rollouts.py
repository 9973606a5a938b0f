"""Releases of the demo's variants, rolled out through the command line while clients ask all the time.

The one that the pipeline chose is being served. Beside it come one whose weights were damaged after it was measured,
which answers fluently and wrongly; one that refuses some chats; one that fails some requests; one that answers as
measured, and slowly; and a good one, by another run of the pipeline, under bursts of load. Then traffic goes back and
forth. Real vLLM servers, and Envoy before them.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from stages.parts.base.errors import RolledBack
from stages.parts.base.files import place_tree, write_json
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import Endpoint, endpoint
from stages.parts.records.drills import Answers, Drill
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.rollout import Counters, Journal, read_journal
from stages.parts.records.variant import VARIANT
from stages.parts.releases.release import PROBES, current_release
from stages.parts.vllm.client import Access
from stages.rollout.one_machine import OneMachine
from stages.rollout.scene import SteadyLoad, answers
from tests.end_to_end.command_line import (
    API_KEY,
    CONFIG,
    MODEL,
    TOKEN,
    VARIANTS,
    Pipeline,
    command_lines,
    processes_naming,
)
from tests.failing_requests import RELEASE
from tests.flawed_models import REFUSE, damage, slow_down, when_asked
from tests.mixed_requests import clients as clients_of
from tests.routes import unexpected_answers
from tests.serving import wait_until

pytestmark = pytest.mark.e2e
USERS, PAUSE_S = 2, 4.0
"""The users come once the canary is up; until then there is one, who pauses. vLLM's worker keeps a core busy for a
second after each request: with more, two cores would have little left to start another server with."""
ROLLBACK_LIMIT_S = 30.0
# Servers, proxy and clients share two cores: a good canary's figures differ by more than the defaults allow.
ROLLOUT = {
    "steps": "[50,100]",
    "step_s": "20",
    "min_requests": "20",
    "step_timeout_s": "480",
    "ttft_ratio": "3",
    "ttft_slack_ms": "500",
    "tpot_ratio": "3",
    "tpot_slack_ms": "50",
}
SETTINGS = (*CONFIG, *(text for name, value in ROLLOUT.items() for text in ("--set", f"rollout.{name}={value}")))
STRICT = ("--set", "rollout.tpot_ratio=1.5", "--set", "rollout.tpot_slack_ms=1")
WAITED = ("time to first token", "time per output token")
"""Whichever of them shows it first."""
BURST, CALM_S = 6, 8.0
"""That many users ask together and then pause."""
QUESTION = "a question that one template refuses"
SMALL = """
name: small
weights: {quality: 0, latency: 0, throughput: 0, memory: 1}
"""


@dataclass(frozen=True)
class Tried:
    """One rollout, and what clients saw meanwhile."""

    said: subprocess.CompletedProcess[str]
    journal: Journal
    clients: Answers
    left: Endpoint
    """The endpoint after it."""


def tried(pipeline: Pipeline, *command: str, users: int = USERS, pause_s: float = 0.0) -> Tried:
    with ThreadPoolExecutor(1) as pool, clients(pipeline, 1, PAUSE_S) as first:
        call = pool.submit(pipeline.call, *command)
        wait_until(lambda: call.done() or moving(pipeline.store), "the canary", 300)
        with clients(pipeline, users, pause_s) as more:
            said = call.result()
    journal = read_journal(pipeline.store)
    assert journal
    replies = [*first.replies(), *more.replies()]
    return Tried(said, journal, answers(replies), existing(pipeline.store))


def moving(store: ModelStore) -> bool:
    journal = read_journal(store)
    return journal is not None and journal.state in ("shifting", "observing")


def clients(pipeline: Pipeline, users: int, pause_s: float = 0.0) -> SteadyLoad:
    access = Access(existing(pipeline.store).url, MODEL, API_KEY)
    return SteadyLoad(access, users, (16, 16), pause_s)


def existing(store: ModelStore) -> Endpoint:
    found = endpoint(store)
    assert found
    return found


def imitation(store: ModelStore, number: int, variant: str, change: Callable[[Path], None]) -> str:
    """A release of *variant*, with the answers that were recorded of it, whose files were changed afterwards."""
    source, name = store.optimized(variant), f"{number:04d}-{variant}-{'0' * 12}"
    folder = store.releases / name
    place_tree(source, folder, [path.name for path in source.iterdir()])
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.json")]:  # of its own: they were links
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    change(folder)
    evaluation = Evaluation.read(store.evaluation(variant))
    assert evaluation
    write_json(folder / PROBES, [each.model_dump(mode="json") for each in evaluation.probes])
    return name


@contextmanager
def chatting(pipeline: Pipeline) -> Iterator[None]:
    """A client that chats, and asks every second time what one template refuses."""
    over = threading.Event()

    def chat() -> None:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        for question in itertools.cycle(("Hello", QUESTION)):
            if over.wait(0.5):
                return
            asked = {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 1}
            with suppress(httpx.HTTPError):
                url = f"{existing(pipeline.store).url}/v1/chat/completions"
                httpx.post(url, json=asked, headers=headers, timeout=60, trust_env=False)

    client = threading.Thread(target=chat)
    client.start()
    try:
        yield
    finally:
        over.set()
        client.join()


@pytest.fixture(scope="module")
def stable(pipeline: Pipeline, finished: dict[str, Any]) -> str:
    return str(finished["decision"]["release"])


@pytest.fixture(scope="module")
def garbage(pipeline: Pipeline, stable: str) -> Tried:
    """Copies of requests would come first."""
    name = imitation(pipeline.store, 101, VARIANTS[1], damage)
    copies = ("--set", "rollout.mirror={percent: 100, duration_s: 20}")
    return tried(pipeline, "rollout", "start", MODEL, "--release", name, *SETTINGS, *copies)


@pytest.fixture(scope="module")
def refusing(pipeline: Pipeline, garbage: Tried) -> Tried:
    name = imitation(pipeline.store, 103, "fp16", lambda folder: when_asked(folder, QUESTION, REFUSE))
    with chatting(pipeline):
        return tried(pipeline, "rollout", "start", MODEL, "--release", name, *SETTINGS)


@pytest.fixture(scope="module")
def failing(pipeline: Pipeline, refusing: Tried) -> Tried:
    name = imitation(pipeline.store, 104, "fp16", lambda _: None)
    assert name.startswith(RELEASE)
    return tried(pipeline, "rollout", "start", MODEL, "--release", name, *SETTINGS)


@pytest.fixture(scope="module")
def slow(pipeline: Pipeline, failing: Tried) -> Tried:
    name = imitation(pipeline.store, 102, "fp16", slow_down)
    return tried(pipeline, "rollout", "start", MODEL, "--release", name, *SETTINGS, *STRICT)


@pytest.fixture(scope="module")
def good(pipeline: Pipeline, slow: Tried, finished: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Tried:
    """Release the smallest of the variants not served yet, by a run of the pipeline that measures nothing anew."""
    profile = tmp_path_factory.mktemp("profile") / "small.yaml"
    profile.write_text(SMALL)
    served = finished["decision"]["winner"]
    left = ",".join(name for name in VARIANTS if name == "fp16" or name != served)
    chosen = ("--profile", str(profile), "--set", f"optimize.variants=[{left}]", "--force-publish")
    command = ("run", MODEL, *SETTINGS, *chosen, "--json")
    return tried(pipeline, *command, users=BURST, pause_s=CALM_S)


@pytest.fixture(scope="module")
def counted(pipeline: Pipeline, good: Tried) -> Counters:
    served = AskedServing.model_validate(good.left.serving)
    return OneMachine(pipeline.store, MODEL, served).counters(good.left.release)


@pytest.fixture(scope="module")
def drilled(pipeline: Pipeline, counted: Counters) -> Drill:
    said = pipeline.call("drill", "rollback", MODEL, *SETTINGS, "--json")
    assert said.returncode == 0, said.stderr
    (drill,) = json.loads(said.stdout)["drills"]
    return Drill.model_validate(drill)


def no_client_noticed(tried: Tried, releases: Iterable[str]) -> None:
    assert (tried.clients.failed, tried.clients.errors) == (0, ())
    assert set(tried.clients.releases) == set(releases)


def test_a_release_that_answers_wrongly_never_gets_a_request_and_is_withdrawn(garbage: Tried, stable: str) -> None:
    assert garbage.said.returncode == RolledBack.exit_code, garbage.said.stderr
    assert "agree with the recorded ones" in garbage.said.stderr
    assert (garbage.journal.state, garbage.journal.kind) == ("rolled back", "rollout")
    assert (garbage.journal.steps[0], garbage.journal.observed) == (0, ())
    assert (garbage.left.release, garbage.left.canary) == (stable, None)
    no_client_noticed(garbage, [stable])


def test_a_release_that_refuses_what_clients_ask_is_rolled_back(refusing: Tried, stable: str) -> None:
    assert refusing.said.returncode == RolledBack.exit_code, refusing.said.stderr
    assert "clients' requests were refused" in refusing.journal.reason
    assert "nothing showed" not in refusing.journal.reason
    assert (refusing.left.release, refusing.left.canary) == (stable, None)


def test_a_release_that_fails_some_requests_is_rolled_back(failing: Tried, stable: str) -> None:
    assert failing.said.returncode == RolledBack.exit_code, failing.said.stderr
    assert "requests failed" in failing.journal.reason
    assert [each.percent for each in failing.journal.transitions if each.state == "observing"] == [50]
    assert (failing.left.release, failing.left.canary) == (stable, None)
    assert failing.clients.failed


def test_a_slow_release_is_rolled_back_by_what_its_clients_waited(slow: Tried, stable: str) -> None:
    assert slow.said.returncode == RolledBack.exit_code, slow.said.stderr
    assert any(each in slow.journal.reason for each in WAITED)
    assert "nothing showed" not in slow.journal.reason
    assert [each.percent for each in slow.journal.transitions if each.state == "observing"] == [50]
    assert (slow.left.release, slow.left.canary) == (stable, None)
    no_client_noticed(slow, [stable, slow.journal.release])


def test_a_good_release_is_promoted_step_by_step_under_bursts_of_load(
    pipeline: Pipeline, good: Tried, stable: str
) -> None:
    assert good.said.returncode == 0, good.said.stderr
    decision = json.loads(good.said.stdout)["decision"]
    assert decision["release"] == good.journal.release != stable
    assert good.journal.state == "promoted"
    assert [each.percent for each in good.journal.transitions if each.state == "observing"] == [50, 100]
    assert (good.left.release, good.left.standby) == (good.journal.release, stable)
    assert current_release(pipeline.store) == good.journal.release
    assert (pipeline.store.production / VARIANT).exists()
    no_client_noticed(good, [stable, good.journal.release])


def test_vllms_own_metrics_are_understood(counted: Counters, good: Tried) -> None:
    seen = good.clients.releases[good.journal.release]
    assert counted.answered >= seen
    assert counted.failed == 0
    assert counted.output_tokens >= 16 * seen
    assert counted.ttft_s > 0
    assert counted.tpot_s > 0
    assert counted.prompt_tokens >= 16 * seen
    assert counted.ttft[-1] >= seen
    assert counted.tpot[-1] >= seen


def test_a_rollback_under_load_takes_seconds_and_fails_no_request(
    pipeline: Pipeline, drilled: Drill, good: Tried, stable: str
) -> None:
    assert (drilled.release, drilled.figures["previous"]) == (good.journal.release, stable)
    assert drilled.figures["warm"]
    assert drilled.figures["rollback_s"] < ROLLBACK_LIMIT_S
    assert drilled.answers.failed == 0
    assert set(drilled.answers.releases) == {stable, good.journal.release}
    assert current_release(pipeline.store) == existing(pipeline.store).release == good.journal.release


def test_an_openai_client_streams_through_the_proxy(pipeline: Pipeline, drilled: Drill) -> None:
    with openai.OpenAI(base_url=f"{existing(pipeline.store).url}/v1", api_key=API_KEY) as client:
        events = client.completions.create(model=MODEL, prompt="A list", max_tokens=8, stream=True)
        assert len(list(events)) >= 2


def test_no_route_of_vllm_answers_without_the_key_but_whether_it_is_healthy(pipeline: Pipeline, drilled: Drill) -> None:
    with clients_of(pipeline.store) as keys:
        assert unexpected_answers(existing(pipeline.store).url, keys["elsewhere"]) == []


def test_the_servers_listen_on_this_machine_alone(pipeline: Pipeline, drilled: Drill) -> None:
    listening = {
        each.laddr.ip
        for process in psutil.Process(existing(pipeline.store).pid).children(recursive=True)
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::1"}


def test_no_secret_is_written_anywhere(pipeline: Pipeline, drilled: Drill) -> None:
    for path in pipeline.root.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            content = path.read_text(errors="replace")
            assert API_KEY not in content, path
            assert TOKEN not in content, path
    for line in command_lines():
        assert API_KEY not in line
        assert TOKEN not in line


def test_the_endpoint_stops_and_leaves_no_process(pipeline: Pipeline, drilled: Drill) -> None:
    ended = pipeline.call("serve", MODEL, "--stop")
    assert ended.returncode == 0, ended.stderr
    assert endpoint(pipeline.store) is None
    assert processes_naming(str(pipeline.root)) == []
