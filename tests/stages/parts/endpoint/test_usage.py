"""Every request is counted once, whatever is interrupted, in SQLite and in PostgreSQL."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import socketserver
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.errors import ConfigError, TransientError
from stages.parts.endpoint import access_log, usage
from stages.parts.endpoint.clients import NOBODY, OWN, UNATTRIBUTED
from stages.parts.endpoint.database import check_url, opened
from stages.parts.endpoint.metering import Meter
from stages.parts.endpoint.usage import EndpointPrice, rotate, sums, take_in
from stages.parts.vllm.client import socket_of
from stages.parts.vllm.prometheus import GENERATED_TOKENS, PROMPT_TOKENS
from tests.serving import wait_until
from tests.stages.parts.endpoint.postgresql import PASSWORD, PostgreSQL, serving
from tests.stages.parts.endpoint.test_clients import MODEL, Front, front

__all__ = ["front"]
ALWAYS = datetime(2000, 1, 1, tzinfo=UTC)


def line(number: int, **changed: Any) -> str:
    told = {
        "id": str(number),
        "at": f"{datetime.now(UTC).timestamp():.6f}",
        "model": MODEL,
        "client": "a",
        "release": "r1",
        "path": "/v1/completions",
        "status": 200,
        "flags": "-",
        "ttft_ms": number,
        "duration_ms": 10 * number,
        "prompt_tokens": 7,
        "output_tokens": 3,
    } | changed
    return json.dumps({name: value for name, value in told.items() if value is not None}) + "\n"


class Place:
    """A store with the log of one endpoint, and where its usage goes."""

    def __init__(self, root: Path, url: str = "") -> None:
        self.root, self.url, self.folder = root, url, root / "org--name" / "serving"
        self.folder.mkdir(parents=True)
        self.log = self.folder / access_log.NAME

    def write(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)

    def take(self, *, remove: bool = True) -> int:
        with opened(self.root, self.url) as database:
            return take_in(database, self.folder, remove=remove)

    def sums(self, *by: str, since: datetime = ALWAYS, price: EndpointPrice | None = None) -> list[usage.Sum]:
        with opened(self.root, self.url) as database:
            return sums(database, since, by, price)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``slipway usage``."""
        command = [sys.executable, "-m", "pipeline", "usage", "--store", str(self.root), *arguments]
        variables = os.environ | ({"SLIPWAY_USAGE_URL": self.url} if self.url else {})
        return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)

    def files(self) -> list[str]:
        return sorted(each.name for each in self.folder.iterdir())


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    with serving() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    server = request.getfixturevalue("postgresql") if request.param == "postgresql" else None
    return Place(tmp_path, server.database() if server else "")


def test_a_line_is_taken_once_and_only_when_it_is_whole(place: Place) -> None:
    text = line(1)
    place.write(text[:20])
    assert place.take() == 0
    place.write(text[20:])
    assert [place.take(), place.take()] == [1, 0]
    place.write(line(2) + line(3)[:-5])
    assert [place.take(), place.take()] == [1, 0]
    (found,) = place.sums()
    assert (found.requests, found.prompt_tokens, found.output_tokens) == (2, 14, 6)


def test_a_database_of_an_earlier_version_is_kept(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "usage.db")) as before:
        columns = "id TEXT, at REAL, client TEXT, model TEXT, release TEXT, path TEXT, status INTEGER, flags TEXT"
        figures = "prompt_tokens INTEGER, cached_tokens INTEGER, output_tokens INTEGER, ttft_ms REAL, duration_ms REAL"
        before.execute(f"CREATE TABLE requests ({columns}, {figures})")
        before.execute(
            "INSERT INTO requests (id, at, client, model, path, status, duration_ms) "
            "VALUES ('0', 1.8e9, 'search', 'org/name', '/v1/completions', 200, 1)"
        )
        before.commit()
    place.write(line(1))
    assert place.take() == 1
    assert sum(total.requests for total in place.sums()) == 2
    assert len(place.sums("client", price=EndpointPrice(1.0, "tokens", datetime.now(UTC)))) == 2


def test_a_shared_database_of_an_earlier_version_is_kept(tmp_path: Path, postgresql: PostgreSQL) -> None:
    place = Place(tmp_path, postgresql.database())
    place.write(line(1))
    place.take()
    with opened(place.root, place.url) as database:
        for table in ("requests", "counted"):
            database.execute(f"ALTER TABLE {table} DROP COLUMN endpoint")
    place.write(line(2))
    assert place.take() == 1
    assert place.sums()[0].requests == 2


def test_what_was_being_taken_when_it_was_interrupted_is_taken_whole_afterwards(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("".join(line(number) for number in range(100)))

    def interrupted(text: bytes) -> access_log.LoggedRequest | access_log.Reading | None:
        request = parsed(text)
        if request and request.id == "50":
            raise KeyboardInterrupt
        return request

    parsed = access_log.parsed
    monkeypatch.setattr(access_log, "parsed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        place.take()
    monkeypatch.undo()
    assert place.sums() == []
    place.take()
    assert place.sums()[0].requests == 100


def test_several_that_take_at_the_same_time_take_each_line_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "CHUNK_BYTES", 1000)
    place.write("".join(line(number) for number in range(300)))
    takers = [threading.Thread(target=place.take) for _ in range(4)]
    for each in takers:
        each.start()
    for each in takers:
        each.join()
    assert place.sums()[0].requests == 300


def test_stores_that_share_a_database_take_their_own_lines_at_the_same_time(
    tmp_path: Path, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "CHUNK_BYTES", 1000)
    url = postgresql.database()
    places = [Place(tmp_path / str(number), url) for number in range(3)]
    for number, each in enumerate(places):
        each.write("".join(line(1000 * number + count, client=f"c{number}") for count in range(200)))
        rotate(each.folder, 0)
        each.write(line(1000 * number + 200, client=f"c{number}"))
    takers = [threading.Thread(target=each.take, kwargs={"remove": n > 0}) for each in places for n in range(3)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert {each.group["client"]: each.requests for each in places[0].sums("client")} == dict.fromkeys(
        ("c0", "c1", "c2"), 201
    )
    assert {len(each.files()) for each in places} == {1}


def test_whoever_asks_removes_no_file_before_the_endpoint_has_taken_it_in(tmp_path: Path) -> None:
    asked, place = Place(tmp_path), Place(tmp_path / "endpoint")
    place.write(line(1))
    rotate(place.folder, 0)
    place.write(line(2))
    with opened(asked.root) as database:
        assert take_in(database, place.folder) == 2
    assert place.take() == 2


def test_a_file_that_is_removed_while_another_waits_for_it_is_not_taken_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write(line(1))
    rotate(place.folder, 0)
    place.write(line(2))
    taken = usage._key

    def overtaken(first: bytes) -> str:
        """It is read and removed by another one between being opened and being locked."""
        monkeypatch.setattr(usage, "_key", taken)
        place.take()
        return taken(first)

    monkeypatch.setattr(usage, "_key", overtaken)
    place.take()
    assert place.sums()[0].requests == 2


def test_nothing_is_lost_while_the_database_is_away_and_its_password_is_not_told(tmp_path: Path) -> None:
    with serving() as server:
        place = Place(tmp_path, server.database())
        place.write(line(1))
        place.take()
        server.stop()
        place.write(line(2))
        rotate(place.folder, 0)
        place.write(line(3))
        with pytest.raises(TransientError, match=r"usage database can't be reached: .*127\.0\.0\.1"):
            place.take()
        said = place.command()
        assert (said.returncode, said.stdout) == (75, "")
        assert "usage database can't be reached" in said.stderr
        assert PASSWORD not in said.stderr
        assert "nobody-may-see" not in said.stderr
        assert len(place.files()) == 2
        server.start()
        assert place.take() == 2
        assert place.sums()[0].requests == 3
        wrong = Place(tmp_path / "another", server.url(password="another-secret"))
        said = wrong.command()
        assert "password authentication failed" in said.stderr
        assert "another-secret" not in said.stderr


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:SECRET@1@host/db",
        "postgresql://u:SECRET/1@host/db",
        "postgresql://u:SECRET%zz@host/db",
        "mysql://u:SECRET@host/db",
        "host=h password=SECRET",
    ],
)
def test_a_url_that_is_not_valid_is_refused_without_telling_it(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_url(url)
    assert "SECRET" not in refused.value.render()
    assert refused.value.__cause__ is None


def test_a_finished_file_is_read_to_its_end_before_it_is_removed(place: Place) -> None:
    place.write(line(1))
    place.take()
    place.write(line(2))
    assert rotate(place.folder, limit=10)
    with next(place.folder.glob("access.*.jsonl")).open("a") as envoy:  # which has not opened the next one
        assert place.take() == 1
        assert len(place.files()) == 1
        envoy.write(line(3))
    place.write(line(4))
    assert place.take() == 2
    assert place.files() == [access_log.NAME]
    assert place.sums()[0].requests == 4
    assert not rotate(place.folder)


def test_the_beginning_of_a_line_that_a_killed_envoy_left_spoils_no_other(place: Place) -> None:
    place.write(line(1) + line(2)[:30])
    assert rotate(place.folder, 0)
    place.write(line(3))
    place.take()
    assert place.sums()[0].requests == 2
    assert place.files() == [access_log.NAME]


def test_sums_are_by_what_is_asked_for_and_since_when(place: Place) -> None:
    long_ago = f"{(datetime.now(UTC) - timedelta(days=2)).timestamp():.6f}"
    place.write(line(1, cached_tokens=5) + line(2) + line(3, client="b", prompt_tokens=100) + line(4, at=long_ago))
    place.write(line(5, client=None, status=401, prompt_tokens=None, output_tokens=None, release=None))
    place.write(line(6, status=503, prompt_tokens=None, output_tokens=None) + line(7, status=0, prompt_tokens=None))
    place.write(line(8, prompt_tokens=None, output_tokens=None) + line(9, path="/metrics", status=404))
    place.write(line(10, path="/v1/models", prompt_tokens=None, output_tokens=None))
    place.take()
    first, second, third = place.sums("client", since=datetime.now(UTC) - timedelta(hours=1))
    assert (first.group, first.requests, first.prompt_tokens) == ({"client": "b"}, 1, 100)
    assert (second.group, second.requests, second.failed, second.unknown) == ({"client": "a"}, 6, 2, 1)
    assert (second.prompt_tokens, second.cached_tokens, second.output_tokens) == (14, 5, 9)
    assert (third.group, third.requests, third.refused) == ({"client": NOBODY}, 1, 1)
    assert place.sums()[0].requests == 9, "what is not offered is not counted"


class Counting(BaseHTTPRequestHandler):
    """Says what a server of vLLM has counted."""

    def do_GET(self) -> None:
        counts = zip((PROMPT_TOKENS, GENERATED_TOKENS), self.server.tokens, strict=True)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.wfile.write("".join(f"{name} {count}\n" for name, count in counts).encode())

    def log_message(self, *_: object) -> None:
        pass


class Counted(socketserver.UnixStreamServer):
    tokens = (7, 3)

    @property
    def url(self) -> str:
        return f"unix://localhost{self.server_address!s}"


@contextlib.contextmanager
def counting() -> Iterator[Counted]:
    with tempfile.TemporaryDirectory() as folder, Counted(f"{folder}/vllm.sock", Counting) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


def reading(at: datetime, prompt: int, output: int, server: str = "s1") -> str:
    counted = access_log.Reading(
        server=server, at=at.timestamp(), model=MODEL, release="r1", prompt_tokens=prompt, output_tokens=output
    )
    return counted.model_dump_json() + "\n"


def test_what_servers_counted_and_no_request_tells_is_unattributed(place: Place) -> None:
    now = datetime.now(UTC)
    begun, hour, quarter = (now - timedelta(minutes=minutes) for minutes in (120, 60, 15))

    def used(at: datetime, tokens: int, **changed: Any) -> str:
        told = {"at": f"{at.timestamp():.6f}", "duration_ms": 1000, "server": "s1"}
        return line(int(at.timestamp()), **{**told, "prompt_tokens": tokens, "output_tokens": tokens, **changed})

    place.write(reading(begun, 1, 1) + used(begun, 1, client="slipway", duration_ms=0))
    place.write(used(begun + timedelta(minutes=5), 10) + reading(hour, 11, 14))
    place.write(used(hour + timedelta(minutes=5), 20) + reading(quarter, 31, 34))
    place.write(used(quarter + timedelta(minutes=5), 30))
    another = reading(begun, 0, 0, "s2") + reading(quarter, 5, 0, "s2")  # another start, which counts from 0
    access_log.leave(place.folder, access_log.Reading.model_validate_json(reading(hour, 11, 14)))
    place.write(another)
    place.take()

    def left(since: datetime) -> tuple[int, int]:
        found = {each.group["client"]: each for each in place.sums("client", since=since)}
        each = found.get(UNATTRIBUTED)
        return (each.prompt_tokens, each.output_tokens) if each else (0, 0)

    assert left(ALWAYS) == (5, 3), "the last request ended after the last reading"
    assert left(hour + timedelta(minutes=1)) == (5, 0)
    assert left(quarter + timedelta(minutes=1)) == (0, 0)
    (whole,) = place.sums("model")
    assert (whole.requests, whole.prompt_tokens, whole.output_tokens) == (4, 61 + 5, 61 + 3)
    (row,) = [each for each in json.loads(place.command("--since", "3h", "--json").stdout) if not each["requests"]]
    assert (row["client"], row["model"], row["output_tokens"]) == (UNATTRIBUTED, MODEL, 3)
    assert UNATTRIBUTED in place.command("--since", "3h", "--by", "client,path").stdout


def test_what_is_counted_before_its_end_is_logged_is_not_counted_twice(place: Place, tmp_path: Path) -> None:
    with counting() as server:
        meter = Meter(place.folder, MODEL, "r1", server.url)
        meter.read()
        server.tokens = 17, 13
        meter.read()
        time.sleep(0.01)
        place.write(line(1, duration_ms=1, prompt_tokens=10, output_tokens=10, server=socket_of(server.url)))
        time.sleep(0.01)
        meter.read()
        place.take()
        assert {each.group["client"]: (each.prompt_tokens, each.output_tokens) for each in place.sums("client")} == {
            "a": (10, 10),
            OWN: (7, 3),
        }
        meter.read()
        assert place.take() == 0, "nothing has changed"


def test_what_was_under_way_when_a_period_began_is_never_less_than_nothing(place: Place) -> None:
    now = datetime.now(UTC)
    begun = now - timedelta(minutes=10)
    place.write(reading(begun, 7, 2))
    place.write(line(1, at=f"{(begun - timedelta(seconds=5)).timestamp():.6f}", duration_ms=10_000, server="s1"))
    place.write(reading(begun + timedelta(seconds=30), 7, 3))
    place.take()
    assert [each.group["client"] for each in place.sums("client", since=begun)] == []
    assert [each.group["client"] for each in place.sums("client")] == ["a"]


def test_the_95th_percentile_is_of_answers_and_of_their_first_tokens(place: Place) -> None:
    place.write("".join(line(number) for number in range(1, 101)))
    place.write(line(5000, status=500, output_tokens=None))
    place.take()
    (found,) = place.sums()
    assert (found.ttft_p95_ms, found.duration_p95_ms) == (95, 950)


def test_a_price_is_shared_by_tokens_or_by_time(place: Place) -> None:
    now = datetime.now(UTC)
    told = {"at": f"{(now - timedelta(hours=2)).timestamp():.6f}", "prompt_tokens": 29, "output_tokens": 1}
    place.write(line(1, **told) + line(3, client="b", prompt_tokens=9, output_tokens=1))
    place.take()
    assert [total.cost for total in place.sums("client")] == [None, None]
    assert costs(place.sums("client", price=EndpointPrice(4.0, "tokens", now))) == pytest.approx([6.0, 2.0], abs=1e-3)
    assert costs(place.sums("client", price=EndpointPrice(4.0, "time", now))) == pytest.approx([2.0, 6.0], abs=1e-3)
    assert place.sums("client", since=now + timedelta(hours=1), price=EndpointPrice(4.0, "tokens", now)) == []
    (place.root / "priced.yaml").write_text("extends: local\nprice_per_hour: 2.0\n")
    (place.root / "config.yaml").write_text("serving: {replicas: 2}\n")
    said = place.command(
        "--platform", str(place.root / "priced.yaml"), "--config", str(place.root / "config.yaml"), "--json"
    )
    assert [round(each["cost"]) for each in json.loads(said.stdout)] == [6, 2], said.stderr


def test_each_machine_and_each_model_on_it_is_charged_for_its_own_hours(tmp_path: Path, postgresql: PostgreSQL) -> None:
    """Two machines share a database; the first serves two models, one of which both serve."""
    url, now = postgresql.database(), datetime.now(UTC)
    hours = {("one", MODEL): 4, ("one", "org/other"): 1, ("two", MODEL): 2}
    for (machine, model), ago in hours.items():
        endpoint = Place(tmp_path / machine / model, url)
        begun = f"{(now - timedelta(hours=ago)).timestamp():.6f}"
        endpoint.write(line(1, at=begun, model=model) + line(2, at=begun, model=model, client=machine))
        endpoint.take()
    price = EndpointPrice(3.0, "tokens", now)
    by_model = {total.group["model"]: total.cost for total in endpoint.sums("model", price=price)}
    assert by_model == pytest.approx({MODEL: 18.0, "org/other": 3.0}, abs=1e-3)
    by_client = {total.group["client"]: total.cost for total in endpoint.sums("client", price=price)}
    assert by_client == pytest.approx({"a": 10.5, "one": 7.5, "two": 3.0}, abs=1e-3)


def costs(totals: list[usage.Sum]) -> list[float]:
    return [total.cost or 0.0 for total in totals]


def test_sums_equal_what_the_server_answered_over_rotation_and_streams_that_were_cut(front: Front) -> None:
    keys = {name: front.add(name) for name in ("a", "b")}
    for number in range(40):
        name = "ab"[number % 2]
        assert front.ask(keys[name], stream=number % 3 == 0).status_code == 200
    front.give_up(keys["a"])
    front.ask("wrong")
    front.logged(42)
    with opened(front.root) as database:
        take_in(database, front.files)
        assert rotate(front.files, limit=10)
        front.proxy.admin.ask("POST", "/reopen_logs")
        for _ in range(5):
            assert front.ask(keys["b"]).status_code == 200
        front.logged(5)
        wait_until(lambda: take_in(database, front.files) == 0, "the end of what there is")
        found = {each.group["client"]: each for each in sums(database, ALWAYS, ["client"])}
    assert {name: each.requests for name, each in found.items()} == {"a": 21, "b": 25, NOBODY: 1}
    assert {name: (each.prompt_tokens, each.output_tokens) for name, each in found.items()} == {
        "a": (140, 60),
        "b": (175, 75),
        NOBODY: (0, 0),
    }
    assert (found["a"].failed, found["a"].unknown, found[NOBODY].refused) == (1, 0, 1)


def test_the_command_prints_a_table_json_and_csv(place: Place) -> None:
    place.write(line(1) + line(2, client="b"))

    def said(*arguments: str) -> str:
        found = place.command(*arguments)
        assert found.returncode == 0, found.stderr
        return found.stdout

    assert "org/name" in said()
    assert [each["client"] for each in json.loads(said("--by", "client", "--json"))] == ["a", "b"]
    (row,) = csv.DictReader(io.StringIO(said("--by", "model", "--csv")))
    assert (row["model"], row["requests"], row["prompt_tokens"]) == (MODEL, "2", "14")
    assert "no requests since" in said("--since", "2999-01-01")
