"""Who may ask, and how much: the real Envoy and its door, before a server that answers in an instant."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

import httpx
import openai
import pytest

from stages.parts.base.errors import ConfigError, ServerFailed, UnknownName
from stages.parts.endpoint import access_log
from stages.parts.endpoint.access_log import LoggedRequest, LogReader
from stages.parts.endpoint.clients import (
    ANYBODY,
    DEFAULT,
    FILE,
    NOBODY,
    OWN,
    UNATTRIBUTED,
    Client,
    add,
    read_clients,
    remove,
    rotate,
)
from stages.parts.endpoint.database import opened
from stages.parts.endpoint.door import Door, LastMinute
from stages.parts.endpoint.endpoint import Wanted
from stages.parts.endpoint.envoy import Proxy, proxying
from stages.parts.endpoint.routing import Backend, routing
from stages.parts.endpoint.tls import Tls
from stages.parts.endpoint.usage import sums, take_in
from stages.parts.vllm.client import credentials, http
from stages.parts.vllm.server import reserved_port
from tests.serving import wait_until

MODEL = "org/name"
KEY = "the operator's key"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
USED = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}


class Completions(BaseHTTPRequestHandler):
    """Tells what every answer used; a prompt ``wait`` is answered once the test lets it."""

    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_GET(self) -> None:
        self.reply(json.dumps({"object": "list", "data": []}), "application/json")

    def do_POST(self) -> None:
        if self.server.hangs:
            self.server.asked.append(dict(self.headers.items()))
            self.server.go_on.wait(60)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(dict(self.headers.items()))
        if asked.get("prompt") == "wait":
            self.server.waiting.release()
            self.server.go_on.wait(60)
        if asked.get("prompt") == "too much":
            return self.reply('{"error": {"message": "too many are waiting"}}', "application/json", 503)
        if not asked.get("stream"):
            choice = {"index": 0, "text": "!", "finish_reason": "stop"}
            answer = {"id": "1", "model": asked.get("model", MODEL), "choices": [choice], "usage": USED}
            return self.reply(json.dumps(answer), "application/json")
        events = [
            {
                "model": asked.get("model", MODEL),
                "choices": [{"index": 0, "text": "!"}],
                "usage": USED | {"completion_tokens": n, "total_tokens": 7 + n},
            }
            for n in (1, 2, 3)
        ]
        lines = [*map(json.dumps, events), "[DONE]"]
        return self.reply("".join(f"data: {each}\n\n" for each in lines), "text/event-stream")

    def reply(self, text: str, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


class Upstream(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, Completions)
        self.asked: list[dict[str, str]] = []
        self.hangs = False
        self.waiting, self.go_on = threading.Semaphore(0), threading.Event()


class Front:
    """An endpoint: Envoy, its door and the server behind it."""

    def __init__(self, folder: Path, url: str, proxy: Proxy, upstream: Upstream) -> None:
        self.proxy = proxy
        self.root, self.files, self.upstream = folder, folder / "files", upstream
        self.url = url

    def ask(self, key: str = "", **body: Any) -> httpx.Response:
        return self.post({"model": MODEL, "prompt": "x"} | body, credentials(key))

    def post(self, body: dict[str, Any], headers: dict[str, str], timeout_s: float = 60) -> httpx.Response:
        return http().post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=timeout_s)

    def give_up(self, key: str) -> None:
        """Ask for what is not answered, and go away."""
        with pytest.raises(httpx.ReadTimeout):
            self.post({"prompt": "wait"}, credentials(key), timeout_s=0.3)

    def add(self, name: str, **limits: Any) -> str:
        return add(self.root, Client(name=name, key_sha256="", **limits))

    def logged(self, count: int) -> list[LoggedRequest]:
        def there() -> list[LoggedRequest]:
            found = list(LogReader(self.files / access_log.NAME).requests())
            return found if len(found) >= count else []

        return wait_until(there, f"{count} lines in the log")


@contextlib.contextmanager
def serving(tmp_path: Path, key: str = "", tls: Tls | None = None, adapters: Iterable[str] = ()) -> Iterator[Front]:
    backend = Backend("r1", str(tmp_path / "vllm.sock"))
    asked = routing(["r1"], {"r1": [backend]}, Wanted(stable="r1"))
    door = Door(tmp_path, MODEL, key)
    door.adapters |= set(adapters)
    with Upstream(backend.socket) as upstream:
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        with (
            reserved_port("127.0.0.1", 0) as port,
            proxying(
                ("127.0.0.1", port), asked, door, folder=tmp_path / "files", log=tmp_path / "log", tls=tls
            ) as proxy,
        ):
            yield Front(tmp_path, f"{'https' if tls else 'http'}://127.0.0.1:{port}", proxy, upstream)
        upstream.go_on.set()
        upstream.shutdown()


@pytest.fixture
def front(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Front]:
    with serving(tmp_path, getattr(request, "param", "")) as made:
        yield made


def error_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.headers["content-type"] == "application/json"
    found: dict[str, Any] = reply.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    return found


def test_without_clients_and_without_a_key_anybody_may_ask(front: Front) -> None:
    assert front.ask().status_code == front.ask("whatever").status_code == 200
    assert [each.client for each in front.logged(2)] == [ANYBODY] * 2


@pytest.mark.parametrize("front", [KEY], indirect=True)
def test_an_endpoint_with_a_single_key_needs_no_clients(front: Front) -> None:
    assert front.ask(KEY).status_code == 200
    assert front.ask().status_code == front.ask("wrong").status_code == 401
    assert [each.client for each in front.logged(3)] == [DEFAULT, None, None]
    assert not [each for each in front.upstream.asked if "Authorization" in each], "vLLM need not know keys"


@pytest.mark.parametrize("front", [KEY], indirect=True)
def test_clients_come_change_their_keys_and_go_while_the_endpoint_serves(front: Front) -> None:
    first = front.add("batch")
    assert front.ask(first).status_code == front.ask(KEY).status_code == 200
    second = rotate(front.root, "batch")
    assert (front.ask(first).status_code, front.ask(second).status_code) == (401, 200)
    remove(front.root, "batch")
    assert error_of(front.ask(second)) == {
        "message": "the API key is wrong",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }
    assert front.ask(KEY).status_code == 200


def test_once_there_are_clients_nobody_else_may_ask(front: Front) -> None:
    front.add("batch")
    assert front.ask().status_code == front.ask("wrong").status_code == 401
    assert http().get(f"{front.url}/health").status_code == 200
    assert http().get(f"{front.url}/v1/models").status_code == 401
    nothing = http().get(f"{front.url}/metrics")
    assert nothing.status_code == 404
    assert error_of(nothing)["message"] == "there is no such route"


def test_only_hashes_of_keys_are_kept(front: Front) -> None:
    key = front.add("batch")
    path = front.root / FILE
    assert path.stat().st_mode & 0o777 == 0o600
    front.ask(key)
    front.logged(1)
    for each in front.root.rglob("*"):
        if each.is_file():
            assert key not in each.read_text(errors="replace"), each


def test_clients_that_cannot_be_read_let_nobody_in(front: Front) -> None:
    key = front.add("batch")
    assert front.ask(key).status_code == 200
    (front.root / FILE).write_text("{")
    assert front.ask(key).status_code == front.ask().status_code == 401


def test_clients_whose_file_is_gone_leave_nothing_open(front: Front) -> None:
    assert front.ask().status_code == 200
    key = front.add("batch")
    assert front.ask(key).status_code == 200
    (front.root / FILE).unlink()
    assert front.ask(key).status_code == front.ask().status_code == 401


def test_a_client_may_ask_only_the_models_that_it_was_given(front: Front) -> None:
    keys = {models: front.add(f"c{number}", models=models) for number, models in enumerate([(MODEL,), ("b",), ()])}
    answered = {models: front.ask(key) for models, key in keys.items()}
    assert {models: each.status_code for models, each in answered.items()} == {(MODEL,): 200, ("b",): 403, (): 200}
    assert error_of(answered["b",])["code"] == "model_not_allowed"


def test_a_client_of_some_models_has_to_be_given_adapters_by_name(tmp_path: Path) -> None:
    with serving(tmp_path, adapters=["support", "sql"]) as front:
        everything, base, support = (
            front.add(name, models=models)
            for name, models in (("all", ()), ("base", (MODEL,)), ("support", ("support",)))
        )
        elsewhere = front.add("elsewhere", models=("org/other",))

        def asked(key: str, **body: Any) -> int:
            return front.ask(key, **body).status_code

        assert [asked(everything, model=model) for model in (MODEL, "support", "sql")] == [200, 200, 200]
        assert [asked(base, model=model) for model in (MODEL, "support", "sql")] == [200, 403, 403]
        assert [asked(support, model=model) for model in (MODEL, "support", "sql")] == [403, 200, 403]
        assert [asked(elsewhere, model=model) for model in (MODEL, "support", "sql")] == [403, 403, 403]
        # Without a name, vLLM takes the model itself.
        assert [front.post({"prompt": "x"}, credentials(key)).status_code for key in (base, support)] == [200, 403]
        refusal = front.ask(support, model="sql").json()["error"]
        assert (refusal["message"], refusal["code"]) == ("support may not ask sql", "model_not_allowed")
        listed = http().get(f"{front.url}/v1/models", headers=credentials(support))
        assert listed.status_code == 200
        assert all("authorization" not in {name.lower() for name in headers} for headers in front.upstream.asked)


@pytest.mark.parametrize(
    "body", [b'{"model": "support", "model": "sql", "prompt": "x"}', b'{"model": "sql", "x": NaN}', b"[]", b"{"]
)
def test_no_spelling_of_a_request_leads_to_another_adapter(tmp_path: Path, body: bytes) -> None:
    with serving(tmp_path, adapters=["support", "sql"]) as front:
        key = front.add("support", models=("support",))
        headers = credentials(key) | {"Content-Type": "application/json"}
        assert http().post(f"{front.url}/v1/completions", content=body, headers=headers).status_code == 403
        assert not front.upstream.asked


@pytest.mark.parametrize("stream", [False, True])
def test_what_adapters_answer_is_used_under_their_own_names(tmp_path: Path, stream: bool) -> None:
    with serving(tmp_path, adapters=["support"]) as front:
        for model in (MODEL, "support"):
            assert front.ask(model=model, stream=stream).is_success
        front.logged(2)
        with opened(tmp_path) as database:
            take_in(database, front.files)
            used = {total.group["model"]: total.prompt_tokens for total in sums(database, LONG_AGO, ["model"])}
        assert used == {MODEL: 7, "support": 7}


def test_requests_beyond_the_minute_s_are_refused_until_there_is_room(front: Front) -> None:
    key, other = front.add("a", requests_per_minute=3), front.add("b", requests_per_minute=3)
    replies = [front.ask(key) for _ in range(5)]
    assert [each.status_code for each in replies] == [200, 200, 200, 429, 429]
    assert 50 <= int(replies[-1].headers["retry-after"]) <= 60
    assert error_of(replies[-1])["code"] == "rate_limit_exceeded"
    assert front.ask(other).status_code == 200, "another client's minute is its own"
    assert [(each.client, each.status) for each in front.logged(6)[3:]] == [("a", 429), ("a", 429), ("b", 200)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_an_answer_count_when_it_has_ended(front: Front, stream: bool) -> None:
    key = front.add("a", tokens_per_minute=15)
    assert [front.ask(key, stream=stream).status_code for _ in range(2)] == [200, 200]
    refused = wait_until(lambda: (reply := front.ask(key)).status_code == 429 and reply, "the tokens")
    assert 50 <= int(refused.headers["retry-after"]) <= 60
    told = [(each.prompt_tokens, each.cached_tokens, each.output_tokens) for each in front.logged(2)[:2]]
    assert told == [(7, 4, 3)] * 2


def test_requests_at_once_are_limited_and_free_again_when_they_end(front: Front) -> None:
    key = front.add("a", requests_at_once=1)
    for _ in range(10):
        assert front.ask(key).status_code == 200, "one after the other"
    first = threading.Thread(target=lambda: front.ask(key, prompt="wait"))
    first.start()
    front.upstream.waiting.acquire()
    refused = front.ask(key)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    front.upstream.go_on.set()
    first.join()
    assert front.ask(key).status_code == 200


def test_a_request_that_had_ended_before_it_was_let_in_takes_no_room(tmp_path: Path) -> None:
    key = add(tmp_path, Client(name="a", key_sha256="", requests_at_once=1))
    door = Door(tmp_path, MODEL, "")
    door.note(LoggedRequest(id="1", at=0), 0.0)
    assert [door.decide(f"Bearer {key}", request, 0.0).status for request in ("1", "2", "3")] == [200, 200, 429]
    door.note(LoggedRequest(id="2", at=0), 0.0)
    assert door.decide(f"Bearer {key}", "3", 0.0).status == 200


def test_a_request_that_its_client_gave_up_is_free_again(front: Front) -> None:
    key = front.add("a", requests_at_once=1)
    for _ in range(3):
        front.give_up(key)
        front.upstream.waiting.acquire()
    assert wait_until(lambda: front.ask(key).status_code == 200, "room")


def test_vllm_is_told_the_client_s_priority_and_not_what_the_client_says(front: Front) -> None:
    keys = {priority: front.add(f"c{number}", priority=priority) for number, priority in enumerate((0, -5, 10))}
    for priority, key in keys.items():
        for said in ({}, {"X-Vllm-Priority": "-100"}):
            front.post({}, credentials(key) | said).raise_for_status()
            told = {name.lower(): value for name, value in front.upstream.asked[-1].items()}
            assert told["x-vllm-priority"] == str(priority)


def test_what_vllm_refuses_because_too_many_are_waiting_says_when_to_try_again(front: Front) -> None:
    refused = front.ask(prompt="too much")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert refused.json()["error"]["message"] == "too many are waiting"
    assert "retry-after" not in front.ask().headers


def test_a_client_cannot_choose_its_name_or_the_id_of_its_request(front: Front) -> None:
    key = front.add("a")
    headers = credentials(key) | {"x-slipway-client": "b", "x-request-id": "mine"}
    front.post({}, headers).raise_for_status()
    front.post({}, headers | credentials("wrong"))
    first, second = front.logged(2)
    assert (first.client, second.client) == ("a", None)
    assert len({first.id, second.id, "mine"}) == 3


def test_if_the_door_does_not_answer_requests_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = contextlib.nullcontext(threading.current_thread())
    monkeypatch.setattr("stages.parts.endpoint.envoy.answering", lambda *_: nobody)
    with serving(tmp_path) as front:
        refused = [front.ask(), front.ask(front.add("a"))]
        assert {(each.status_code, each.headers["retry-after"]) for each in refused} == {(503, "2")}
        assert error_of(refused[0])["type"] == "server_error"
        assert front.upstream.asked == []
        assert http().get(f"{front.url}/health").status_code == 200


def test_a_door_that_fails_is_noticed_and_lets_nobody_in(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    front.proxy.check_alive()
    monkeypatch.setattr(Door, "note", fail)
    front.ask()
    with pytest.raises(ServerFailed, match="who may ask has ended"):
        wait_until(front.proxy.check_alive, "its end")
    assert front.ask().status_code == 503


def test_the_openai_client_understands_every_refusal_and_tries_again_after_one_that_passes(front: Front) -> None:
    wrong = openai.OpenAI(base_url=f"{front.url}/v1", api_key="wrong", max_retries=0)
    front.add("x")
    with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
        wrong.models.list()
    elsewhere = openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.add("b", models=("b",)), max_retries=0)
    with pytest.raises(openai.PermissionDeniedError, match="b may not ask org/name"):
        elsewhere.models.list()
    few = openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.add("few", requests_per_minute=1), max_retries=0)
    few.completions.create(model=MODEL, prompt="x")
    with pytest.raises(openai.RateLimitError, match="few may use 1 requests per minute"):
        few.completions.create(model=MODEL, prompt="x")
    one = openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.add("one", requests_at_once=1), max_retries=2)
    first = threading.Thread(target=lambda: one.completions.create(model=MODEL, prompt="wait"))
    first.start()
    front.upstream.waiting.acquire()
    threading.Timer(0.5, front.upstream.go_on.set).start()
    assert one.completions.create(model=MODEL, prompt="x").usage.total_tokens == 10
    first.join()


def test_a_log_is_read_to_its_end_before_the_next_one(tmp_path: Path) -> None:
    log, line = tmp_path / "log", json.dumps({"id": "{}", "at": "1.5"}).replace("{}", "%s") + "\n"
    reader = LogReader(log)
    assert list(reader.requests()) == []
    log.write_text(line % 1)
    before = log.open("a")
    assert [each.id for each in reader.requests()] == ["1"]
    log.rename(tmp_path / "before")
    assert list(reader.requests()) == []
    with before:
        before.write(line % 2 + line % 3)
    log.write_text(line % 4 + (line % 5)[:4])
    assert [each.id for each in reader.requests()] == ["2", "3", "4"]
    with log.open("a") as file:
        file.write((line % 5)[4:])
    assert [each.id for each in reader.requests()] == ["5"]


def test_the_log_has_no_word_of_what_was_asked_or_answered(front: Front) -> None:
    front.ask(prompt="a secret", max_tokens=1)
    (line,) = front.logged(1)
    assert (line.status, line.release, line.path) == (200, "r1", "/v1/completions")
    assert line.ttft_ms is not None
    assert 0 <= line.ttft_ms <= line.duration_ms
    text = (front.files / access_log.NAME).read_text()
    assert "secret" not in text
    assert "!" not in text


def test_a_window_forgets_after_a_minute_and_says_when() -> None:
    window = LastMinute()
    for second in range(4):
        window.add(10, float(second))
    assert window.wait_s(41, 4.0) == 0
    assert window.wait_s(40, 4.0) == 56
    assert window.wait_s(20, 4.0) == 58
    assert window.wait_s(1, 4.0) == 59
    assert window.wait_s(1, 63.5) == 0


def test_names_are_unique_and_the_names_of_slipway_itself_are_not_given(tmp_path: Path) -> None:
    add(tmp_path, Client(name="a", key_sha256=""))
    for name in ("a", DEFAULT, ANYBODY, NOBODY, OWN, UNATTRIBUTED):
        with pytest.raises(ConfigError, match=name):
            add(tmp_path, Client(name=name, key_sha256=""))
    with pytest.raises(UnknownName, match="'b'"):
        rotate(tmp_path, "b")
    with pytest.raises(UnknownName):
        remove(tmp_path, "b")
    assert [each.name for each in read_clients(tmp_path).clients] == ["a"]
