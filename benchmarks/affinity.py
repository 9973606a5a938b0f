"""What affinity is worth: how much of the prompts of many-turned conversations two servers of one release have cached.

    make bench-affinity

Two real servers of the demo's model, each on its own half of the cores, are asked by users who each send their whole
conversation again with every turn. The hits are vLLM's own counts. The KV cache of a server holds more than its share
of the conversations, but not all of them. For round-robin the servers are asked without Envoy.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from stages.parts.base.serving_settings import Serving
from stages.parts.endpoint.door import Door
from stages.parts.endpoint.endpoint import Wanted
from stages.parts.endpoint.envoy import proxying
from stages.parts.endpoint.routing import Backend, Balance, routing
from stages.parts.endpoint.sides import SESSION_HEADER
from stages.parts.vllm.client import http, socket_of
from stages.parts.vllm.server import Server, ServerSpec, reserved_port, running
from tests.demo import DEMO, MODEL

REPLICAS: Final = 2
SESSIONS: Final = 16
TURNS: Final = 7
QUESTION_TOKENS: Final = 110
ANSWER_TOKENS: Final = 32
"""A turn is longer than a block of vLLM's KV cache on a CPU (128 tokens), of which only whole ones are cached."""
BLOCK_TOKENS: Final = 128
AT_ONCE: Final = 8
CONTEXT: Final = 1024
KV_CACHE_MIB: Final = 20
"""10,240 tokens of the demo's model; all conversations have 15,904 in the end."""
VOCABULARY: Final = range(100, 1000)
"""Token ids that every tokenizer has."""
TIMEOUT_S: Final = 300.0
RELEASE: Final = "0001-fp16-0123456789ab"
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
Ask = Callable[[int, list[int]], list[int]]
"""Sends a session's prompt, and returns the tokens of the answer."""


@dataclass(frozen=True)
class AffinityResult:
    """Tokens of prompts at each server: all that were looked up, and those that were cached."""

    queries: tuple[float, ...]
    hits: tuple[float, ...]

    def since(self, before: AffinityResult) -> AffinityResult:
        return AffinityResult(
            tuple(now - then for now, then in zip(self.queries, before.queries, strict=True)),
            tuple(now - then for now, then in zip(self.hits, before.hits, strict=True)),
        )


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.affinity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(f"{SESSIONS} conversations of {TURNS} turns, {AT_ONCE} requests at once, on {REPLICAS} servers")
    print(
        f"{'affinity':<14}{'prompt tokens':>15}{'cached':>10}{'hit rate':>10}   share of the busier server", flush=True
    )
    lengths = [turn * (QUESTION_TOKENS + ANSWER_TOKENS) + QUESTION_TOKENS for turn in range(TURNS)]
    with tempfile.TemporaryDirectory(prefix="slipway-affinity-") as folder, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(spec(Path(folder), number))) for number in range(REPLICAS)]
        print(f"{'(the most)':<14}{SESSIONS * sum(lengths):>15,}{'':>10}{most(lengths):>10.1%}", flush=True)
        ways: list[tuple[str, Callable[[], contextlib.AbstractContextManager[Ask]]]] = [
            ("session", lambda: through_envoy(Path(folder), servers, "session")),
            ("none", lambda: through_envoy(Path(folder), servers, "none")),
            ("round-robin", lambda: in_turn(servers)),
        ]
        for seed, (name, asking) in enumerate(ways):
            earlier = counted(servers)
            with asking() as ask:
                converse(ask, seed)
            found = counted(servers).since(earlier)
            tokens, cached = sum(found.queries), sum(found.hits)
            share = max(found.queries) / tokens
            print(f"{name:<14}{tokens:>15,.0f}{cached:>10,.0f}{cached / tokens:>10.1%}   {share:.1%}", flush=True)


def most(lengths: list[int]) -> float:
    """Compute the hit rate if everything were cached that one server could have: whole blocks of what it was asked and
    said before. The last token of an answer is not computed."""
    cacheable = (length - QUESTION_TOKENS - 1 for length in lengths)
    return sum(max(0, tokens) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in cacheable) / sum(lengths)


def spec(folder: Path, number: int) -> ServerSpec:
    """Run a server on its half of the cores."""
    settings = Serving(max_model_len=CONTEXT, kv_cache_mib=KV_CACHE_MIB, enforce_eager=True)
    log = folder / f"{number}.log"
    return ServerSpec(DEMO / "model", MODEL, settings, log, unix_socket=True, log_requests=False, half=number)


@contextlib.contextmanager
def through_envoy(folder: Path, servers: list[Server], affinity: Literal["session", "none"]) -> Iterator[Ask]:
    backends = [Backend(RELEASE, socket_of(server.url), number) for number, server in enumerate(servers)]
    to_all = routing([RELEASE], {RELEASE: backends}, Wanted(stable=RELEASE), Balance(REPLICAS, affinity))
    files, log = folder / affinity, folder / f"{affinity}.log"
    with (
        reserved_port("127.0.0.1", 0) as port,
        proxying(("127.0.0.1", port), to_all, Door(folder, MODEL, ""), folder=files, log=log),
    ):
        yield lambda session, prompt: complete(f"http://127.0.0.1:{port}", session, prompt)


@contextlib.contextmanager
def in_turn(servers: list[Server]) -> Iterator[Ask]:
    urls = itertools.cycle(server.url for server in servers)
    yield lambda session, prompt: complete(next(urls), session, prompt)


def converse(ask: Ask, seed: int) -> None:
    """Turn by turn, the conversations in another order each time. Those of another *seed* have nothing in common."""
    drawn, histories = random.Random(seed), [list[int]() for _ in range(SESSIONS)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in range(TURNS):
            order = drawn.sample(range(SESSIONS), SESSIONS)
            for session in order:
                histories[session] += drawn.choices(VOCABULARY, k=QUESTION_TOKENS)
            answers = pool.map(ask, order, [histories[session] for session in order])
            for session, answer in zip(order, answers, strict=True):
                histories[session] += answer


def complete(url: str, session: int, prompt: list[int]) -> list[int]:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {SESSION_HEADER: str(session)}
    reply = http().post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S).raise_for_status()
    answer: list[int] = reply.json()["choices"][0]["token_ids"]
    return answer


def counted(servers: list[Server]) -> AffinityResult:
    totals = [
        {
            sample.name: sample.value
            for family in text_string_to_metric_families(metrics(server))
            for sample in family.samples
        }
        for server in servers
    ]
    return AffinityResult(tuple(total[QUERIES] for total in totals), tuple(total[HITS] for total in totals))


def metrics(server: Server) -> str:
    reply: httpx.Response = http().get(f"{server.url}/metrics", timeout=TIMEOUT_S)
    return reply.raise_for_status().text


if __name__ == "__main__":
    main()
