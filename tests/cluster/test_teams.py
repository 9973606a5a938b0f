"""Teams by tokens of an issuer, and what they used, on the cluster of KUBECONFIG (``make test-cluster``).

It needs KServe, and Envoy Gateway with ``rateLimit`` and ``enableLua``, whose Gateway kserve/kserve-ingress-gateway
names the EnvoyProxy slipway-usage. SLIPWAY_TEST_USAGE_URL is a PostgreSQL database that its pods and this machine
reach. Redis must not know an earlier time, whose budgets of the month are used up.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import yaml

from benchmarks import proxy
from stages.parts.cluster.kinds import PODS, SECRETS
from stages.parts.endpoint.clients import UNATTRIBUTED
from stages.parts.endpoint.database import URL_VARIABLE
from stages.rollout.kserve.applied import HTTP_ROUTES
from tests.cluster.conftest import Place, Tell
from tests.cluster.test_conformance import GATEWAYS, OURS, kserve, succeeded
from tests.demo import MODEL
from tests.manifests.gateway_bench import Issuer, running

URL = "SLIPWAY_TEST_USAGE_URL"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.e2e,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs a cluster: set KUBECONFIG"),
    pytest.mark.skipif(URL not in os.environ, reason=f"needs a PostgreSQL: set {URL}"),
    pytest.mark.usefixtures("kserve"),
]
__all__ = ["kserve"]
PROXIES = "envoy-gateway-system"
FLOOD_TURNS = 4
SETTLED_S = 20.0
"""After which the servers' counts are taken in."""
OWNED = "gateway.envoyproxy.io/owning-gateway-name=kserve-ingress-gateway"


@pytest.fixture(scope="module")
def issuer(place: Place, address: str, monkeypatch_module: pytest.MonkeyPatch) -> Iterator[Issuer]:
    """An issuer of tokens, whose clients the platform names; two have a month's budget that one answer uses."""
    monkeypatch_module.setenv(URL_VARIABLE, os.environ[URL])
    with running(made := Issuer("0.0.0.0")):  # noqa: S104
        keys = f"http://{address}:{made.server_address[1]}/keys"
        tokens = {"issuer": made.url, "jwks_uri": keys, "audiences": ["slipway"], "claim": "team"}
        clients = [
            {"name": "search", "cache_salt": "s" * 24},
            {"name": "reports", "tokens_per_month": 1},
            {"name": "ads", "money_per_month": 0.001},
            {"name": "burst", "requests_per_minute": proxy.LIMITS["requests_per_minute"]},
            {"name": "spread", "requests_per_second": proxy.LIMITS["requests_per_minute"] // 60},
        ]
        prices = {"default": {"prompt": 1000, "output": 1000}}
        document = {"tokens": tokens, "prices": prices, "clients": clients}
        (place.folder / "clients.yaml").write_text(yaml.safe_dump(document))
        platform = yaml.safe_load((place.folder / "platform.yaml").read_text())
        platform["cluster"]["clients"] = {"file": "clients.yaml", "usage_secret": "slipway-usage-test"}
        (place.folder / "platform.yaml").write_text(yaml.safe_dump(platform))
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "slipway-usage-test", "namespace": PROXIES},
            "data": {"url": base64.b64encode(os.environ[URL].encode()).decode()},
        }
        place.cluster.apply(SECRETS, secret, PROXIES)
        place.answer("install")
        succeeded(place.ended(place.submit(MODEL, "--set", "optimize.variants=[fp16]")))
        yield made


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def endpoint(place: Place) -> tuple[str, str]:
    """The gateway's address, and the model's host name."""
    routes, _ = place.cluster.list(HTTP_ROUTES, labels=OURS)
    host = next(each for each in routes if each["metadata"]["name"].endswith("-route"))["spec"]["hostnames"][0]
    gateway = place.cluster.get(GATEWAYS, "kserve-ingress-gateway", "kserve")["status"]["addresses"][0]["value"]
    return f"http://{gateway}", host


def ask(place: Place, token: str, **body: Any) -> httpx.Response:
    gateway, host = endpoint(place)
    told = {"model": MODEL, "prompt": "What is a list?", "max_tokens": 8} | body
    headers = {"Host": host} | ({"Authorization": f"Bearer {token}"} if token else {})
    return httpx.post(f"{gateway}/v1/completions", json=told, headers=headers, timeout=120)


@dataclass(frozen=True)
class Way(proxy.Way):
    """Through the gateway."""

    host: str = ""

    def client(self) -> httpx.AsyncClient:
        client = super().client()
        client.headers["Host"] = self.host
        return client


def answers(place: Place, token: str) -> bool:
    """Whether the gateway answers, which it does not while its proxies start again."""
    with contextlib.suppress(httpx.TransportError):
        return ask(place, token).status_code == 200
    return False


def proxies(place: Place) -> set[str]:
    return {pod["metadata"]["name"] for pod in place.cluster.list(PODS, PROXIES, labels=OWNED)[0]}


def usage(place: Place, since: str) -> dict[str, dict[str, Any]]:
    rows = place.answer("usage", "--since", since, "--by", "client")
    return {row["client"]: row for row in rows}


def test_usage_is_what_vllm_counted_with_the_gateway_restarted_in_between(
    place: Place, issuer: Issuer, tell: Tell
) -> None:
    told = {"prompt_tokens": 0, "completion_tokens": 0}
    token = issuer.sign(team="search", exp=time.time() + 3600)
    place.until(lambda: answers(place, token), 300)
    # What the servers had counted before is unattributed.
    place.until(lambda: UNATTRIBUTED in usage(place, "2026-01-01") and usage(place, "2026-01-01").get("search"), 120)
    time.sleep(SETTLED_S)
    since, before = datetime.now(UTC).isoformat(), proxies(place)
    for number in range(100):
        if number == 50:
            for name in before:
                place.cluster.delete(PODS, name, PROXIES)
            place.until(lambda: not before & proxies(place), 400)  # which answer until they have drained
            place.until(lambda: answers(place, token), 300)
        answer = ask(place, token, max_tokens=4 + number % 8, ignore_eos=True)
        answer.raise_for_status()
        for field in told:
            told[field] += answer.json()["usage"][field]
    place.until(lambda: usage(place, since)["search"]["output_tokens"] >= told["completion_tokens"], 60)
    time.sleep(SETTLED_S)
    rows = usage(place, since)
    lost = {field: rows.get(UNATTRIBUTED, {}).get(field, 0) for field in ("prompt_tokens", "output_tokens")}
    counted = {field: sum(row[field] for row in rows.values()) for field in lost}
    assert counted["output_tokens"] >= told["completion_tokens"]
    assert all(lost[field] <= 0.005 * counted[field] for field in lost), rows
    tell("usage over a restart of the gateway", f"counted by vLLM {counted}, of it unattributed {lost}")


def test_who_has_no_token_is_refused(place: Place, issuer: Issuer) -> None:
    assert [ask(place, token).status_code for token in ("", issuer.sign(team="search", exp=1))] == [401, 401]
    assert ask(place, issuer.sign(team="nobody")).status_code == 403


@pytest.mark.parametrize("team", ["reports", "ads"])
def test_a_months_budget_of_tokens_or_money_ends(place: Place, issuer: Issuer, tell: Tell, team: str) -> None:
    token = issuer.sign(team=team, exp=time.time() + 3600)
    place.until(lambda: answers(place, token), 300)
    refused = place.until(lambda: (answer := ask(place, token)).status_code == 429 and answer, 60)
    assert "per month is used up" in refused.json()["error"]["message"]
    tell(f"a month's budget, of {team}", refused.json()["error"]["message"])


def test_what_is_beyond_a_seconds_requests_may_be_asked_in_the_next(place: Place, issuer: Issuer, tell: Tell) -> None:
    token = issuer.sign(team="spread", exp=time.time() + 3600)

    def both() -> list[httpx.Response]:
        return sorted((ask(place, token, max_tokens=1) for _ in range(2)), key=lambda answer: answer.status_code)

    place.until(lambda: answers(place, token), 300)
    # Two fall into one second of the clock but for a few times.
    _, refused = place.until(lambda: (two := both())[1].status_code == 429 and two, 60)
    assert "per second" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "1"
    time.sleep(1)
    assert ask(place, token).status_code == 200
    tell("more requests than those of a second", f"{refused.status_code}, Retry-After: 1")


@pytest.mark.parametrize(("team", "times"), [("spread", 10), ("spread", 30), ("burst", 10)])
def test_a_flood_of_one_team_is_refused_and_another_is_answered(
    place: Place, issuer: Issuer, tell: Tell, monkeypatch: pytest.MonkeyPatch, team: str, times: int
) -> None:
    """The 60 requests that pass are spread over the minute, or come at its beginning, as minutes are the clock's."""
    monkeypatch.setattr(proxy, "FLOOD", times)
    gateway, host = endpoint(place)
    modest, flood = (
        Way(name, gateway, issuer.sign(team=name, exp=time.time() + 3600), model=MODEL, host=host)
        for name in ("search", team)
    )
    place.until(lambda: answers(place, modest.key), 300)
    alone: list[proxy.Turn] = []
    beside: list[proxy.Turn] = []
    for number in range(FLOOD_TURNS):
        for way in (None, flood) if number % 2 == 0 else (flood, None):
            (beside if way else alone).append(asyncio.run(proxy.flooded(modest, way)))
    sent = round(proxy.FLOOD_TURN_S * proxy.flood_per_s())
    assert all(0.75 * sent < turn.refused < sent for turn in beside), beside
    ratios = [its.p95 / quiet.p95 for quiet, its in zip(alone, beside, strict=True)]
    tell(
        f"a flood by another team ({team}), {times} times its limit",
        f"p95 to the first token {proxy.together(alone).p95:.0f} ms alone, {proxy.together(beside).p95:.0f} ms in it, "
        f"{proxy.together(beside).p95 / proxy.together(alone).p95:.2f} times; "
        f"turn by turn {', '.join(f'{ratio:.2f}' for ratio in ratios)}",
    )
