"""What an endpoint's servers have counted is somebody's: a client's, our own, or unattributed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.store import ModelStore
from stages.parts.endpoint.clients import ANYBODY, OWN, UNATTRIBUTED
from stages.parts.endpoint.database import URL_VARIABLE, opened
from stages.parts.endpoint.endpoint import SERVERS, endpoint
from stages.parts.endpoint.usage import Sum, sums, take_in
from stages.parts.vllm.client import healthy, http
from tests.serving import MODEL, processes_with, publish, stand_in_variant, wait_until
from tests.stages.parts.endpoint.postgresql import ENCODED, PASSWORD, serving
from tests.stages.serve.test_serve import serve, server_of

ALWAYS = datetime(2000, 1, 1, tzinfo=UTC)
TOKEN_S = 0.02


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ModelStore]:
    place = ModelStore(tmp_path / "store", MODEL)
    yield place
    serve(place, "--stop")


def used(store: ModelStore, url: str = "") -> dict[Any, Sum]:
    with opened(store.root, url) as database:
        take_in(database, store.path / SERVERS)
        return {each.group["client"]: each for each in sums(database, ALWAYS, ["client"])}


def tokens(store: ModelStore) -> dict[Any, tuple[int, int]]:
    return {name: (each.prompt_tokens, each.output_tokens) for name, each in used(store).items()}


def ask(url: str, count: int = 1) -> None:
    for _ in range(count):
        body = {"model": MODEL, "prompt": "x", "max_tokens": 5}
        assert http().post(f"{url}/v1/completions", json=body).is_success


def cut(url: str, tokens: int) -> None:
    """Ask for a stream, and go away in the middle."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2 * tokens, "stream": True}
    with http().stream("POST", f"{url}/v1/completions", json=body) as reply:
        events = (line for line in reply.iter_lines() if line)
        for _ in range(tokens):
            next(events)


def test_usage_goes_to_postgresql_and_waits_while_that_is_away(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16"))
    with serving() as server:
        place = server.database()

        def asked(count: int) -> bool:
            """Without taking in anything: that is the endpoint's task."""
            with opened(store.root, place) as database:
                found = {each.group["client"]: each.requests for each in sums(database, ALWAYS, ["client"])}
            return found == {ANYBODY: count, OWN: 2}

        said = serve(store, **{URL_VARIABLE: place})
        assert said.returncode == 0, said.stderr
        url = said.stdout.strip()
        ask(url, 3)
        wait_until(lambda: asked(3), "the usage")
        server.stop()
        ask(url, 3)
        log = store.path / "endpoint.log"
        wait_until(lambda: "the usage is not taken in at the moment" in log.read_text(), "the failure")
        assert healthy(url)
        ask(url, 3)
        server.start()
        wait_until(lambda: asked(9), "the usage")
    for secret in (PASSWORD, ENCODED):
        assert not processes_with(secret)
        files = [
            path for path in store.path.rglob("*") if path.is_file() and secret in path.read_text(errors="replace")
        ]
        assert files == []
    assert not [each for each in server_of(store) if URL_VARIABLE in each.environ()]
    assert not (store.root / "usage.db").exists()


def test_a_url_that_cannot_be_used_is_refused_before_anything_is_started(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16"))
    said = serve(store, **{URL_VARIABLE: f"mysql://u:{ENCODED}@host/usage"})
    assert said.returncode == 2
    assert "does not begin with postgresql://" in said.stderr
    assert ENCODED not in said.stderr
    assert endpoint(store) is None


def test_what_servers_count_over_cut_streams_and_restarts_is_somebodys(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16", token_s=TOKEN_S))
    url = serve(store).stdout.strip()
    ask(url, 2)
    cut(url, 4)
    wait_until(lambda: tokens(store).get(ANYBODY, (0, 0))[0] == 9, "the cut stream's line")
    wait_until(lambda: UNATTRIBUTED in tokens(store), "the next reading")
    before = tokens(store)
    assert before[ANYBODY][1] >= 10 + 4
    assert before[OWN] == (6, 2), "the completions that showed that it is up, of the supervisor and of the rollout"
    (server,) = [each for each in server_of(store) if each.name() != "guard" and not each.children()][:1]
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: healthy(url), "the restart")
    ask(url, 2)
    assert serve(store, "--stop").returncode == 0
    after = tokens(store)
    assert after[ANYBODY] == (before[ANYBODY][0] + 6, before[ANYBODY][1] + 10)
    assert after[OWN] == (9, 3)
    assert after[UNATTRIBUTED] == before[UNATTRIBUTED]
    assert after[UNATTRIBUTED][0] == 0, "the prompt of the cut stream is known"


def test_what_a_rollout_asks_is_its_own(store: ModelStore) -> None:
    publish(store, 1, stand_in_variant(store, "fp16", token_s=TOKEN_S))
    url = serve(store).stdout.strip()
    ask(url)
    publish(store, 2, stand_in_variant(store, "awq", token_s=TOKEN_S, another="model"))
    said = serve(store)
    assert said.returncode == 0, said.stderr
    assert serve(store).returncode == 0, "and the answer that shows that nothing has to be done"
    assert serve(store, "--stop").returncode == 0
    found = used(store)
    assert found.keys() == {ANYBODY, OWN}
    assert found[ANYBODY].requests == 1
    assert found[OWN].requests >= 2 + 2 + 10, "starts, first answers, and a step with five requests to each release"
