"""Who asks by a token, and what is kept of a cluster's requests: by the real Envoy, a real issuer and PostgreSQL."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from stages.parts.endpoint import access_log, gateway_log, metering
from stages.parts.endpoint.clients import NOBODY, UNATTRIBUTED
from stages.parts.endpoint.database import opened
from stages.parts.endpoint.usage import Sum, sums
from tests.manifests.gateway_bench import Gateway, Issuer, Server, running
from tests.manifests.test_gateway_clients import rendered
from tests.serving import wait_until
from tests.stages.parts.endpoint.postgresql import serving

HEADER = "x-slipway-client"
SALT = "q83v7t1Xz0_a2b4c6d8e"
BY_TOKEN = """
tokens: {{issuer: "{url}", jwks_uri: "{url}/keys", audiences: [slipway], claim: team}}
clients:
  - {{name: search, value: Team/Search, models: [org/name], priority: -1}}
  - {{name: reports}}
"""
BY_KEY = f"""
prices: {{default: {{prompt: 1000, output: 3000}}, models: {{org/dear: {{prompt: 5000, output: 10000}}}}}}
clients:
  - {{name: search, secret: keys, money_per_month: 500, cache_salt: {SALT}}}
  - {{name: reports, secret: keys, tokens_per_month: 1000000}}
"""


@contextlib.contextmanager
def importing(folder: Path, url: str) -> Iterator[None]:
    """What runs beside the proxy."""
    ended = threading.Event()
    servers = gateway_log.GatewayServers(folder)
    arguments = (lambda: gateway_log.take_in(folder, url, servers), ended)
    thread = threading.Thread(target=metering.keep_importing, args=arguments, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)


@pytest.fixture
def server() -> Iterator[Server]:
    with running(made := Server()):
        yield made


@contextlib.contextmanager
def gateway(folder: Path, text: str, server: Server) -> Iterator[Gateway]:
    found = rendered(folder, text, namespace="slipway", usage_secret="database")
    made = Gateway(folder, found, server)
    with made.up():
        yield made
    assert "script log" not in (folder / "envoy.log").read_text()


def lines(made: Gateway, count: int) -> list[dict[str, Any]]:
    def there() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in made.log.read_text().splitlines()] if made.log.exists() else []
        return found if len(found) >= count else []

    return wait_until(there, f"{count} lines in the log")


def test_a_signed_token_says_who_asks(tmp_path: Path, server: Server) -> None:
    with running(issuer := Issuer()), gateway(tmp_path, BY_TOKEN.format(url=issuer.url), server) as made:
        wait_until(lambda: issuer.asked, "the issuer's keys")
        good = issuer.sign(team="Team/Search")
        wait_until(lambda: made.ask(good).status_code == 200, "the keys in force")
        assert made.ask(good, {HEADER: "reports"}).status_code == 200
        told, _ = server.asked[-1]
        assert {name.lower(): value for name, value in told.items()}.keys() & {"authorization"} == set()
        assert (told[HEADER], told["x-vllm-priority"]) == ("Team/Search", "-1"), "not what the client itself says"
        before = len(server.asked)
        wrong = [
            "",
            issuer.sign(rsa.generate_private_key(public_exponent=65537, key_size=2048), team="Team/Search"),
            issuer.sign(team="Team/Search", exp=1),
            issuer.sign(team="Team/Search", aud="another"),
            issuer.sign(team="Team/Search", iss="https://another"),
            jwt.encode({"iss": issuer.url, "aud": "slipway", "team": "Team/Search"}, "x" * 32, algorithm="HS256"),
        ]
        refused = [made.ask(each, {HEADER: "Team/Search"}).status_code for each in wrong]
        assert refused == [401, 401, 401, 403, 401, 401]
        assert len(server.asked) == before
        made.ask(issuer.sign(team="reports"))
        made.ask(issuer.sign(sub="no team"), {HEADER: "Team/Search"})
        assert HEADER not in server.asked[-1][0], "which the policy refuses"
        names = [each["client"] for each in lines(made, before + 8)]
    assert names == ["search"] * before + [None] * 6 + ["reports", NOBODY]


def test_policies_for_tokens_ask_for_no_keys(tmp_path: Path) -> None:
    found = rendered(tmp_path, BY_TOKEN.format(url="https://login.example.com"))
    security = found["SecurityPolicy"]["spec"]
    assert "apiKeyAuth" not in security
    names = [rule["principal"]["headers"][0]["values"] for rule in security["authorization"]["rules"]]
    assert {value for each in names for value in each} == {"Team/Search", "reports"}
    assert not [name for name in found if name.startswith("Secret")]


def test_a_salt_is_added_whatever_the_client_says(tmp_path: Path, server: Server) -> None:
    with gateway(tmp_path, BY_KEY, server) as made:
        for client in ("search", "reports"):
            for body in ({}, {"cache_salt": "mine"}, {"prompt": "é}" * 9000, "stream": True}):
                assert made.ask(headers={HEADER: client}, **body).status_code == 200
    salts = [json.loads(text).get("cache_salt") for _, text in server.asked]
    assert salts == [SALT] * 3 + [None, "mine", None]


def test_money_is_counted_by_the_dearest_model_that_an_answer_names(tmp_path: Path, server: Server) -> None:
    """In ten-thousandths; 4 tokens in and 3 out cost 0.013 by the default prices, and 0.05 by the dear ones."""
    with gateway(tmp_path, BY_KEY, server) as made:
        for body in ({}, {"model": "org/dear"}, {"model": "org/dear", "metadata": {"model": "x"}, "stream": True}):
            made.ask(headers={HEADER: "search"}, **body)
        assert [each["money"] for each in lines(made, 3)] == [130, 500, 500]


def usage_of(url: str, clients: Path, *arguments: str) -> list[dict[str, Any]]:
    """``slipway usage --engine argo``."""
    platform = clients.with_name("ours.yaml")
    platform.write_text(json.dumps({"extends": "gke", "cluster": {"clients": {"file": clients.name}}}))
    command = [sys.executable, "-m", "pipeline", "usage", "--engine", "argo", "--platform", str(platform), "--json"]
    said = subprocess.run(
        [*command, *arguments], env=os.environ | {"SLIPWAY_USAGE_URL": url}, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    found: list[dict[str, Any]] = json.loads(said.stdout)
    return found


def test_usage_is_what_servers_counted_over_restarts_of_everything(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway, the database, the importer and the server start again; one line is lost with a killed gateway."""
    monkeypatch.setattr(metering, "INTERVAL_S", 0.1)
    folder = tmp_path / "gateway"
    folder.mkdir()
    counted = [0, 0]

    def ask(made: Gateway, client: str, count: int, **body: Any) -> None:
        for number in range(count):
            told: dict[str, Any] = {"prompt": "x" * (5 + number), "max_tokens": 2 + number % 3}
            told["stream"] = number % 2 == 0
            assert made.ask(headers={HEADER: client}, **told, **body).status_code == 200
        counted[0], counted[1] = server.prompt, server.output

    with serving() as postgresql:
        url = postgresql.database()
        with importing(folder, url), gateway(folder, BY_KEY, server) as made:
            ask(made, "search", 20)
            httpx.get(f"{made.url}/v1/models")  # another application's
            postgresql.stop()
            ask(made, "reports", 10)
        postgresql.start()
        with importing(folder, url), gateway(folder, BY_KEY, server) as made:
            ask(made, "search", 5, model="adapter")
            first = tuple(counted)
            wait_until(lambda: total(url, folder)[:2] == first, "all of the first start")
            server.restart()
            wait_until(lambda: starts(url, folder) == 2, "the second start")  # which takes a real one far longer
            ask(made, "reports", 7)
            whole = (first[0] + counted[0], first[1] + counted[1])
            wait_until(lambda: total(url, folder)[:2] == whole, "all of both starts")
        assert unattributed(url, folder) == []
        rows = usage_of(url, folder / "clients.yaml", "--by", "client,model,month")
        month = f"{datetime.now(UTC):%Y-%m}"
        assert {(row["client"], row["model"], row["month"]): row["requests"] for row in rows} == {
            ("search", "org/name", month): 20,
            ("search", "adapter", month): 5,
            ("reports", "org/name", month): 17,
        }
        assert sum(row["cost"] for row in rows) == pytest.approx((1000 * whole[0] + 3000 * whole[1]) / 1e6)
        with opened(folder, url) as database:
            (release,) = sums(database, datetime(2000, 1, 1, tzinfo=UTC), ["release"])
        assert release.group == {"release": "0001-fp16"}
        with importing(folder, url), gateway(folder, BY_KEY, server) as made:
            ask(made, "search", 1)
            wait_until(lambda: total(url, folder)[2] == 43, "the line")
            server.prompt += 11  # what nobody's line has
            (lost,) = wait_until(lambda: unattributed(url, folder), "what was lost")
        assert (lost.prompt_tokens, lost.output_tokens) == (11, 0)
    assert access_log.files(folder)[:-1] == []


def by_client(url: str, folder: Path) -> list[Sum]:
    with opened(folder, url) as database:
        return sums(database, datetime(2000, 1, 1, tzinfo=UTC), ["client"])


def starts(url: str, folder: Path) -> int:
    with opened(folder, url) as database:
        return int(database.execute("SELECT count(DISTINCT server) FROM counted")[0][0])


def unattributed(url: str, folder: Path) -> list[Sum]:
    return [row for row in by_client(url, folder) if row.group["client"] == UNATTRIBUTED]


def total(url: str, folder: Path) -> tuple[int, int, int]:
    rows = by_client(url, folder)
    known = [row for row in rows if row.group["client"] != UNATTRIBUTED]
    return (
        sum(row.prompt_tokens for row in known),
        sum(row.output_tokens for row in known),
        sum(row.requests for row in rows),
    )
