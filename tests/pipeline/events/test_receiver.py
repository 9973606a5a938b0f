"""The receiver, over real HTTP: only admitted pushes reach the EventSource."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.events.push import PROVIDERS
from pipeline.events.receiver import BODY_S
from tests.pipeline.events.receiving import (
    COMMIT,
    HARBOR_PUSH,
    HARBOR_TOKEN,
    IGNORED,
    PUSH,
    SECRET,
    TOKEN,
    WEBHOOKS,
    EventSource,
    Receiver,
    changed,
    environment,
    normalized,
    push,
    receiver,
)


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
    """A receiver for requests that may not reach its EventSource, ``untouched``."""
    with receiver(untouched.url) as made:
        yield made


@pytest.mark.parametrize("provider", WEBHOOKS)
def test_a_push_reaches_the_event_source_in_its_normalized_form(source: EventSource, provider: str):
    with receiver(source.url) as there:
        answer = there.post(WEBHOOKS[provider], provider)
        assert (answer.status_code, answer.json()["outcome"]) == (202, "forwarded")
        there.said(f"202 forwarded: some-user/some-repo@{COMMIT}")
        assert 'slipway_webhooks_total{outcome="forwarded"} 1.0' in there.get("/metrics").text
    assert source.events == [normalized(provider)]
    (headers,) = source.seen
    assert headers["authorization"] == f"Bearer {TOKEN}"
    assert headers["content-type"] == "application/json"
    assert "x-webhook-secret" not in headers


def test_a_commit_that_both_providers_report_is_forwarded_once(source: EventSource):
    with receiver(source.url) as there:
        assert there.post(HARBOR_PUSH, "harbor").status_code == 202
        assert there.post(PUSH).json()["outcome"] == "replayed"
    assert source.events == [normalized("harbor")]


UNAUTHORIZED: list[tuple[str, list[tuple[str, str]]]] = [
    ("huggingface", []),
    *(
        ("huggingface", [("X-Webhook-Secret", secret)])
        for secret in ("", "wrong", SECRET + "x", SECRET[:-1], SECRET.upper(), "gehéim" * 4, HARBOR_TOKEN, TOKEN)
    ),
    ("huggingface", [("Authorization", f"Bearer {SECRET}")]),
    ("huggingface", [("X-Webhook-Secret", "guess"), ("X-Webhook-Secret", SECRET)]),
    ("harbor", []),
    *(
        ("harbor", [("Authorization", value)])
        for value in ("", "Bearer", HARBOR_TOKEN, f"Basic {HARBOR_TOKEN}", f"Bearer {HARBOR_TOKEN}x")
    ),
    *(("harbor", [("Authorization", f"Bearer {secret}")]) for secret in (SECRET, TOKEN, "gehéim" * 4)),
    ("harbor", [("X-Webhook-Secret", HARBOR_TOKEN)]),
    ("harbor", [("Authorization", "Bearer guess"), ("Authorization", f"Bearer {HARBOR_TOKEN}")]),
]


@pytest.mark.parametrize(("provider", "headers"), UNAUTHORIZED)
def test_without_its_own_secret_a_provider_is_refused(
    guarded: Receiver, untouched: EventSource, provider: str, headers: list[tuple[str, str]]
):
    encoded = [(name, value.encode()) for name, value in headers]
    answer = guarded.request(provider, json=WEBHOOKS[provider], headers=encoded, params={"secret": SECRET})
    assert (answer.status_code, answer.json()["outcome"]) == (401, "unauthorized")
    guarded.said("401 unauthorized")
    assert untouched.seen == []


@pytest.mark.parametrize("provider", WEBHOOKS)
def test_without_the_secret_the_answer_does_not_wait_for_the_body(guarded: Receiver, provider: str):
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"POST /{provider} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n".encode())
        started = time.monotonic()
        assert connection.recv(12) == b"HTTP/1.1 401"
        assert time.monotonic() - started < BODY_S / 2


@pytest.mark.parametrize(("accepted", "other"), [("huggingface", "harbor"), ("harbor", "huggingface")])
def test_a_provider_without_a_secret_is_not_found(source: EventSource, accepted: str, other: str):
    with receiver(source.url, **{PROVIDERS[other].variable: ""}) as there:
        assert f"/{accepted}" in there.said("listening on")
        assert f"/{other}" not in there.said("listening on")
        assert there.post(WEBHOOKS[other], other).status_code == 404
        assert there.post(WEBHOOKS[accepted], accepted).status_code == 202
    assert source.events == [normalized(accepted)]


@pytest.mark.parametrize("name", ["other/some-repo", "some-user2/some-repo", "Some-User/some-repo"])
def test_a_foreign_repository_starts_nothing(guarded: Receiver, untouched: EventSource, name: str):
    answer = guarded.post(push(name))
    assert (answer.status_code, answer.json()["outcome"]) == (403, "foreign")
    guarded.said(f"403 foreign: {name} is not among the allowed models")
    assert untouched.seen == []


@pytest.mark.parametrize(("provider", "changes", "reason"), IGNORED)
def test_an_event_that_is_not_a_models_new_commit_is_not_forwarded(
    guarded: Receiver, untouched: EventSource, provider: str, changes: dict[str, Any], reason: str
):
    answer = guarded.post(changed(WEBHOOKS[provider], changes), provider)
    assert (answer.status_code, answer.json()["outcome"]) == (200, "ignored")
    assert reason in answer.json()["reason"]
    guarded.said(f"200 ignored: {answer.json()['reason']}")
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
def test_a_body_that_is_no_event_is_refused(guarded: Receiver, untouched: EventSource, content: bytes, status: int):
    headers = {"X-Webhook-Secret": SECRET}
    answer = guarded.request("huggingface", content=content, headers=headers)
    assert (answer.status_code, answer.json()["outcome"]) == (status, "malformed")
    # The same without a Content-Length.
    streamed = guarded.request("huggingface", content=iter([content]), headers=headers)
    assert streamed.status_code == status
    assert untouched.seen == []


def test_the_receiver_survives_a_sender_that_hangs_up(guarded: Receiver, untouched: EventSource):
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /huggingface HTTP/1.1\r\nHost: x\r\nX-Webhook-Secret: {SECRET}\r\nContent-Length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
    guarded.said("400 malformed: the body was cut off")
    assert guarded.get("/healthz").status_code == 200
    assert untouched.seen == []


def test_only_the_documented_addresses_and_methods_exist(guarded: Receiver):
    assert guarded.get("/huggingface").status_code == 405
    assert guarded.get("/").status_code == 404
    assert guarded.get("/healthz").text == "ok"


def test_a_commit_is_forwarded_once_also_after_a_restart(source: EventSource, tmp_path: Path):
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


def test_one_of_several_deliveries_at_the_same_moment_is_forwarded(source: EventSource):
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
    assert source.events == [normalized("huggingface")]


def test_a_model_that_is_pushed_too_often_has_to_wait_and_others_do_not(source: EventSource):
    with receiver(source.url, "--per-hour", "2") as there:
        assert [there.post(push(commit=commit(number))).status_code for number in range(3)] == [202, 202, 429]
        limited = there.post(push(commit=commit(3)))
        assert limited.json()["outcome"] == "limited"
        assert 0 < int(limited.headers["Retry-After"]) <= 3600
        there.said("429 limited: some-user/some-repo@")
        assert there.post(push("some-user/other")).status_code == 202
    assert len(source.events) == 3


def test_a_request_that_the_event_source_fails_is_repeated(source: EventSource):
    source.statuses = [503, 500, 429]
    with receiver(source.url) as there:
        assert there.post(PUSH).status_code == 202
    assert len(source.seen) == 4
    assert source.events == [normalized("huggingface")]


def test_without_an_event_source_the_sender_is_asked_to_try_again_later(source: EventSource):
    source.close()
    with receiver(source.url, "--patience", "0.2") as there:
        away = there.post(PUSH)
        assert (away.status_code, away.json()["outcome"]) == (503, "unavailable")
        assert int(away.headers["Retry-After"]) > 0
        there.said("503 unavailable: some-user/some-repo@")
        back = EventSource(port=source.port)
        try:
            assert there.post(PUSH).status_code == 202
            assert back.events == [normalized("huggingface")]
        finally:
            back.close()


def test_an_event_source_that_refuses_the_token_is_reported(source: EventSource):
    source.token = "another-token-than-ours"
    with receiver(source.url) as there:
        answer = there.post(PUSH)
        assert (answer.status_code, answer.json()["outcome"]) == (502, "refused")
        there.said("502 refused")
    assert len(source.seen) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_in_progress_is_finished_before_the_end(source: EventSource, number: signal.Signals):
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
    assert source.events == [normalized("huggingface")]


def test_secrets_can_come_from_files(source: EventSource, tmp_path: Path):
    variables: dict[str, str] = {}
    for name in ("SLIPWAY_WEBHOOK_SECRET", "SLIPWAY_HARBOR_TOKEN", "SLIPWAY_EVENTS_TOKEN"):
        (tmp_path / name).write_text(environment()[name] + "\n")
        variables |= {name: "", f"{name}_FILE": str(tmp_path / name)}
    with receiver(source.url, **variables) as there:
        assert there.post(PUSH).status_code == 202
        assert there.post(HARBOR_PUSH, "harbor").status_code == 200
    assert source.seen[0]["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    ("arguments", "variables", "said", "code"),
    [
        ([], {"SLIPWAY_WEBHOOK_SECRET": "", "SLIPWAY_HARBOR_TOKEN": ""}, "no provider's secret is set", 2),
        ([], {"SLIPWAY_HARBOR_TOKEN": "short"}, "SLIPWAY_HARBOR_TOKEN must be at least 16", 2),
        ([], {"SLIPWAY_EVENTS_TOKEN": ""}, "SLIPWAY_EVENTS_TOKEN_FILE are not set", 2),
        ([], {"SLIPWAY_EVENTS_TOKEN": "short"}, "at least 16 visible ASCII characters", 2),
        ([], {"SLIPWAY_EVENTS_TOKEN": "", "SLIPWAY_EVENTS_TOKEN_FILE": "/nowhere"}, "cannot read the file", 2),
        ([], {"SLIPWAY_ALLOW": "everything"}, "--allow 'org/*'", 2),
        (["--forward-to", "eventsource:12000"], {}, "is not the URL of an EventSource", 2),
        (["--memory", "/proc/nowhere/pushes"], {}, "as memory", 2),
        (["--host", "192.0.2.1"], {}, "cannot listen on 192.0.2.1", 32),
    ],
)
def test_a_mistake_in_the_settings_is_reported_at_once(
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
