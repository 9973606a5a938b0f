"""``evaluations/<variant>.json``: everything that was measured of one variant under one workload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal

from pydantic import model_validator

from stages.parts.base.record import Record
from stages.parts.machine.hardware import Hardware

SAMPLES_SUFFIX: Final = ".samples.jsonl"
"""The raw samples beside an evaluation, from which everything else can be computed again."""


class TaskScore(Record):
    """One lm-eval task, measured through the server."""

    task: str
    kind: Literal["accuracy", "perplexity"]
    value: float
    """accuracy: share of correct items, 0–1. perplexity: bits per byte of text."""
    low: float
    high: float
    """95 % interval: lm-eval's standard error for accuracy, bootstrap over documents for perplexity."""
    score: float
    """The value used for scoring, 0–1, higher is better: the accuracy, or 2^(−bits per byte), the geometric mean of the
    probability that the model gives to each byte of the text."""
    items: int
    metrics: dict[str, float]
    """Everything that lm-eval reported, by its own names."""


class Probe(Record):
    """A variant's greedy answer to a fixed prompt, to check later whether a server still gives the same answer."""

    prompt: str
    prompt_ids: tuple[int, ...]
    """The prompt as the server tokenized it."""
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logarithm of each token's probability, given the tokens before it."""


class Percentiles(Record):
    mean: float
    p50: float
    p95: float
    p99: float


class Load(Record):
    """Load on the server: one round, or all together (percentiles over all requests, mean rates of the rounds)."""

    concurrency: int
    """Requests in flight at a time; where requests arrive at a given rate, the highest number observed."""
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
        """Drop two counts of older records that say nothing: a load with a failed request is not recorded."""
        counts = ("requests_completed", "requests_failed")
        return {name: each for name, each in data.items() if name not in counts} if isinstance(data, dict) else data


class Goodput(Record):
    """The requests that met the workload's latency targets, in all rounds together; rates as in ``Load``."""

    ttft_ms: float
    """The targets: the highest times allowed."""
    tpot_ms: float
    share: float
    """The share of all requests, 0–1."""
    requests_per_s: float
    output_tokens_per_s: float


class Speed(Record):
    """The speed of the machine itself, by short probes while no server has work."""

    compute_gflop_per_s: float
    memory_gib_per_s: float


class Drift(Record):
    """The speed of the machine's CPU and memory before and after the load; a GPU is not probed. ``before`` should also
    be the same for all variants."""

    before: Speed
    """Before the load of the first start of the server."""
    between: tuple[Speed, ...] = ()
    """After the load of each start but the last, and before the load of the next, alternately."""
    after: Speed
    """After the load of the last start."""
    largest_change: float
    """The largest relative change during the load of one start: 0.2 is a fifth faster or slower."""
    measured_again: int
    """Starts whose load was measured again, because the change exceeded the workload's ``drift_limit``."""

    def probes(self) -> tuple[Speed, ...]:
        """All probes in order: one before and one after the load of each start."""
        return (self.before, *self.between, self.after)


class Memory(Record):
    weights_bytes: int
    peak_resident_bytes: int
    """The highest sum of the resident sets of the server's processes while it was measured."""
    peak_gpu_bytes: int | None
    """None also if servers ran side by side: the driver reports the memory of the GPU, not of each server."""
    kv_cache_tokens: int


class Engine(Record):
    """The serving engine as it ran, with what is needed to start it again the same way."""

    name: str
    version: str
    arguments: tuple[str, ...]
    dtype: str
    quantization: str | None
    """The quantization that vLLM recognized, by its log; None for plain weights."""
    kernel: str | None
    """The kernel that vLLM chose for the quantized layers, by its log."""
    fallbacks: tuple[str, ...] = ()
    """vLLM's log lines about slower paths that it fell back to."""
    cores: tuple[int, ...] = ()
    """The CPU cores that its threads were bound to, by its log; none on a GPU."""
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
    """The digest of the raw samples beside it, from which every figure can be computed again."""
    tool_versions: dict[str, str]
    quality: tuple[TaskScore, ...]
    """The mean over all starts of the server."""
    load: Load
    """All rounds together."""
    rounds: tuple[Load, ...]
    """The rounds of all starts, in the order of their numbers in the samples."""
    sweep: tuple[Load, ...] = ()
    """One round at each further concurrency of the workload."""
    goodput: Goodput | None = None
    """None if the workload has no ``slo``."""
    interleaved_with: tuple[str, ...] = ()
    """Variants whose servers ran side by side with this one's and took turns with it."""
    drift: Drift | None = None
    probes: tuple[Probe, ...] = ()
    """See ``stages.parts.engine.probes``; empty if none were recorded."""
    memory: Memory
    beside: tuple[str, ...]
    """Models that were served on the same machine meanwhile, so that the figures are those of a shared machine."""
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
    """The hardware that speed depends on, in words; memory only has to suffice."""
    hardware = evaluation.hardware
    able = [hardware.processor.name] if hardware.processor else []
    return ", ".join([f"{hardware.cores} × {hardware.cpu}", *able, *hardware.gpus])


def by_machine(evaluations: Mapping[str, Evaluation]) -> dict[str, list[str]]:
    """The variants by the hardware that they were measured on."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, each in evaluations.items():
        found[machine_of(each)].append(name)
    return dict(found)
