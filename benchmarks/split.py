"""What it is worth that conversations stick to their side of a split, and what copies of requests cost clients.

    make bench-split

Two real servers of the demo's model, a stable release and a canary, each on its own half of the cores, behind Envoy.
First, users send their whole conversation again with every turn, while the canary's share grows as in a rollout: how
much of the prompts is cached, by the answers' own counts, if conversations stick and if Envoy draws a release for each
request. Then OpenAI's client streams in turns without copies and with copies of some or all requests.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import openai

from benchmarks.affinity import CONTEXT, TIMEOUT_S, VOCABULARY
from scoring.percentiles import p95
from stages.parts.base.serving_settings import Serving
from stages.parts.endpoint.access_log import NAME, LogReader
from stages.parts.endpoint.door import Door
from stages.parts.endpoint.endpoint import Wanted
from stages.parts.endpoint.envoy import Proxy, proxying
from stages.parts.endpoint.routing import Backend, Balance, Routing, routing
from stages.parts.endpoint.sides import SESSION_HEADER
from stages.parts.vllm.client import http, socket_of
from stages.parts.vllm.server import Server, ServerSpec, reserved_port, running
from stages.rollout.copies import compared
from tests.demo import DEMO, MODEL

RELEASES: Final = ("0001-fp16-0123456789ab", "0002-fp16-0123456789ab")
STEPS: Final = (0, 10, 10, 50, 50, 90, 90, 100)
"""The canary's share in each turn of the conversations."""
CONVERSATIONS: Final = 24
QUESTION_TOKENS: Final = 96
ANSWER_TOKENS: Final = 24
AT_ONCE: Final = 4
TURNS: Final = 20
REQUESTS: Final = 100
"""In each turn at each share of copies."""
COPIED: Final = (0, 1, 2, 5, 20, 100)
"""Percent of the requests that are copied to the canary."""
RESAMPLED: Final = 400
KV_CACHE_MIB: Final = 64


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.split", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory(prefix="slipway-split-") as folder, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(spec(Path(folder), number))) for number in range(len(RELEASES))]
        print("| share of the canary | sticks | drawn |\n| --- | --- | --- |")
        sticking, drawn = (list(hit_rates(Path(folder), servers, way)) for way in ("session", "none"))
        for percent, *rates in zip(STEPS, sticking, drawn, strict=True):
            print(f"| {percent} % | {rates[0]:.1%} | {rates[1]:.1%} |", flush=True)
        with endpoint(Path(folder) / "copies", servers) as (url, proxy, folder_of_log):
            copy_costs(url, proxy, servers, folder_of_log)


def spec(folder: Path, number: int) -> ServerSpec:
    """Run a server on its half of the cores."""
    settings = Serving(max_model_len=CONTEXT, kv_cache_mib=KV_CACHE_MIB, enforce_eager=True)
    log = folder / f"{number}.log"
    return ServerSpec(
        DEMO / "model", MODEL, settings, log, unix_socket=True, for_clients=True, log_requests=False, half=number
    )


def split(
    servers: list[Server], percent: int, copied: int, affinity: Literal["session", "none"] = "session"
) -> Routing:
    up = {name: [Backend(name, socket_of(server.url))] for name, server in zip(RELEASES, servers, strict=True)}
    wanted = Wanted(stable=RELEASES[0], canary=RELEASES[1], percent=percent, copied=copied)
    return routing(up, up, wanted, Balance(affinity=affinity))


@contextlib.contextmanager
def endpoint(
    folder: Path, servers: list[Server], affinity: Literal["session", "none"] = "session"
) -> Iterator[tuple[str, Proxy, Path]]:
    folder.mkdir()
    with (
        reserved_port("127.0.0.1", 0) as port,
        proxying(
            ("127.0.0.1", port),
            split(servers, 0, 0, affinity),
            Door(folder, MODEL, ""),
            folder=folder / "files",
            log=folder / "log",
        ) as proxy,
    ):
        yield f"http://127.0.0.1:{port}", proxy, folder / "files"


def hit_rates(folder: Path, servers: list[Server], affinity: Literal["session", "none"]) -> Iterator[float]:
    """Yield turn by turn how much of the prompts was cached, while the split changes from turn to turn."""
    random_, histories = random.Random(affinity), [list[int]() for _ in range(CONVERSATIONS)]
    with endpoint(folder / affinity, servers, affinity) as (url, proxy, _), ThreadPoolExecutor(AT_ONCE) as pool:
        for percent in STEPS:
            proxy.apply(split(servers, percent, 0, affinity))
            for history in histories:
                history += random_.choices(VOCABULARY, k=QUESTION_TOKENS)
            names = [f"{affinity} {number}" for number in range(CONVERSATIONS)]
            replies = list(pool.map(complete, [url] * CONVERSATIONS, names, histories))
            for history, (answer, _) in zip(histories, replies, strict=True):
                history += answer
            yield sum(cached for _, cached in replies) / sum(len(history) - ANSWER_TOKENS for history in histories)


def complete(url: str, session: str, prompt: list[int]) -> tuple[list[int], int]:
    """Send a conversation's prompt. Returns the tokens of the answer, and how many of the prompt's were cached."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    headers = {SESSION_HEADER: session}
    reply = http().post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S).raise_for_status()
    answer = reply.json()
    return answer["choices"][0]["token_ids"], (answer["usage"].get("prompt_tokens_details") or {})["cached_tokens"]


def copy_costs(url: str, proxy: Proxy, servers: list[Server], files: Path) -> None:
    """Print the time to the first token and per answer by the share of copied requests, and what the copies showed."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
    reader, turns = LogReader(files / NAME), list[dict[int, list[tuple[float, float]]]]()

    def stream(seed: int) -> tuple[float, float]:
        prompt = random.Random(seed).choices(VOCABULARY, k=64)
        began = time.monotonic()
        events = client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0, stream=True)
        times = [time.monotonic() - began for _ in events]
        return 1000 * times[0], 1000 * times[-1]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(stream, range(-REQUESTS, 0)))  # it loads its own parts at the first request
        for turn in range(TURNS):
            turns.append({})
            for place in range(len(COPIED)):
                copied, first = COPIED[(turn + place) % len(COPIED)], REQUESTS * (len(COPIED) * turn + place)
                proxy.apply(split(servers, 0, copied))
                turns[-1][copied] = list(pool.map(stream, range(first, first + REQUESTS)))
    print("| copied | first token, p95 | ratio | answer, p95 | ratio |\n| --- | --- | --- | --- | --- |")
    for copied in COPIED:
        print(f"| {copied} % | {' | '.join(p95_ratio(turns, copied, place) for place in (0, 1))} |", flush=True)
    time.sleep(1)
    lines = list(reader.requests())
    copies = {line.copy_of: line for line in lines if line.copy_of}
    pairs = [compared(line, copies[line.id]) for line in lines if line.id in copies]
    timed = [pair.timings for pair in pairs if pair and pair.timings]
    lost = sum(bool(pair and pair.lost) for pair in pairs)
    print(f"{len(copies)} copies of {TURNS * REQUESTS * len(COPIED)} requests; {lost} lost")
    for name in ("ttft_s", "tpot_s"):
        ratio = statistics.geometric_mean(getattr(own, name) / getattr(other, name) for own, other in timed)
        print(f"{name} of the canary, of {len(timed)} pairs: {ratio:.3f} times the stable release's")


def p95_ratio(turns: list[dict[int, list[tuple[float, float]]]], copied: int, place: int) -> str:
    """Say the p95 of all requests at a share of copies, and its ratio to that without; the turns are drawn anew for the
    interval."""
    drawn = random.Random(0)
    resampled = [turns, *(drawn.choices(turns, k=len(turns)) for _ in range(RESAMPLED))]
    shown = [
        [p95([times[place] for turn in sample for times in turn[share]]) or 0.0 for sample in resampled]
        for share in (0, copied)
    ]
    first, *ratios = [with_copies / without for without, with_copies in zip(*shown, strict=True)]
    low, high = statistics.quantiles(ratios, n=20)[::18]
    return f"{shown[1][0]:.1f} ms | {first:.3f} ({low:.2f}–{high:.2f})"


if __name__ == "__main__":
    main()
