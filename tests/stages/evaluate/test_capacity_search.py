"""The real ``vllm bench serve`` against a server whose capacity is known: it answers a number of requests at a time,
each in a fixed time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stages.evaluate import generator
from stages.evaluate.bench import Call, Limits, LoadTarget, send
from stages.evaluate.preloaded import Preloaded
from stages.parts.base.workload import Slo, Workload
from stages.parts.samples.capacity import mean_capacity_per_s
from stages.parts.samples.lines import StartLoad
from tests.extras import need
from tests.serving import DEMO
from tests.stages.evaluate.loading import load_start

pytestmark = pytest.mark.slow
SLOTS, REQUEST_S, TOKENS = 8, 0.4, 4
MOST_PER_S = SLOTS / REQUEST_S
WORKLOAD = Workload(
    name="w",
    prompt_tokens=16,
    output_tokens=TOKENS,
    concurrency=4,
    warmup_requests=0,
    steady_s=2,
    ramp_s=0.5,
    trial_s=2,
    trials=6,
    slo=Slo(ttft_ms=300, tpot_ms=1000),
    quality_tasks=("t",),
)


class Slots:
    """An OpenAI-compatible server that is busy with *SLOTS* requests at most; the others wait."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()
        self.name = "m"
        self.url = ""

    def check_alive(self) -> None:
        pass

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._free = asyncio.Semaphore(SLOTS)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next((line for line in head.splitlines() if line.startswith("content-length:")), ": 0")
                body = await reader.readexactly(int(length.partition(":")[2]))
                if head.startswith("post /v1/completions"):
                    await self._complete(json.loads(body), writer)
                else:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.prompts.append(asked["prompt"])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        async with self._free:
            for number in range(asked["max_tokens"]):
                if number:
                    await asyncio.sleep(REQUEST_S / (asked["max_tokens"] - 1))
                self._send(writer, json.dumps({"choices": [{"text": "x"}]}))
        self._send(writer, json.dumps({"usage": {"completion_tokens": asked["max_tokens"], "prompt_tokens": 16}}))
        self._send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _send(self, writer: asyncio.StreamWriter, event: str) -> None:
        data = f"data: {event}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def __enter__(self) -> Slots:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StartLoad, Slots, LoadTarget]]:
    """The load of one start, the server, and what loads it."""
    need("vllm")
    folder = tmp_path_factory.mktemp("search")
    with Slots() as server, Preloaded(generator.__name__, folder / "generator.log", generator.VARIABLES) as preloaded:
        given: Any = server
        target = LoadTarget(preloaded, given, DEMO / "model", WORKLOAD, None, folder / "load.log")
        yield load_start(target, 0), server, target


def test_the_search_finds_the_capacity_of_a_server_with_a_known_one(found: tuple[StartLoad, Slots, LoadTarget]) -> None:
    load, _, _ = found
    capacity = mean_capacity_per_s(load)
    assert capacity is not None
    assert 0.7 * MOST_PER_S < capacity < 1.2 * MOST_PER_S
    assert load.rounds[0].run.rate_per_s == pytest.approx(0.7 * capacity)
    assert all(each.run.held for each in load.trials if each.run.rate_per_s and each.run.rate_per_s < 0.6 * MOST_PER_S)
    assert not any(each.run.held for each in load.trials if (each.run.rate_per_s or 0) > 1.2 * MOST_PER_S)


def test_every_request_has_another_prompt_and_an_answer_of_its_length(
    found: tuple[StartLoad, Slots, LoadTarget],
) -> None:
    load, server, _ = found
    assert len({tuple(each) for each in server.prompts}) == len(server.prompts)
    assert {len(each) for each in server.prompts} == {16}
    requests = [one for each in load.rounds for one in each.requests]
    assert {(one.prompt_tokens, one.output_tokens, len(one.itl_ms)) for one in requests} == {(16, TOKENS, TOKENS - 1)}


def test_a_trial_far_beyond_the_capacity_is_ended_early(found: tuple[StartLoad, Slots, LoadTarget]) -> None:
    _, _, target = found
    limits = Limits(ttft_ms=300, tpot_ms=1000, allowed=2, first=0, end=40)
    call = Call(requests=80, seed=1, first=10**6, rate_per_s=3 * MOST_PER_S, limits=limits)
    began = time.monotonic()
    assert send(target, call) is None
    assert time.monotonic() - began < 80 / MOST_PER_S
