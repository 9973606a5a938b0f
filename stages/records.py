"""The documents that one stage leaves for the next. Closed: an unknown or missing field is an error."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

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


class Percentiles(Record):
    mean: float
    p50: float
    p95: float
    p99: float


class Load(Record):
    """Load on the server: one round, or all together (percentiles over all requests, the rounds' mean rates)."""

    concurrency: int
    requests: int
    requests_completed: int
    requests_failed: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2el_ms: Percentiles


class Memory(Record):
    weights_bytes: int
    peak_resident_bytes: int
    """Highest sum of the resident sets of the server's processes while it was measured."""
    peak_gpu_bytes: int | None
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
    tool_versions: dict[str, str]
    quality: tuple[TaskScore, ...]
    load: Load
    """All rounds together."""
    rounds: tuple[Load, ...]
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


class Candidate(Record):
    """One variant in a decision."""

    variant: str
    digest: str | None
    evaluation_key: str | None
    excluded: str | None
    """Why it could not win, or None if it could."""
    raw: dict[str, float]
    """By metric, in the units of ``scoring.metrics.METRICS``; empty if it was not measured."""
    normalized: dict[str, float]
    """By metric, 0–1, 1 is best."""
    score: float | None
    score_low: float | None
    score_high: float | None
    """95 % interval of the score, from the noise of what was measured."""
    win_probability: float | None
    """That it scores highest if the measurement is repeated."""
    weights_share: float | None
    """Share of the weightings near the profile's under which it scores highest."""
    pareto: bool | None
    """Whether no other variant is at least as good in every metric and better in one."""
    against_fp16: tuple[Paired, ...]
    """Task by task; empty for fp16 itself, and where the items can't be paired."""


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
    separated: bool
    """Whether the evidence separates the best score from the others; if not, the higher quality was preferred."""
    profile: dict[str, Any]
    weights: dict[str, float]
    """Shares with sum 1."""
    noise: dict[str, float]
    """By metric, in its unit: the largest difference between two variants that chance explains."""
    units: dict[str, str]
    """Of the raw metrics."""
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
