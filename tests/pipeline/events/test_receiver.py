"""The receiver, over real HTTP: what it lets pass reaches the EventSource, and nothing else does."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from receiving import COMMIT, NOT_OURS, PUSH, SECRET, TOKEN, EventSource, Receiver, changed, environment, push, receiver

from pipeline.argo.status import arguments_of
from pipeline.events.sensor import Sensor


def commit(number: int) -> str:
    return f"{number:040x}"


@pytest.fixture
def source() -> Iterator[EventSource]:
    with_events = EventSource()
    yield with_events
    with_events.close()


@pytest.fixture(scope="module")
def untouched() -> Iterator[EventSource]:
    source = EventSource()
    yield source
    source.close()


@pytest.fixture(scope="module")
def guarded(untouched: EventSource) -> Iterator[Receiver]:
    """A receiver for requests of which nothing may reach its EventSource, ``untouched``."""
    with receiver(untouched.url) as made:
        yield made


def test_a_push_reaches_the_event_source_and_means_the_right_run_there(source: EventSource):
    with receiver(source.url) as there:
        answer = there.post(PUSH)
        assert (answer.status_code, answer.json()["outcome"]) == (202, "forwarded")
        there.said(f"202 forwarded: some-user/some-repo@{COMMIT}")
        assert 'slipway_webhooks_total{outcome="forwarded"} 1.0' in there.get("/metrics").text
    assert source.events == [PUSH]
    (headers,) = source.seen
    assert headers["authorization"] == f"Bearer {TOKEN}"
    assert headers["content-type"] == "application/json"
    assert "x-webhook-secret" not in headers
    given = arguments_of(Sensor.read().workflow("huggingface", source.events[0]))
    assert (given["model"], given["revision"]) == ("some-user/some-repo", COMMIT)


@pytest.mark.parametrize("secret", [None, "", "wrong", SECRET + "x", SECRET[:-1], SECRET.upper(), "gehéim" * 4])
def test_without_the_secret_nothing_is_read_or_forwarded(guarded: Receiver, untouched: EventSource, secret: str | None):
    headers = [] if secret is None else [("X-Webhook-Secret", secret.encode())]
    answer = httpx.post(guarded.url, json=PUSH, headers=headers, timeout=60, trust_env=False)
    assert (answer.status_code, answer.json()["outcome"]) == (401, "unauthorized")
    guarded.said("401 unauthorized")
    assert untouched.seen == []


def test_two_secrets_are_none(guarded: Receiver, untouched: EventSource):
    headers = [("X-Webhook-Secret", "guess"), ("X-Webhook-Secret", SECRET)]
    assert httpx.post(guarded.url, json=PUSH, headers=headers, timeout=60, trust_env=False).status_code == 401
    assert untouched.seen == []


def test_a_secret_in_the_address_does_not_count(guarded: Receiver, untouched: EventSource):
    assert guarded.post(PUSH, secret=None, params={"secret": SECRET}).status_code == 401
    assert untouched.seen == []


@pytest.mark.parametrize("name", ["other/some-repo", "some-user2/some-repo", "Some-User/some-repo"])
def test_a_foreign_repository_starts_nothing(guarded: Receiver, untouched: EventSource, name: str):
    answer = guarded.post(push(name))
    assert (answer.status_code, answer.json()["outcome"]) == (403, "foreign")
    guarded.said(f"403 foreign: {name} is not in the list")
    assert untouched.seen == []


@pytest.mark.parametrize("case", NOT_OURS)
def test_an_event_that_is_no_new_commit_on_main_of_a_model_starts_nothing(
    guarded: Receiver, untouched: EventSource, case: str
):
    changes, reason = NOT_OURS[case]
    answer = guarded.post(changed(PUSH, changes))
    assert (answer.status_code, answer.json()["outcome"]) == (200, "ignored")
    assert reason in answer.json()["reason"]
    assert "\n" not in guarded.said(f"200 ignored: {answer.json()['reason'][:40]}").rstrip("\n")
    assert untouched.seen == []


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"not json", 400),
        (b"\xff\xfe", 400),
        (b'{"event": NaN}', 400),
        (b"[]", 400),
        (b"[" * 100_000, 400),
        (b'"' + b"x" * 300_000 + b'"', 413),
    ],
)
def test_what_is_no_event_is_refused(guarded: Receiver, untouched: EventSource, content: bytes, status: int):
    headers = {"X-Webhook-Secret": SECRET}
    answer = httpx.post(guarded.url, content=content, headers=headers, timeout=60, trust_env=False)
    assert (answer.status_code, answer.json()["outcome"]) == (status, "malformed")
    # The same without a Content-Length.
    streamed = httpx.post(guarded.url, content=iter([content]), headers=headers, timeout=60, trust_env=False)
    assert streamed.status_code == status
    assert untouched.seen == []


def test_a_sender_that_hangs_up_leaves_the_receiver_well(guarded: Receiver, untouched: EventSource):
    host, port = guarded.url.removeprefix("http://").split("/")[0].split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /huggingface HTTP/1.1\r\nHost: x\r\nX-Webhook-Secret: {SECRET}\r\nContent-Length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
    guarded.said("400 malformed: the body was cut off")
    assert guarded.get("/healthz").status_code == 200
    assert untouched.seen == []


def test_only_its_own_addresses_and_methods_are_there(guarded: Receiver):
    assert guarded.get("/huggingface").status_code == 405
    assert guarded.get("/").status_code == 404
    assert guarded.get("/healthz").text == "ok"


def test_a_commit_goes_on_once_also_after_a_restart(source: EventSource, tmp_path: Path):
    memory = ("--memory", str(tmp_path / "memory" / "pushes"))
    with receiver(source.url, *memory) as there:
        assert there.post(PUSH).status_code == 202
        again = there.post(PUSH)
        assert (again.status_code, again.json()["outcome"]) == (200, "replayed")
        assert there.post(push(commit=commit(1))).status_code == 202
    with receiver(source.url, *memory) as there:
        assert there.post(PUSH).json()["outcome"] == "replayed"
        there.said("200 replayed: some-user/some-repo@")
    assert len(source.events) == 2


def test_of_deliveries_at_the_same_moment_one_goes_on(source: EventSource):
    source.hold = threading.Event()
    answers: list[str] = []
    with receiver(source.url) as there:
        senders = [
            threading.Thread(target=lambda: answers.append(there.post(PUSH).json()["outcome"])) for _ in range(4)
        ]
        for each in senders:
            each.start()
        assert source.reached.wait(60)
        source.hold.set()
        for each in senders:
            each.join()
    assert sorted(answers) == ["forwarded", "replayed", "replayed", "replayed"]
    assert source.events == [PUSH]


def test_a_repository_that_pushes_too_often_has_to_wait_and_others_do_not(source: EventSource):
    with receiver(source.url, "--per-hour", "2") as there:
        assert [there.post(push(commit=commit(number))).status_code for number in range(3)] == [202, 202, 429]
        limited = there.post(push(commit=commit(3)))
        assert limited.json()["outcome"] == "limited"
        assert 0 < int(limited.headers["Retry-After"]) <= 3600
        there.said("429 limited: some-user/some-repo@")
        assert there.post(push("some-user/other")).status_code == 202
    assert len(source.events) == 3


def test_an_event_source_that_stumbles_is_tried_again(source: EventSource):
    source.statuses = [503, 500, 429]
    with receiver(source.url) as there:
        assert there.post(PUSH).status_code == 202
    assert len(source.seen) == 4
    assert source.events == [PUSH]


def test_an_event_source_that_is_away_makes_the_sender_try_again_later(source: EventSource):
    source.close()
    with receiver(source.url, "--patience", "0.2") as there:
        away = there.post(PUSH)
        assert (away.status_code, away.json()["outcome"]) == (503, "unavailable")
        assert int(away.headers["Retry-After"]) > 0
        there.said("503 unavailable: some-user/some-repo@")
        back = EventSource(port=source.port)
        try:
            assert there.post(PUSH).status_code == 202
            assert back.events == [PUSH]
        finally:
            back.close()


def test_an_event_source_that_does_not_take_the_token_is_told_as_such(source: EventSource):
    source.token = "another-token-than-ours"
    with receiver(source.url) as there:
        answer = there.post(PUSH)
        assert (answer.status_code, answer.json()["outcome"]) == (502, "refused")
        there.said("502 refused")
    assert len(source.seen) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_being_forwarded_is_finished_before_the_end(source: EventSource, number: signal.Signals):
    source.hold = threading.Event()
    statuses: list[int] = []
    with receiver(source.url) as there:
        sender = threading.Thread(target=lambda: statuses.append(there.post(PUSH).status_code))
        sender.start()
        assert source.reached.wait(60)
        there.process.send_signal(number)
        threading.Timer(0.2, source.hold.set).start()
        sender.join()
        assert there.process.wait(60) == 0
        there.said("stopped")
    assert statuses == [202]
    assert source.events == [PUSH]


def test_secrets_come_from_files_too(source: EventSource, tmp_path: Path):
    for name, value in {"secret": SECRET, "token": TOKEN}.items():
        (tmp_path / name).write_text(value + "\n")
    files = {
        "SLIPWAY_WEBHOOK_SECRET_FILE": str(tmp_path / "secret"),
        "SLIPWAY_EVENTS_TOKEN_FILE": str(tmp_path / "token"),
        "SLIPWAY_WEBHOOK_SECRET": "",
        "SLIPWAY_EVENTS_TOKEN": "",
    }
    with receiver(source.url, **files) as there:
        assert there.post(PUSH).status_code == 202
    assert source.seen[0]["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    ("arguments", "variables", "said", "code"),
    [
        ([], {"SLIPWAY_WEBHOOK_SECRET": ""}, "SLIPWAY_WEBHOOK_SECRET_FILE are not set", 2),
        ([], {"SLIPWAY_EVENTS_TOKEN": "short"}, "at least 16 visible ASCII characters", 2),
        ([], {"SLIPWAY_EVENTS_TOKEN": "", "SLIPWAY_EVENTS_TOKEN_FILE": "/nowhere"}, "cannot read the file", 2),
        ([], {"SLIPWAY_ALLOW": "everything"}, "--allow 'org/*'", 2),
        (["--forward-to", "eventsource:12000"], {}, "is not the URL of an EventSource", 2),
        (["--memory", "/proc/nowhere/pushes"], {}, "cannot keep a memory", 2),
        (["--host", "192.0.2.1"], {}, "cannot listen on 192.0.2.1", 32),
    ],
)
def test_a_mistake_in_what_it_is_told_is_said_at_once(
    arguments: list[str], variables: dict[str, str], said: str, code: int
):
    command = [sys.executable, "-m", "pipeline", "receive", "--port", "0", "--forward-to", "http://127.0.0.1:9/x"]
    ended = subprocess.run(
        [*command, *arguments],
        env=environment(SLIPWAY_ALLOW="some-user/*") | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == code, ended.stderr
    assert said in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr
    assert SECRET not in ended.stderr
