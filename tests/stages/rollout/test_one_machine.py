"""Stable and canary on one machine: the real Envoy and supervisor, stand-in servers, and clients that keep asking."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from stages.parts.base.errors import ConfigError, Conflict, Degraded, ServerFailed, TransientError
from stages.parts.base.files import write_json
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import STORE_VARIABLE, ModelStore
from stages.parts.base.workload import Workload
from stages.parts.endpoint.endpoint import API_KEY_VARIABLE, SERVERS, WANTED, Endpoint, Wanted, endpoint, stop
from stages.parts.endpoint.envoy import ROUTER, Admin
from stages.parts.endpoint.routing import Backend, routing
from stages.parts.endpoint.supervised_server import PREVIOUS, rotate_log
from stages.parts.records.rollout import journal_path
from stages.parts.records.watch import FILE, Looks, seen
from stages.parts.releases.release import METRICS, Split, current_release
from stages.parts.vllm.arguments import BINDING, ONE_THREAD, core_binding, serves_on_gpu
from stages.parts.vllm.client import RELEASE_HEADER, Access, http
from stages.parts.vllm.prometheus import read_counters
from stages.parts.vllm.server_log import ServerLog
from stages.rollout import drills
from stages.rollout.commands import abort
from stages.rollout.drills import drill_cold, drill_crash
from stages.rollout.one_machine import OneMachine
from stages.rollout.resume import begin
from stages.rollout.scene import Scene, SteadyLoad
from stages.rollout.slices import send_pairs
from tests.serving import (
    MODEL,
    REPOSITORY,
    SERVING,
    STAND_IN,
    living,
    processes_with,
    publish,
    stand_in_variant,
    wait_until,
)
from tests.webhook import hook

WORKLOAD = Workload(
    name="small",
    prompt_tokens=4,
    output_tokens=8,
    concurrency=4,
    quality_tasks=("none",),
)


class Place:
    """A store, and this machine as the target of its rollouts."""

    def __init__(self, root: Path) -> None:
        self.store = ModelStore(root / "store", MODEL)
        self.target = self.with_settings()

    def with_settings(self, **changed: Any) -> OneMachine:
        return OneMachine(self.store, MODEL, Serving.model_validate(SERVING | changed))

    def release(self, number: int, **behaviour: Any) -> str:
        return publish(self.store, number, stand_in_variant(self.store, f"fp16-{number}", **behaviour))

    def two_releases(self, **canary: Any) -> tuple[str, str]:
        """One that is served, and one that is up beside it."""
        old, new = self.release(1, token_s=0.01), self.release(2, **{"token_s": 0.01, **canary})
        self.target.deploy(old)
        self.target.deploy(new)
        wait_until(lambda: self.target.ready(new), "the canary")
        return old, new

    def endpoint(self) -> Endpoint:
        found = endpoint(self.store)
        assert found
        return found

    def load(self, users: int = 6, tokens: int = 20) -> SteadyLoad:
        access = Access(self.endpoint().url, MODEL)
        return SteadyLoad(access, users, (4, tokens))

    def ask(self, count: int = 1, **body: Any) -> list[httpx.Response]:
        url = f"{self.endpoint().url}/v1/completions"
        with httpx.Client(timeout=60) as client:
            return [client.post(url, json={"model": MODEL, "prompt": "x"} | body) for _ in range(count)]

    def answering(self, count: int) -> list[str]:
        """Which release answered each of so many requests."""
        return [each.raise_for_status().headers[RELEASE_HEADER] for each in self.ask(count)]

    def cores(self, release: str) -> str:
        """The cores that the threads of its server are bound to, as ``core_binding`` says it."""
        server = self.endpoint().server(release)
        assert server
        (process,) = psutil.Process(server.pid).children()
        given = process.environ()
        return given.get(BINDING) or (ONE_THREAD if given["OMP_NUM_THREADS"] == "1" else "")

    def kill_server(self, release: str, *, back_after: Path | None = None) -> None:
        """Args: back_after: the server does not come up again before this file exists."""
        if back_after:
            behaviour = self.store.releases / release / "behaviour.json"
            told = json.loads(behaviour.read_text()) | {"starts_after": str(back_after)}
            behaviour.unlink()  # it is shared with the source
            behaviour.write_text(json.dumps(told))
        server = self.endpoint().server(release)
        assert server
        for process in psutil.Process(server.pid).children():
            process.kill()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    made = Place(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), str(REPOSITORY)]))
    monkeypatch.setenv(STORE_VARIABLE, str(made.store.root))
    yield made
    family = processes_with(str(made.store.path))
    stop(made.store)
    assert not living(family), "something is left"


def test_no_request_fails_while_traffic_moves_is_promoted_rolled_back_and_withdrawn(place: Place) -> None:
    old, new = place.two_releases()
    target = place.target
    with place.load() as load:
        for percent in [*range(5, 100, 5), 100, 0, 100, 0, 50]:
            target.shift(new, percent)
        target.promote(new)
        assert target.split() == Split(new, standby=old)
        target.deploy(old)  # a rollback: it stands by
        assert target.ready(old)
        target.shift(old, 100)
        target.promote(old)
        target.withdraw(new)
        assert target.split() == Split(old)
        wait_until(lambda: place.endpoint().server(new) is None, "the withdrawn server's end")
        wait_until(lambda: load.replies()[-1].release == old, "the stable release's answers")
    replies = load.replies()
    assert load.failed() == []
    assert {each.release for each in replies} == {old, new}
    assert {each.tokens for each in replies} == {20}


@pytest.mark.skipif(serves_on_gpu(), reason="a GPU has no cores to share")
def test_the_canary_and_the_stable_release_keep_their_halves_of_the_cores(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BINDING, raising=False)
    first, second = place.two_releases()
    third, target = place.release(3), place.target
    before = place.cores(first), place.cores(second)
    assert before == (core_binding(Serving(), 0), core_binding(Serving(), 1))
    target.shift(second, 100)
    target.promote(second)
    target.deploy(third)
    wait_until(lambda: target.ready(third), "the next canary")
    assert (place.cores(third), place.cores(second)) == before


@pytest.mark.slow
def test_a_split_is_in_force_as_soon_as_shift_returns(place: Place) -> None:
    old, new = place.two_releases()
    assert place.answering(20) == [old] * 20
    place.target.shift(new, 100)
    assert place.target.split() == Split(old, new, 100)
    assert place.answering(20) == [new] * 20
    place.target.shift(new, 50)
    assert 10 < place.answering(100).count(new) < 90
    place.target.shift(new, 0)
    assert place.answering(20) == [old] * 20


def test_an_answer_passes_through_token_by_token(place: Place) -> None:
    place.target.deploy(place.release(1, token_s=0.05))
    admin = Admin(place.store.path / SERVERS)
    in_flight = f"http.{ROUTER}.downstream_rq_active"
    body = {"model": MODEL, "prompt": "x", "max_tokens": 10_000, "stream": True}  # for longer than anybody waits
    with httpx.stream("POST", f"{place.endpoint().url}/v1/completions", json=body, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        texts = [json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] for _ in range(3)]
        assert texts == ["0 ", "1 ", "2 "]
        assert admin.stats(f"^{in_flight}$")[in_flight] == 1, "the rest is still to come"


def test_completions_are_counted_by_their_outcome(place: Place) -> None:
    release = place.release(1, token_s=0.002, fails_every=4)
    place.target.deploy(release)
    before = place.target.counters(release)
    statuses = [each.status_code for each in place.ask(12, max_tokens=3)]
    httpx.get(f"{place.endpoint().url}/v1/models").raise_for_status()
    after = place.target.counters(release)
    assert after.instance == before.instance
    assert after.answered - before.answered == statuses.count(200) == 9
    assert after.failed - before.failed == statuses.count(500) == 3
    assert after.output_tokens - before.output_tokens == 27
    assert after.ttft[-1] - before.ttft[-1] == 9
    assert after.ttft_s > before.ttft_s


def test_the_tokens_of_a_pair_are_timed_as_they_come(place: Place) -> None:
    release = place.release(1, token_s=0.03)
    place.target.deploy(release)
    access = Access(place.target.url(release), MODEL)
    pairs = send_pairs([access, access], ["one", "two"], 20, 0.05, 30.0)
    for each in itertools.chain(*pairs):
        assert 0.03 <= each.ttft_s < 0.4, "the first token: the last one comes after 0.48 s"
        assert 0.02 <= each.tpot_s < 0.2


def test_a_dead_canarys_share_goes_to_the_stable_release(place: Place, tmp_path: Path) -> None:
    old, new = place.two_releases()
    place.target.shift(new, 50)
    first = place.target.counters(new).instance
    with place.load() as load:
        wait_until(lambda: {each.release for each in load.replies()} == {old, new}, "answers of both")
        place.kill_server(new, back_after=tmp_path / "back")
        wait_until(lambda: place.endpoint().server(new).state != "up", "the death to be noticed")
        with pytest.raises(TransientError, match="was ended by SIGKILL"):
            place.target.counters(new)
        seen = len(load.replies())
        wait_until(lambda: len(load.replies()) > seen + 40, "further answers")
        (tmp_path / "back").touch()
        wait_until(lambda: place.target.ready(new), "the canary's restart")
        seen = len(load.replies())
        wait_until(lambda: new in {each.release for each in load.replies()[seen:]}, "the canary's answers")
    assert {each.release for each in load.failed()} <= {new}, "only what the canary had begun to answer"
    assert len(load.failed()) <= 6, "one per user"
    assert place.target.counters(new).instance != first


def test_a_request_that_a_dead_canary_had_not_answered_is_answered_by_the_stable_release(place: Place) -> None:
    old, new = place.two_releases(token_s=1)
    place.target.shift(new, 100)
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.extend(place.ask(max_tokens=100)))
    client.start()
    in_flight = f"cluster.{new}.upstream_rq_active"
    admin = Admin(place.store.path / SERVERS)
    wait_until(lambda: admin.stats(f"^{in_flight}$").get(in_flight), "the request at the canary")
    place.kill_server(new)
    client.join()
    assert [(each.status_code, each.headers[RELEASE_HEADER]) for each in answers] == [(200, old)]


@pytest.mark.slow
def test_the_standby_answers_while_the_stable_server_restarts(place: Place) -> None:
    old, new = place.two_releases()
    place.target.shift(new, 100)
    place.target.promote(new)
    drilled = drill_crash(Scene(place.store, place.target, WORKLOAD, Rollout()))
    assert drilled.release == new
    assert drilled.failures == ()
    assert drilled.figures["recovered_s"] is not None
    assert drilled.answers.releases[old] > 0
    assert drilled.answers.failed <= WORKLOAD.concurrency


def test_a_canary_that_does_not_come_up_says_why_and_leaves_the_stable_release_alone(place: Place) -> None:
    old, new = place.release(1), place.release(2, refuses="out of kernels")
    place.target.deploy(old)
    place.target.deploy(new)
    with pytest.raises(ServerFailed, match="out of kernels"):
        wait_until(lambda: place.target.ready(new), "never")
    assert place.answering(5) == [old] * 5
    place.target.withdraw(new)
    assert place.target.split() == Split(old)


def test_a_killed_supervisor_is_restarted_and_the_rollout_continues(place: Place) -> None:
    old, new = place.two_releases()
    place.target.shift(new, 25)
    before = place.endpoint()
    family = [psutil.Process(before.pid), *psutil.Process(before.pid).children(recursive=True)]
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: not living(family), "the end of all that it kept")
    assert place.target.split() == Split(old, new, 25)
    assert place.endpoint().pid != before.pid
    wait_until(lambda: place.target.ready(new), "the canary")
    place.target.promote(new)
    assert place.target.split() == Split(new, standby=old)


def test_a_promotion_that_is_not_in_force_yet_is_not_taken_back(place: Place) -> None:
    old, new = place.two_releases()
    settings = Rollout(steps=(100,), agreement=0)
    journal = begin(place.store, place.target, new, settings).changed(state="promoting")
    write_json(journal_path(place.store), journal)
    supervisor = place.endpoint().pid
    os.kill(supervisor, signal.SIGSTOP)
    try:
        Wanted(stable=new, standby=old).write(place.store.path / WANTED)  # and then the rollout was killed
        assert place.target.split() == Split(new, standby=old)
        going_on = threading.Timer(1, os.kill, (supervisor, signal.SIGCONT))
        going_on.start()
        with pytest.raises(Conflict, match="is promoted already and can't be given up"):
            abort(place.store, place.target)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert (place.endpoint().release, current_release(place.store)) == (new, new)


def test_envoy_is_restarted_with_the_same_address_and_split_if_it_dies(place: Place) -> None:
    _, new = place.two_releases()
    place.target.shift(new, 100)
    before = place.endpoint()
    (envoy,) = [each for each in psutil.Process(before.pid).children(recursive=True) if each.name() == "envoy"]
    envoy.kill()

    def answered() -> bool:
        try:
            return place.answering(1) == [new]
        except httpx.HTTPError:
            return False

    wait_until(answered, "the proxy")
    assert place.endpoint() == before


def test_an_answer_in_flight_ends_before_the_endpoint_stops(place: Place) -> None:
    place.target.deploy(place.release(1, token_s=0.2))
    body = {"model": MODEL, "prompt": "x", "max_tokens": 10, "stream": True}
    with httpx.stream("POST", f"{place.endpoint().url}/v1/completions", json=body, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        ending = threading.Thread(target=stop, args=[place.store])
        ending.start()
        assert list(lines)[-1] == "data: [DONE]"
    ending.join()
    assert endpoint(place.store) is None


def test_the_endpoint_stops_while_a_canary_still_starts(place: Place) -> None:
    old, new = place.release(1), place.release(2, token_s=1000)  # healthy, but its first answer never comes
    place.target.deploy(old)
    place.target.deploy(new)
    wait_until(lambda: processes_with(str(place.store.releases / new)), "the canary's process")
    assert stop(place.store)
    assert not processes_with(str(place.store.releases))


def test_a_second_canary_and_other_settings_are_refused(place: Place) -> None:
    _, new = place.two_releases()
    third = place.release(3)
    with pytest.raises(Conflict, match=f"{new} is being tried already"):
        place.target.deploy(third)
    with pytest.raises(Conflict, match="settings other than the present ones: max_model_len"):
        place.with_settings(max_model_len=512).deploy(new)
    for call in (lambda: place.target.shift(third, 10), lambda: place.target.promote(third)):
        with pytest.raises(Conflict, match=f"{third} is not the canary"):
            call()


def test_a_certificate_that_cannot_be_used_leaves_what_is_served(place: Place, tmp_path: Path) -> None:
    release = place.release(1)
    place.target.deploy(release)
    before = place.endpoint()
    missing = {"tls_certificate": str(tmp_path / "tls.crt"), "tls_key": str(tmp_path / "tls.key")}
    with pytest.raises(ConfigError, match="are no certificate and its key"):
        place.with_settings(**missing).deploy(release)
    with pytest.raises(ConfigError, match="in clear text"):
        place.with_settings(host="0.0.0.0").deploy(release)  # noqa: S104
    assert place.endpoint() == before


def test_a_release_is_refused_without_the_endpoint_s_key_and_the_variable_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = place.release(1), place.release(2)
    monkeypatch.setenv(API_KEY_VARIABLE, "a key")
    place.target.deploy(old)
    monkeypatch.delenv(API_KEY_VARIABLE)
    with pytest.raises(Conflict, match="settings other than the present ones: the API key") as refused:
        place.target.deploy(new)
    assert refused.value.hint == f"set {API_KEY_VARIABLE} to the key that the endpoint requires"
    assert place.target.split() == Split(old)


def test_the_stable_release_is_withdrawn_only_if_it_is_the_first_one(place: Place) -> None:
    release = place.release(1)
    place.target.deploy(release)
    with pytest.raises(Conflict, match=f"{release} is the stable release") as refused:
        place.target.withdraw(release)
    assert refused.value.hint == f"slipway rollback {MODEL}"
    assert place.answering(1) == [release]
    place.target.withdraw(release, first=True)
    assert place.target.split() == Split(None)


def test_a_server_s_log_has_no_line_for_each_request_and_is_rotated_when_it_is_long(
    place: Place, tmp_path: Path
) -> None:
    release = place.release(1)
    place.target.deploy(release)
    (arguments,) = [each.cmdline() for each in processes_with(release) if "serve" in each.cmdline()[3:5]]
    assert "--disable-uvicorn-access-log" in arguments
    log = tmp_path / "server.log"
    with log.open("ab") as server:
        server.write(b"ERROR: first\n")
        server.flush()
        said = ServerLog(log, log.stat().st_size)
        rotate_log(log, limit=100)
        assert log.read_text() == "ERROR: first\n"
        rotate_log(log, limit=10)
        server.write(b"later\n")
    assert (log.with_suffix(PREVIOUS).read_text(), log.read_text()) == ("ERROR: first\n", "later\n")
    assert said.text() == "later\n"


def test_without_an_endpoint_nothing_is_stable_and_nothing_can_be_shifted(place: Place) -> None:
    release = place.release(1)
    assert place.target.split() == Split(None)
    place.target.withdraw(release)
    with pytest.raises(Conflict, match="is not being served"):
        place.target.shift(release, 10)
    with pytest.raises(TransientError, match="is not being served"):
        place.target.counters(release)


def test_a_cold_start_is_timed_by_its_parts_and_judged_by_what_was_measured(place: Place) -> None:
    release = place.release(1, token_s=0.01)
    place.target.deploy(release)
    result = drill_cold(Scene(place.store, place.target, WORKLOAD, Rollout()))
    figures = result.figures
    assert (result.failures, result.answers.failed) == ((), 0)
    assert figures["process_s"] > 0, "the pause before the restart"
    parts = ("process_s", "imports_s", "weights_s", "compilation_s", "engine_s", "first_answer_s")
    assert sum(figures[part] for part in parts) == pytest.approx(figures["total_s"], abs=0.2)
    assert (figures["weights_s"], figures["compilation_s"]) == (0.25, 0.5), "as its log says"
    assert figures["measured_s"] is None


def test_a_server_that_does_not_come_back_fails_the_cold_drill(place: Place, tmp_path: Path) -> None:
    release = place.release(1, token_s=0.01)
    place.target.deploy(release)
    engine: dict[str, Any] = {
        "name": "vllm",
        "version": "0",
        "arguments": [],
        "dtype": "bfloat16",
        "quantization": None,
    }
    measured = {"engine": engine | {"kernel": None, "ready_s": 0.1}}
    (place.store.releases / release / METRICS).write_text(json.dumps(measured))
    behaviour = place.store.releases / release / "behaviour.json"
    behaviour.unlink()  # it is shared with the source
    behaviour.write_text(json.dumps({"starts_after": str(tmp_path / "back")}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drills, "NOTICED_S", 3.0)
        result = drill_cold(Scene(place.store, place.target, WORKLOAD, Rollout()))
    assert result.failures == (f"{release} did not answer within 3 s",)
    (tmp_path / "back").touch()


@pytest.mark.parametrize(
    ("up", "stand_ins"),
    [
        ({"stable", "canary", "standby"}, {"stable": ["stable", "standby"], "canary": ["canary", "stable", "standby"]}),
        ({"canary", "standby"}, {"stable": ["standby"], "canary": ["canary", "standby"]}),
        ({"stable"}, {"stable": ["stable"], "canary": ["stable"]}),
        ({"canary"}, {"stable": [], "canary": ["canary"]}),
    ],
)
def test_a_server_that_is_gone_is_replaced_by_a_good_release_never_by_the_canary(
    up: set[str], stand_ins: dict[str, list[str]]
) -> None:
    backends = {name: [Backend(name, f"/{name}.sock")] for name in up}
    wanted = Wanted(stable="stable", canary="canary", percent=10, standby="standby")
    made = routing(["stable", "canary"], backends, wanted)
    assert {name: [each.release for (each,) in order] for name, order in made.orders.items()} == stand_ins
    assert made.weights == {"stable": 90, "canary": 10}


@pytest.fixture
def two(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Two servers for each release, whatever the cores."""
    monkeypatch.setenv(BINDING, "nobind")
    place.target = place.with_settings(replicas=2)
    return place


def test_a_release_with_two_servers_stays_up_while_one_is_restarted(two: Place) -> None:
    release = two.release(1, token_s=0.005)
    two.target.deploy(release)
    first, second = two.endpoint().replicas(release)
    assert (first.replica, second.replica, {first.state, second.state}) == (0, 1, {"up"})
    assert (two.store.path / SERVERS / f"{release}.log").is_file()
    assert (two.store.path / SERVERS / f"{release}.2.log").is_file()
    before = two.target.counters(release)
    with two.load(users=4, tokens=4) as load:
        wait_until(lambda: len(load.replies()) > 40, "answers")
        back = two.target.kill(release)
        wait_until(lambda: two.endpoint().servers != (first, second), "the death to be noticed")
        with pytest.raises(TransientError, match="is down: vLLM"):
            two.target.counters(release)
        wait_until(back, "the restart")
    # Only answers that the dead server had begun.
    assert [each.error for each in load.failed() if "incomplete chunked read" not in each.error] == []
    assert two.endpoint().replicas(release)[1] == second
    after = two.target.counters(release)
    assert before.instance != after.instance
    assert after.instance.endswith(f"{second.pid} on {second.url}")
    assert f"{release} (server 1 of 2) is up" in Path(two.endpoint().log).read_text()


def test_what_a_release_did_is_the_sum_of_its_servers(two: Place) -> None:
    release = two.release(1, fails_every=4)
    two.target.deploy(release)
    before = two.target.counters(release)
    statuses = [each.status_code for each in two.ask(24, max_tokens=3)]
    urls = {two.target.url(release) for _ in range(2)}
    each = [read_counters(http().get(f"{url}/metrics").text, "") for url in urls]
    assert len(each) == 2
    assert min(one.answered for one in each) > 2, "both were asked"
    after = two.target.counters(release)
    done = after.since(before)
    assert (done.answered, done.failed) == (statuses.count(200), statuses.count(500))
    assert after.output_tokens - before.output_tokens == 3 * done.answered == 3 * done.ttft_count


def test_affinity_and_the_time_for_a_request_are_those_of_the_settings(two: Place) -> None:
    two.target = two.with_settings(replicas=2, affinity="client", request_timeout_s=2)
    release = two.release(1, token_s=0.01)
    two.target.deploy(release)
    urls = [each.url for each in two.endpoint().replicas(release)]

    def answered() -> list[float]:
        return [read_counters(http().get(f"{url}/metrics").text, "").answered for url in urls]

    before = answered()
    two.answering(10)
    assert sorted(now - then for now, then in zip(answered(), before, strict=True)) == [0, 10]
    assert [each.status_code for each in two.ask(1, max_tokens=400)] == [504]


def test_a_canary_of_two_servers_is_ready_when_both_are_and_a_server_that_does_not_start_fails_it(two: Place) -> None:
    two.target.deploy(two.release(1))
    new = two.release(2)
    two.target.deploy(new)
    wait_until(lambda: two.target.ready(new), "the canary")
    assert [each.state for each in two.endpoint().replicas(new)] == ["up", "up"]
    two.target.withdraw(new)
    bad = two.release(3, refuses="out of kernels")
    two.target.deploy(bad)
    with pytest.raises(ServerFailed, match="out of kernels"):
        wait_until(lambda: two.target.ready(bad), "its failure")
    assert two.answering(1) == [two.endpoint().release]


def test_more_replicas_than_the_machine_has_cores_for_are_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BINDING, raising=False)
    count = 1 + len(os.sched_getaffinity(0)) // 2
    release, target = place.release(1), place.with_settings(replicas=count)
    with pytest.raises(ConfigError, match=f"{count} servers of a release and {count} of its canary need {2 * count}"):
        target.check_room(release)
    with pytest.raises(ServerFailed, match=f"need {2 * count} cores"):
        target.deploy(release)
    assert endpoint(place.store) is None


def test_counters_cover_all_engines_and_only_completions() -> None:
    text = """
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 3
http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 4
http_requests_total{handler="/v1/chat/completions",method="POST",status="4xx"} 5
http_requests_total{handler="/v1/chat/completions",method="POST",status="5xx"} 2
http_requests_total{handler="/v1/models",method="GET",status="2xx"} 100
http_requests_total{handler="/health",method="GET",status="2xx"} 100
vllm:request_generation_tokens_sum{engine="0"} 10
vllm:request_generation_tokens_sum{engine="1"} 20
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 1
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 2
vllm:time_to_first_token_seconds_bucket{engine="1",le="0.1"} 3
vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf"} 4
vllm:time_to_first_token_seconds_sum{engine="0"} 0.25
vllm:time_to_first_token_seconds_sum{engine="1"} 0.5
vllm:request_prompt_tokens_sum{engine="0"} 300
vllm:request_prompt_tokens_count{engine="0"} 4
"""
    told = read_counters(text, "one")
    assert (told.answered, told.failed, told.refused, told.output_tokens, told.instance) == (7, 2, 5, 30, "one")
    assert (told.ttft_bounds, told.ttft) == ((0.1,), (4, 6))
    assert told.ttft_s == 0.75
    assert (told.prompt_tokens, told.prompts) == (300, 4)
    assert told.tpot == ()


def test_watch_ends_with_47_at_an_alarm_notifies_once_and_rolls_back(place: Place) -> None:
    old, new = place.two_releases(token_s=0.001)
    place.target.promote(new)
    with hook() as receiver:

        def watched(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "pipeline", "watch", MODEL, "--store", str(place.store.root), *arguments]
            command += ["--notify", receiver.url]
            return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

        sound = watched("--once")
        assert sound.returncode == 0, sound.stderr
        assert f"{new}: no alarm, still learning what is usual\n" in sound.stdout
        (first,) = seen(place.store).looks
        longer = first.model_copy(update={"context": 2048})
        broken = first.model_copy(update={"promised": 2048})
        Looks(looks=(longer, broken, broken)).write(place.store.path / FILE)
        bad = watched("--every", "1s", "--rollback")
        assert bad.returncode == Degraded.exit_code
        assert f"error: {new} is no longer what it was: context" in bad.stderr
        assert f"rolled back to {old}" in bad.stdout
        assert place.endpoint().release == old
        (posted,) = receiver.posted
        assert posted["look"]["alarms"] == ["context"]
        assert posted["text"].startswith(f"{MODEL}: {new}: alarm: context: ")
        metrics = (place.store.path / "watch.prom").read_text()
        assert metrics == f'slipway_watch_alarm{{model="{MODEL}",release="{new}"}} 1\n'
        assert watched("--every", "0m").returncode == ConfigError.exit_code
