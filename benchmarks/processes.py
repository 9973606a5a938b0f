"""What vLLM's worker process costs a server of one thread, beside the model in the scheduler's process.

    make bench-processes

Two servers of the demo's model, one each way, are loaded by turns with the same requests, at two rates. Only the ratios
are valid for other machines.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from stages.evaluate.bench import Call, LoadTarget, send
from stages.evaluate.subject import Lane, lanes
from stages.parts.base.serving_settings import Serving
from stages.parts.base.workload import Slo, Workload
from stages.parts.samples.capacity import within
from stages.parts.samples.lines import TimedRequest
from stages.parts.vllm.arguments import BINDING, ONE_THREAD, core_binding
from stages.parts.vllm.server import ServerSpec, running
from tests.demo import DEMO

WAYS: Final = {"worker process": "0", "one process": None}
"""What ``VLLM_CPU_OMP_THREADS_BIND`` is: to bind the thread asks for vLLM's default."""
RATES_PER_S: Final = (20, 40)
TURNS: Final = 6
TURN_S: Final = 6
RAMP_S: Final = 1
SLO: Final = Slo(ttft_ms=500, tpot_ms=25)
WORKLOAD: Final = Workload(
    name="chat", prompt_tokens=64, output_tokens=32, concurrency=4, slo=SLO, quality_tasks=("none",)
)


@dataclass
class Seen:
    requests: list[TimedRequest] = field(default_factory=list)
    ready_s: float = 0.0

    def row(self) -> list[float]:
        late = sum(not within(request, SLO.ttft_ms, SLO.tpot_ms) for request in self.requests)
        tpot_ms = sorted(request.tpot_ms for request in self.requests)
        ttft_ms = sorted(request.ttft_ms for request in self.requests)
        p95 = int(0.95 * len(tpot_ms))
        return [self.ready_s, median(ttft_ms), ttft_ms[p95], median(tpot_ms), tpot_ms[p95], 100 * late / len(tpot_ms)]


def main() -> None:
    serving = Serving(kv_cache_mib=64, enforce_eager=True, port=0)
    if core_binding(serving) != ONE_THREAD:
        raise SystemExit("a server has several cores here; try it on two: taskset -c 0,1 make bench-processes")
    results = {(way, rate): Seen() for way in WAYS for rate in RATES_PER_S}
    with tempfile.TemporaryDirectory(prefix="slipway-bench-") as folder, contextlib.ExitStack() as stack:
        (lane,) = lanes(stack, serving, 1, Path(folder))
        for turn in range(TURNS):
            order = list(WAYS)[:: 1 if turn % 2 else -1]
            for way in order:
                with served(way, serving, lane, Path(folder)) as (target, ready_s):
                    for rate in RATES_PER_S:
                        result = results[way, rate]
                        result.requests += loaded(target, turn, rate)
                        result.ready_s = ready_s
            print(f"turn {turn + 1} of {TURNS}", flush=True)
    show(results)


@contextlib.contextmanager
def served(way: str, serving: Serving, lane: Lane, folder: Path) -> Iterator[tuple[LoadTarget, float]]:
    os.environ.pop(BINDING, None)
    if bound := WAYS[way]:
        os.environ[BINDING] = bound
    model = DEMO / "model"
    with running(ServerSpec(model, "m", serving, folder / "vllm.log")) as server:
        yield LoadTarget(lane.generator, server, model, WORKLOAD, None, folder / "load.log"), server.ready_s


def loaded(target: LoadTarget, turn: int, rate: int) -> Sequence[TimedRequest]:
    """Send the requests of one turn; those between its ramps count."""
    ramp, count = RAMP_S * rate, TURN_S * rate
    first = 1000 * (turn * len(RATES_PER_S) + RATES_PER_S.index(rate))
    call = Call(count + 2 * ramp, seed=turn, first=first, rate_per_s=rate, warmups=4)
    return (send(target, call) or [])[ramp : ramp + count]


def show(results: dict[tuple[str, int], Seen]) -> None:
    head = ["ready s", "TTFT p50 ms", "p95", "TPOT p50 ms", "p95", "late %"]
    print(f"{'':16}{'requests/s':>12}" + "".join(f"{heading:>14}" for heading in head))
    for rate in RATES_PER_S:
        rows = {way: results[way, rate].row() for way in WAYS}
        for way, row in rows.items():
            print(f"{way:16}{rate:12}" + "".join(f"{figure:14.1f}" for figure in row))
        first, second = rows.values()
        print(
            f"{'ratio':16}{rate:12}"
            + "".join(f"{a / b:14.2f}" if b else f"{'':14}" for a, b in zip(second, first, strict=True))
        )


if __name__ == "__main__":
    main()
