"""``evaluations/<variant>.json``: everything measured of one variant under one workload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal

from pydantic import model_validator

from stages.parts.base.record import Record
from stages.parts.machine.hardware import Hardware

SAMPLES_SUFFIX: Final = ".samples.jsonl"
"""Beside an evaluation: what was measured of each request and item, so that all else can be computed again."""


class TaskScore(Record):
    """One lm-eval task, measured through the server."""

    task: str
    kind: Literal["accuracy", "perplexity"]
    value: float
    """accuracy: share of items right, 0–1. perplexity: bits per byte of text."""
    low: float
    high: float
    """95 % interval: lm-eval's standard error for accuracy, bootstrap over documents for perplexity."""
    score: float
    """What scoring uses, 0–1, higher is better: the accuracy, or 2^(-bits per byte), the geometric-mean
    probability that the model gives to each byte of the text."""
    items: int
    metrics: dict[str, float]
    """Everything lm-eval returned, by its own names."""


class Probe(Record):
    """How a variant answered a fixed prompt, greedily: what shows later whether a server still gives the same."""

    prompt: str
    prompt_ids: tuple[int, ...]
    """The prompt as the server tokenized it."""
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token, given what stands before it; natural logarithm."""


class Percentiles(Record):
    mean: float
    p50: float
    p95: float
    p99: float


class Load(Record):
    """Load on the server: one round, or all together (percentiles over all requests, the rounds' mean rates)."""

    concurrency: int
    """Requests in flight at a time; where they arrive at a rate of their own, the most that there were."""
    requests: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2el_ms: Percentiles

    @model_validator(mode="before")
    @classmethod
    def _as_once_recorded(cls, data: Any) -> Any:
        """Without two counts that could say nothing: a load with a failed request is not recorded."""
        counts = ("requests_completed", "requests_failed")
        return {name: each for name, each in data.items() if name not in counts} if isinstance(data, dict) else data


class Goodput(Record):
    """What met the workload's latency targets, request by request: all rounds together, rates as in ``Load``."""

    ttft_ms: float
    """The targets: at most."""
    tpot_ms: float
    share: float
    """Of all requests, 0–1."""
    requests_per_s: float
    output_tokens_per_s: float


class Speed(Record):
    """How fast the machine itself is, by short probes while no server has work."""

    compute_gflop_per_s: float
    memory_gib_per_s: float


class Drift(Record):
    """The machine's processor and memory around the load; a GPU is not probed. Compare ``before`` between variants too:
    it should be the same for all."""

    before: Speed
    """Before the load of the first start of the server."""
    between: tuple[Speed, ...] = ()
    """After the load of each start but the last, and before that of the next, in turn."""
    after: Speed
    """After the load of the last."""
    largest_change: float
    """Relative, during the load of any one start: 0.2 is a fifth faster or slower."""
    measured_again: int
    """Starts whose load was measured once more, because the change exceeded the workload's ``drift_limit``."""

    def probes(self) -> tuple[Speed, ...]:
        """All, in order: one before and one after the load of each start."""
        return (self.before, *self.between, self.after)


class Memory(Record):
    weights_bytes: int
    peak_resident_bytes: int
    """Highest sum of the resident sets of the server's processes while it was measured."""
    peak_gpu_bytes: int | None
    """None also where servers stood side by side: the driver tells a GPU's memory, not whose it is."""
    kv_cache_tokens: int


class Engine(Record):
    """The serving engine as it ran: enough to start it again the same way."""

    name: str
    version: str
    arguments: tuple[str, ...]
    dtype: str
    quantization: str | None
    """What vLLM itself recognized (its log), None for plain weights."""
    kernel: str | None
    """The kernel vLLM chose for the quantized layers, as it logged it."""
    fallbacks: tuple[str, ...] = ()
    """What vLLM logged of a slower path that it took instead of a better one."""
    cores: tuple[int, ...] = ()
    """That its threads were bound to, as it logged it; none on a GPU."""
    ready_s: float


class Evaluation(Record):
    """``evaluations/<variant>.json``: everything measured of one variant under one workload."""

    variant: str
    variant_digest: str
    base_digest: str
    workload: dict[str, Any]
    engine: Engine
    hardware: Hardware
    key: str
    """``digest_of`` variant digest, workload, serving settings, tool versions and hardware."""
    samples_sha256: str
    """Of the raw samples beside it: every number that follows from them can be computed again."""
    tool_versions: dict[str, str]
    quality: tuple[TaskScore, ...]
    """The mean over all starts of the server."""
    load: Load
    """All rounds together."""
    rounds: tuple[Load, ...]
    """Of all starts, in the order of the samples' ``round``."""
    sweep: tuple[Load, ...] = ()
    """One round at each further concurrency of the workload's."""
    goodput: Goodput | None = None
    """None if the workload has no ``slo``."""
    interleaved_with: tuple[str, ...] = ()
    """Variants whose servers stood beside and took turns with this one's."""
    drift: Drift | None = None
    probes: tuple[Probe, ...] = ()
    """``stages.parts.engine.probes``; empty: none were recorded."""
    memory: Memory
    beside: tuple[str, ...]
    """Models that were being served on the same machine meanwhile: the figures are those of a shared machine."""
    started_at: datetime
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The four metrics of ``scoring.metrics.METRICS``, in their units; NaN for what was not measured."""
        scores = [task.score for task in self.quality]
        return {
            "quality": sum(scores) / len(scores) if scores else float("nan"),
            "latency": self.load.e2el_ms.p95,
            "throughput": self.load.output_tokens_per_s,
            "memory": float(self.memory.weights_bytes),
        }

    def measures(self) -> dict[str, float | None]:
        """What the load gives of ``scoring.constraints.MEASURES``, in their units; None for what was not measured."""
        return {
            "ttft_p95_ms": self.load.ttft_ms.p95,
            "tpot_p95_ms": self.load.tpot_ms.p95,
            "e2el_p95_ms": self.load.e2el_ms.p95,
            "goodput_share": self.goodput.share if self.goodput else None,
        }


def machine_of(evaluation: Evaluation) -> str:
    """The hardware by what speed depends on: memory only has to suffice."""
    hardware = evaluation.hardware
    return ", ".join([f"{hardware.cores} × {hardware.cpu}", *hardware.gpus])


def by_machine(evaluations: Mapping[str, Evaluation]) -> dict[str, list[str]]:
    """The variants that were measured on each hardware."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, each in evaluations.items():
        found[machine_of(each)].append(name)
    return dict(found)
