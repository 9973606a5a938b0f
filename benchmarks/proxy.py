"""What Envoy costs with everything on, and whether one client's flood is felt by another.

    make bench-proxy

One vLLM server with the demo's model is asked in turns at its own socket, through the endpoint (keys, limits and usage
on) and through the same with TLS: requests per second with a fixed number at once, and the time to the first token.
Then one client asks at a modest rate, alone and while another one sends ten times its limit, in turns.

Prints milliseconds of one session on one machine; only the ratios are valid for other machines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import httpx

from stages.parts.base.store import ModelStore
from stages.parts.endpoint.clients import Client, add
from stages.parts.endpoint.door import Door
from stages.parts.endpoint.endpoint import Endpoint, Wanted, endpoint
from stages.parts.endpoint.envoy import proxying
from stages.parts.endpoint.routing import Backend, routing
from stages.parts.endpoint.tls import Tls
from stages.parts.vllm.client import credentials, socket_of, trusting
from stages.parts.vllm.server import reserved_port
from tests.demo import DEMO
from tests.serving import MODEL, SERVING, environment, publish, stage, variant_of

TURNS: Final = 24
REQUESTS: Final = 16
"""In each turn and on each way: turns are short, so that what else the machine does falls on all ways alike."""
AT_ONCE: Final = 4
PROMPT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 16
FLOOD_TURNS: Final = 4
FLOOD_TURN_S: Final = 60.0
"""As long as the limits' minute: in a shorter turn a client may use a whole minute's requests."""
MODEST_PER_S: Final = 2.0
PLENTY: Final[dict[str, Any]] = {
    "requests_per_minute": 1_000_000,
    "tokens_per_minute": 1_000_000_000,
    "requests_at_once": 1000,
}
LIMITS: Final[dict[str, Any]] = {"requests_per_minute": 60, "tokens_per_minute": 6000, "requests_at_once": 2}
"""The flooding client's."""
FLOOD: Final = 10
"""Times its requests per minute."""
BOUND: Final = 1.5
REQUEST_TIMEOUT_S: Final = 120.0
KEPT: Final = httpx.Limits(keepalive_expiry=60)
"""Connections, so that no turn begins with making them."""


@dataclass(frozen=True)
class Way:
    """A way to the server."""

    name: str
    url: str
    key: str = ""
    socket: str | None = None
    certificate: str | None = None
    model: str = MODEL

    def client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=self.socket, verify=trusting(self.certificate), limits=KEPT)
        return httpx.AsyncClient(
            transport=transport, base_url=self.url, timeout=REQUEST_TIMEOUT_S, headers=credentials(self.key)
        )


@dataclass(frozen=True)
class Turn:
    """What one turn showed."""

    ttft_ms: Sequence[float]
    per_s: float
    refused: int = 0

    def percentile(self, share: float) -> float:
        """Return the smallest value that this share does not exceed."""
        return sorted(self.ttft_ms)[max(0, -(-len(self.ttft_ms) * round(100 * share) // 100) - 1)]

    @property
    def p50(self) -> float:
        return self.percentile(0.5)

    @property
    def p95(self) -> float:
        return self.percentile(0.95)


def main() -> None:
    only = _arguments().only
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as folder, served(Path(folder)) as (store, running):
        key = add(store.root, Client(name="modest", key_sha256="", **PLENTY))
        through = Way("Envoy", running.url, key)
        if only != "flood":
            with with_tls(Path(folder), running) as (url, certificate):
                direct = Way("vLLM itself", "http://vllm", socket=backend(running).socket)
                compare([direct, through, Way("Envoy with TLS", url, key, certificate=certificate)])
        if only != "cost":
            flood(store, through)
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proxy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["cost", "flood"], help="one of the two (default: both)")
    return parser.parse_args()


def compare(ways: Sequence[Way]) -> None:
    turns = asyncio.run(taken_in_turns(ways))
    print(f"\n{TURNS} turns of {REQUESTS} streams, {AT_ONCE} at once, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out")
    print(f"{'all turns together':20}{'requests/s':>12}{'TTFT p50 ms':>13}{'p95 ms':>9}   ratio to {ways[0].name}")
    first = turns[ways[0].name]
    for name, way_turns in turns.items():
        total = together(way_turns)
        compared = (
            ""
            if way_turns is first
            else "; ".join(ratio(way_turns, first, figure) for figure in ("per_s", "p50", "p95"))
        )
        print(f"{name:20}{total.per_s:12.2f}{total.p50:13.1f}{total.p95:9.1f}   {compared}", flush=True)


async def taken_in_turns(ways: Sequence[Way]) -> dict[str, list[Turn]]:
    """Send the same requests on each way in turns, each time in another order."""
    turns: dict[str, list[Turn]] = {way.name: [] for way in ways}
    draw = random.Random(0)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(way.client()) for way in ways]
        for client in clients:  # a connection's first requests are slower
            await closed_loop(client, REQUESTS, draw)
        for number in range(TURNS):
            for place in (position % len(ways) for position in range(number, number + len(ways))):
                turns[ways[place].name].append(await closed_loop(clients[place], REQUESTS, draw))
    return turns


def ratio(turns: Sequence[Turn], beside: Sequence[Turn], figure: str) -> str:
    """Return the ratio of all turns together, and between which the middle half of the turns' ratios lie."""
    numerator, denominator = (getattr(together(each), figure) for each in (turns, beside))
    ratios = [getattr(mine, figure) / getattr(its, figure) for mine, its in zip(turns, beside, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{figure} {numerator / denominator:.2f} ({low:.2f}–{high:.2f})"


def together(turns: Sequence[Turn]) -> Turn:
    """As if they were one turn."""
    per_s = len(turns) / sum(1 / turn.per_s for turn in turns)
    return Turn([ms for turn in turns for ms in turn.ttft_ms], per_s)


def flood(store: ModelStore, modest: Way) -> None:
    """Time the modest client alone and beside a flood, in turns. Each flood is a new client's, with a fresh minute."""
    alone: list[Turn] = []
    beside: list[Turn] = []
    for number in range(FLOOD_TURNS):
        key = add(store.root, Client(name=f"flood-{number}", key_sha256="", **LIMITS))
        flooding = Way("flood", modest.url, key)
        for way in (None, flooding) if number % 2 == 0 else (flooding, None):
            (beside if way else alone).append(asyncio.run(flooded(modest, way)))
    print(f"\nanother client at {MODEST_PER_S:g} requests/s, {FLOOD_TURNS} turns of {FLOOD_TURN_S:g} s each")
    print(f"{'turn':8}{'alone p95 ms':>14}{'in the flood':>14}{'ratio':>8}{'of the flood, refused':>24}")
    for number, (quiet, other) in enumerate(zip(alone, beside, strict=True), 1):
        sent = f"{other.refused} of {int(FLOOD_TURN_S * flood_per_s())}"
        print(f"{number:<8}{quiet.p95:14.1f}{other.p95:14.1f}{other.p95 / quiet.p95:8.2f}{sent:>24}")
    quiet, other = together(alone), together(beside)
    print(f"{'all':8}{quiet.p95:14.1f}{other.p95:14.1f}{other.p95 / quiet.p95:8.2f}")
    low, middle, high = statistics.quantiles(
        [its.p95 / quiet_turn.p95 for quiet_turn, its in zip(alone, beside, strict=True)], n=4
    )
    print(f"median of the turns' ratios {middle:.2f}, middle half {low:.2f}–{high:.2f}; at most {BOUND} is required")


def flood_per_s() -> float:
    return FLOOD * float(LIMITS["requests_per_minute"]) / 60


async def closed_loop(client: httpx.AsyncClient, count: int, draw: random.Random) -> Turn:
    """*count* streams, ``AT_ONCE`` at a time."""
    prompts, times = [prompt(draw) for _ in range(count)], []

    async def user() -> None:
        while prompts:
            times.append(await ask(client, prompts.pop()))

    started = time.monotonic()
    await asyncio.gather(*(user() for _ in range(AT_ONCE)))
    return Turn(answered(times), count / (time.monotonic() - started))


async def flooded(modest: Way, flooding: Way | None) -> Turn:
    """Time the modest client while the other one, if there is one, sends what it may not."""
    draw = random.Random(1)
    async with asyncio.TaskGroup() as group:
        modest_task = group.create_task(open_loop(modest, MODEST_PER_S, draw))
        flood_task = group.create_task(open_loop(flooding, flood_per_s(), draw)) if flooding else None
    times, refused = modest_task.result(), flood_task.result().count(None) if flood_task else 0
    return Turn(answered(times), MODEST_PER_S, refused)


def answered(times: Sequence[float | None]) -> list[float]:
    """Raise RuntimeError if a request was refused."""
    answered = [ms for ms in times if ms is not None]
    if len(answered) < len(times):
        raise RuntimeError("a request was refused that is within the limits")
    return answered


async def open_loop(way: Way, per_s: float, draw: random.Random) -> list[float | None]:
    """Send one request in each interval of a rate, at a moment drawn, whatever becomes of those before.

    Returns:
        Their times to the first token, in ms; None for those that were refused.
    """
    started, tasks = time.monotonic(), []
    async with way.client() as client:
        for number in range(int(per_s * FLOOD_TURN_S)):
            await asyncio.sleep(max(0.0, started + (number + draw.random()) / per_s - time.monotonic()))
            tasks.append(asyncio.create_task(ask(client, prompt(draw), way.model)))
        return list(await asyncio.gather(*tasks))


async def ask(client: httpx.AsyncClient, tokens: list[int], model: str = MODEL) -> float | None:
    """Milliseconds until the first token; None: it was refused."""
    body = {"model": model, "prompt": tokens, "max_tokens": OUTPUT_TOKENS, "stream": True}
    sent, first = time.monotonic(), None
    async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as reply:
        if reply.status_code == httpx.codes.TOO_MANY_REQUESTS:
            return None
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            # Not read as JSON: httpx ends lines at U+2028 and the like, too, which a text may have.
            if first is None and line.startswith("data: {") and '"choices":[{' in line:
                first = time.monotonic()
    if first is None:
        raise RuntimeError("an answer without a token")
    return 1000 * (first - sent)


def prompt(draw: random.Random) -> list[int]:
    """Token ids that no cache has."""
    return draw.choices(range(100, 1000), k=PROMPT_TOKENS)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[ModelStore, Endpoint]]:
    """Serve the demo's model behind an endpoint of its own."""
    store = ModelStore(folder / "store", MODEL)
    publish(store, 1, variant_of(store, "fp16", DEMO / "model"))
    variables = environment(store)
    process = stage("serve", "--serving", json.dumps(SERVING), variables=variables)
    try:
        running = endpoint(store)
        if running is None:
            raise SystemExit(process.stderr)
        yield store, running
    finally:
        stage("serve", "--stop", variables=variables)


@contextlib.contextmanager
def with_tls(folder: Path, running: Endpoint) -> Iterator[tuple[str, str]]:
    """Start a second Envoy before the same server, which speaks TLS; yield its URL and its certificate."""
    tls = Tls(folder / "tls.crt", folder / "tls.key")
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(tls.key), "-out", str(tls.certificate), "-subj", "/CN=bench", "-days", "1"]
    subprocess.run([*request, *files], check=True, capture_output=True)
    spawned = multiprocessing.get_context("spawn")
    ready, over = spawned.Event(), spawned.Event()
    with reserved_port("127.0.0.1", 0) as port:
        arguments = (folder, port, tls, backend(running), ready, over)
        process = spawned.Process(target=stand_before, args=arguments, daemon=True)
        process.start()
        try:
            if not ready.wait(60):
                raise SystemExit("Envoy did not start")
            yield f"https://127.0.0.1:{port}", str(tls.certificate)
        finally:
            over.set()
            process.join()


def stand_before(folder: Path, port: int, tls: Tls, server: Backend, ready: Event, over: Event) -> None:
    """Run an Envoy with its door in a process of their own, as a supervisor has them."""
    to_server = routing([server.release], {server.release: [server]}, Wanted(stable=server.release))
    door = Door(folder / "store", MODEL, "")
    with proxying(("127.0.0.1", port), to_server, door, folder=folder / "tls", log=folder / "tls.log", tls=tls):
        ready.set()
        over.wait()


def backend(running: Endpoint) -> Backend:
    server = running.server(running.release)
    if server is None:
        raise RuntimeError(f"{running.release} has no server")
    return Backend(server.release, socket_of(server.url))


if __name__ == "__main__":
    main()
