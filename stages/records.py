"""The documents that one stage leaves for the next. Closed: an unknown or missing field is an error."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stages.errors import DamagedModel
from stages.store import digest_of, write_json

ACQUIRED: Final = "acquired.json"
VARIANT: Final = "variant.json"
SAMPLES_SUFFIX: Final = ".samples.jsonl"
"""Beside an evaluation: what was measured of each request and item, so that all else can be computed again."""


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The document at *path*, or None if there is none.

        Raises:
            DamagedModel: it is there but is not what its writer would have written.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValidationError as error:
            raise DamagedModel(
                f"{path} is not a valid {cls.__name__} record: {error.errors()[0]['msg']}",
                hint="remove the directory that holds it and run again",
            ) from error

    def write(self, path: Path) -> None:
        write_json(path, self)


class File(Record):
    """One file of a model directory. ``path`` is relative, with forward slashes."""

    path: str
    size_bytes: int
    sha256: str


class Acquired(Record):
    """``base/acquired.json``: what was taken from where."""

    model: str
    source: str
    """The Hub's endpoint, or ``local:`` and the directory."""
    revision: str
    commit: str
    license: str | None
    """The SPDX-like identifier from the model card, or None if the publisher names none."""
    architecture: str
    parameters: int
    """Count of weights over all tensors."""
    files: tuple[File, ...]
    digest: str
    """``files_digest(files)``: what variants are keyed by."""
    acquired_at: datetime


class Variant(Record):
    """``optimized/<variant>/variant.json``: what was made from what, how, and at which cost."""

    variant: str
    method: str
    parameters: dict[str, Any]
    base_digest: str
    calibration_digest: str | None
    """sha256 over the calibration texts; None for a method that needs none."""
    tool_versions: dict[str, str]
    key: str
    """``digest_of`` the five fields above: same key, same variant, no work."""
    files: tuple[File, ...]
    digest: str
    """``files_digest(files)``."""
    weights_bytes: int
    bits: int
    dtype: str
    """Of the tensors that are not quantized: float16 or bfloat16."""
    seconds: float
    peak_memory_bytes: int
    """Peak resident set of the quantizing process."""
    peak_gpu_memory_bytes: int | None
    created_at: datetime


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


class Hardware(Record):
    cpu: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]


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
    """``stages.evaluate.probes``; empty: none were recorded."""
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


def files_digest(files: tuple[File, ...]) -> str:
    """One digest for a directory's content: independent of order and of times."""
    return digest_of(sorted([each.path, each.size_bytes, each.sha256] for each in files))


class Paired(Record):
    """A variant beside fp16 on the very same items of one task."""

    task: str
    kind: Literal["accuracy", "perplexity"]
    difference: float
    """Variant minus fp16: in accuracy, or in bits per byte (positive is worse)."""
    low: float
    high: float
    """95 % interval, bootstrap over the items."""
    lost: int | None
    """Items that fp16 gets right and the variant wrong; None for perplexity."""
    gained: int | None
    p_value: float | None
    """McNemar's exact test of lost against gained."""


class Price(Record):
    """What an hour of the serving hardware costs: of one replica, with all its GPUs."""

    per_hour: float = Field(gt=0, allow_inf_nan=False)
    currency: str = "USD"


class Cost(Record):
    """What a million output tokens cost."""

    value: float
    low: float
    high: float | None
    """95 % interval, from the noise of the rate; None: no bound, because the rate may be 0."""
    currency: str
    tokens_per_s: float
    """The output tokens per second that it is computed from."""
    basis: Literal["goodput", "throughput"]
    """goodput: the rate at which the workload's latency targets are met. throughput: the measured rate, because the
    workload sets no targets."""


class Divergence(Record):
    """How far a variant's next-token distributions are from fp16's, on the same positions of held-out text."""

    documents: int
    tokens: int
    """Positions compared, over all documents."""
    kl: float
    """Mean KL(fp16 ‖ variant) in nats per token; a lower bound (``scoring.divergence``)."""
    kl_low: float
    kl_high: float
    """95 % interval, bootstrap over documents."""
    top1_agreement: float
    """Share of positions at which both hold the same token likeliest."""
    top1_low: float
    top1_high: float


class Interval(Record):
    """Of 95 %, from the draws that the decision is made of; the value itself always lies in it."""

    low: float
    high: float


class Change(Record):
    """A metric beside fp16's, as a share of fp16's: −0.1 is ten percent less."""

    value: float
    low: float
    high: float
    """95 % interval, from the same draws of both, so that what moves both alike cancels out."""


class Candidate(Record):
    """One variant in a decision."""

    variant: str
    digest: str | None
    evaluation_key: str | None
    evaluation_digest: str | None
    """``digest_of`` the whole evaluation, which holds the digest of its samples."""
    excluded: str | None
    """Why it could not win, or None if it could."""
    raw: dict[str, float]
    """By metric, in the units of ``scoring.metrics.METRICS``; empty if it was not measured."""
    intervals: dict[str, Interval] = Field(default_factory=dict)
    """By metric, of ``raw``; without those that are counted (memory), or whose noise is not known."""
    change: dict[str, Change] = Field(default_factory=dict)
    """By metric; empty for fp16 itself, and where fp16 was not measured."""
    normalized: dict[str, float]
    """By metric, 0–1, 1 is best."""
    score: float | None
    score_low: float | None
    score_high: float | None
    """95 % interval of the score, from the noise of what was measured."""
    win_probability: float | None
    """That it keeps every constraint and scores highest if the measurement is repeated."""
    weights_share: float | None
    """Share of the weightings near the profile's under which it scores highest."""
    any_weights_share: float | None = None
    """The same over all weightings there are."""
    pareto: bool | None
    """Whether no other variant is at least as good in every metric and better in one."""
    against_fp16: tuple[Paired, ...]
    """Task by task; empty for fp16 itself, and where the items can't be paired."""
    recovery: dict[str, float] = Field(default_factory=dict)
    """By task, the variant's score divided by fp16's (``TaskScore.score``: for perplexity tasks the probability per
    byte); above 1 is better than fp16. Empty where fp16 was not measured."""
    divergence: Divergence | None = None
    """None for fp16 itself, and where it was not measured."""
    cost: Cost | None
    """Where the platform has a price, and the variant was measured and met the latency targets, if there are any."""


class Margin(Record):
    """The winner's score beside that of the best of the others."""

    over: str
    value: float
    """The difference; negative where the winner ranks behind, because the evidence does not separate them."""
    low: float
    high: float
    """95 % interval, from the same draws of both."""


class Production(Record):
    """``production_metrics.json``: which variant is in production, and exactly why."""

    schema_version: Literal[1] = 1
    model: str
    commit: str
    license: str | None
    base_digest: str
    run: str | None
    winner: str
    release: str
    """The directory's name under ``releases/``."""
    reason: str
    notes: tuple[str, ...]
    """What else a reader has to know of the measurement, such as a machine that drifted."""
    separated: bool
    """Whether the evidence separates the best score from the others; if not, quality and memory decided."""
    margin: Margin | None = None
    """None where nobody else could be chosen."""
    profile: dict[str, Any]
    weights: dict[str, float]
    """Shares with sum 1."""
    noise: dict[str, float]
    """By metric, in its unit: the largest difference between two variants that chance explains. Without those that were
    measured on different hardware, and do not compare."""
    units: dict[str, str]
    """Of the raw metrics."""
    price: Price | None
    """What the costs are computed with; None where the platform names no price."""
    candidates: tuple[Candidate, ...]
    """By score, best first; those that could not win last."""
    workload: dict[str, Any]
    engine: Engine
    """The winner's, as it was measured."""
    hardware: Hardware
    key: str
    """``digest_of`` what the decision follows from: same key, same decision."""
    decided_at: datetime


def difference(directory: Path, files: Iterable[File]) -> str:
    """What is missing from *directory* or has another size than recorded; empty if nothing. Reads no content."""
    for file in files:
        try:
            size = (directory / file.path).stat().st_size
        except OSError:
            return f"{file.path} is missing"
        if size != file.size_bytes:
            return f"{file.path} has {size} bytes, {file.size_bytes} were recorded"
    return ""
