"""``evaluations/<variant>.json``: everything that was measured of one variant under one workload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal

from pydantic import Field

from stages.parts.base.serving_settings import Recipe
from stages.parts.base.store import ModelStore, Record
from stages.parts.machine.hardware import Hardware

SAMPLES_SUFFIX: Final = ".samples.jsonl"
"""The raw samples beside an evaluation, from which everything else can be computed again."""
REFUSED_SUFFIX: Final = ".refused.json"


class TaskScore(Record):
    """One lm-eval task, measured through the server."""

    task: str
    """``task@adapter`` if a LoRA adapter was asked instead of the model."""
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


class Intervals(Record):
    """95 % intervals, low and high: over the starts of the server; with a single start by the ranks of the requests,
    which understates the noise."""

    p50: tuple[float, float]
    p95: tuple[float, float]
    p99: tuple[float, float]


class Percentiles(Record):
    mean: float
    p50: float
    p95: float
    p99: float
    intervals: Intervals | None = None
    """Only over all rounds, and not for the gaps between tokens."""


class Load(Record):
    """Load on the server: one round, or all together (percentiles over all requests, mean rates of the rounds)."""

    rate_per_s: float | None = None
    """The mean rate at which requests arrived, the same for all variants; None where ``concurrency`` requests were in
    flight all the time."""
    concurrency: int
    """Requests in flight at a time; where they arrive at a rate, the mean."""
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


class Trial(Record):
    """A rate that was tried in the search for the capacity."""

    restart: int
    """The start of the server, from 0."""
    rate_per_s: float
    requests: int
    share: float | None
    """The share of the requests that met the targets, 0–1; None if the trial was ended early, because too many had
    missed them by far."""
    held: bool


class Capacity(Record):
    """The highest rate at which 95 % of the requests meet the workload's latency targets."""

    ttft_ms: float
    """The targets: the highest times allowed."""
    tpot_ms: float
    requests_per_s: float
    """The geometric mean over the starts of the server."""
    output_tokens_per_s: float
    """The same in tokens, with answers as long as those of the rounds."""
    low: float | None
    """95 % interval of ``output_tokens_per_s``, by Student's t over the starts; None with a single start."""
    high: float | None
    starts: tuple[float, ...]
    """Output tokens/s of each start."""
    trials: tuple[Trial, ...]
    rule: int = 1
    """The rule by which it follows from the trials (``stages.parts.samples.capacity.RULE``)."""

    @property
    def is_lower_bound(self) -> bool:
        """Whether after some start the highest rate that was tried held, so that the server can do more. A single
        failure among two trials of it does not count."""
        for start in {trial.restart for trial in self.trials}:
            rates = {trial.rate_per_s for trial in self.trials if trial.restart == start}
            results = [trial.held for trial in self.trials if (trial.restart, trial.rate_per_s) == (start, max(rates))]
            if 2 * sum(results) >= len(results):
                return True
        return False


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
    """Before the first block; in older records, before the load of the first start of the server."""
    between: tuple[Speed, ...] = ()
    """After each block but the last, and before the next, alternately."""
    after: Speed
    """After the last block."""
    largest_change: float
    """The largest relative change during one block: 0.2 is a fifth faster or slower."""
    measured_again: int = 0
    """In older records, the starts whose load was measured again, because the change exceeded a limit."""

    def probes(self) -> tuple[Speed, ...]:
        """Return all probes in order: one before and one after each block."""
        return (self.before, *self.between, self.after)


class Memory(Record):
    weights_bytes: int
    peak_resident_bytes: int
    """The highest sum of the resident sets of the server's processes while it was measured."""
    peak_gpu_bytes: int | None
    """None in older records also if servers shared a GPU, whose memory the driver reports as a whole."""
    kv_cache_tokens: int


class ColdStart(Record):
    """The seconds of a server's start, by what it did in turn."""

    imports_s: float
    """Until its engine began: Python, the imports of vLLM's processes, the model's configuration."""
    weights_s: float
    compilation_s: float
    engine_s: float
    """The rest until it listened: memory profile, KV cache, warm-up, CUDA graphs."""
    first_answer_s: float
    """From when it said that it is healthy."""

    @property
    def text(self) -> str:
        """Say in a line how long each part took."""
        return ", ".join(f"{name[:-2].replace('_', ' ')} {seconds:.1f} s" for name, seconds in self)


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
    stack: dict[str, str] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """The versions that it computed by: of vLLM, what it is made of, and the GPUs' driver. A release is served by that
    version of vLLM; those of older versions of Slipway have none, and are served by the installed one."""
    cores: tuple[int, ...] = ()
    """The CPU cores that its threads were bound to, by its log; none on a GPU."""
    ready_s: float
    """From its start to its first answer, the first time."""
    start: ColdStart | None = Field(default=None, exclude_if=lambda value: value is None)
    """The parts of ``ready_s``; absent in older records, and if the log lacks them."""


class Schedule(Record):
    """How far the measurement of a model's variants came. It is the same for all that were measured together."""

    variants: tuple[str, ...]
    """Those that were measured together."""
    profile: str
    """The digest of the profile by which it was decided what to measure next."""
    budget_s: float
    spent_s: float
    """Time for starts, load and quality of all variants together."""
    ended: Literal["settled", "budget", ""]
    """settled: more measuring would not change the choice. budget: it is spent. Empty: the measurement was interrupted
    or goes on."""
    said: str
    """The outcome of the last look, in one sentence."""


class Evaluation(Record):
    """``evaluations/<variant>.json``: everything measured of one variant under one workload."""

    variant: str
    variant_digest: str
    base_digest: str
    workload: dict[str, Any]
    engine: Engine
    hardware: Hardware
    key: str
    """``digest_of`` variant digest, workload, serving settings, tool versions and hardware. How long was measured does
    not count."""
    samples_sha256: str
    """The digest of the raw samples beside it, from which every figure can be computed again."""
    tool_versions: dict[str, str]
    quality: tuple[TaskScore, ...]
    """Asked at one start of the server; in older records, the mean over all starts."""
    load: Load
    """All rounds together."""
    rounds: tuple[Load, ...]
    """The rounds of all starts, in the order of their numbers in the samples."""
    capacity: Capacity | None = None
    """None if the workload has no ``slo``: ``load`` then shows the saturated server."""
    goodput: Goodput | None = None
    """At the rate of the rounds; None if the workload has no ``slo``."""
    interleaved_with: tuple[str, ...] = ()
    """In older records, variants whose servers ran side by side with this one's and took turns with it."""
    drift: Drift | None = None
    probes: tuple[Probe, ...] = ()
    """See ``stages.parts.vllm.probes``; empty if none were recorded."""
    agreement: float | None = None
    """How far the server's answers to these questions agreed with the probabilities that it gives to the same text
    (``scoring.probes``), 0–1; None if that was not asked."""
    not_asked: dict[str, str] = Field(default={})
    """The workload's tasks that the model can't be asked, and why."""
    looks: tuple[float, ...] = ()
    """When the data were looked at, after each block in which the variant was measured: the number of budgets that had
    ended and the used share of the present one (``scoring.sequential``); empty if they were looked at only once."""
    schedule: Schedule | None = None
    """None in records of older versions."""
    memory: Memory
    recipe: Recipe | None = Field(default=None, exclude_if=lambda value: value is None)
    """Absent if it was served with the run's serving settings as they are."""
    gpu_share: float = Field(default=1.0, exclude_if=lambda value: value == 1)
    """The GPUs of its server, divided by those of candidates whose recipe says nothing of them. Its load was in
    proportion: two servers on half of the GPUs take the place of one."""
    stored: dict[str, int] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """``Variant.stored``: what the weights are stored in; ``engine.dtype`` says what they are served in."""
    beside: tuple[str, ...]
    """Models that were served on the same machine meanwhile, so that the figures are those of a shared machine."""
    started_at: datetime
    seconds: float

    @property
    def adapters(self) -> dict[str, str]:
        """The digests of the LoRA adapters that were asked too, by name."""
        return dict(self.workload.get("adapters", {}))

    def metrics(self) -> dict[str, float]:
        """Return the four metrics of ``scoring.metrics.METRICS``, in their units; NaN for what was not measured. The
        throughput is that on as many GPUs as all candidates have."""
        scores = [task.score for task in self.quality]
        return {
            "quality": sum(scores) / len(scores) if scores else float("nan"),
            "latency": self.load.e2el_ms.p95,
            "throughput": (self.capacity or self.load).output_tokens_per_s / self.gpu_share,
            "memory": float(self.memory.weights_bytes),
        }


class Refused(Record):
    """``evaluations/<variant>.refused.json``: a variant that failed a gate and therefore was never loaded."""

    variant: str
    variant_digest: str
    key: str
    """As of an evaluation (``Evaluation.key``)."""
    limits: str
    """The digest of the limits that it was tried by. By others it is measured again; always, if it was only too slow,
    because the machine may have been busy. Then this is empty."""
    reason: str
    """One sentence that names the gates."""
    started_at: datetime
    seconds: float


def measures_of(load: Load, goodput: Goodput | None) -> dict[str, float | None]:
    """Return what a load gives of ``scoring.constraints.MEASURES``, in their units; None for what was not measured."""
    return {
        "ttft_p95_ms": load.ttft_ms.p95,
        "tpot_p95_ms": load.tpot_ms.p95,
        "e2el_p95_ms": load.e2el_ms.p95,
        "goodput_share": goodput.share if goodput else None,
    }


def cold_starts(store: ModelStore | None) -> dict[str, ColdStart]:
    """Read the parts of the first start of each candidate that was measured; of those whose log had them."""
    paths = sorted(store.evaluation("").parent.glob("*.json")) if store else []
    documents = (Evaluation.read_if_intact(path) for path in paths if not path.name.endswith(REFUSED_SUFFIX))
    return {each.variant: each.engine.start for each in documents if each and each.engine.start}


def machine_of(evaluation: Evaluation) -> str:
    """Name the hardware that speed depends on; memory only has to suffice, and speed is compared per GPU."""
    hardware = evaluation.hardware
    able = [hardware.processor.name] if hardware.processor else []
    return ", ".join([f"{hardware.cores} × {hardware.cpu}", *able, *dict.fromkeys(hardware.gpus)])


def by_machine(evaluations: Mapping[str, Evaluation]) -> dict[str, list[str]]:
    """Group the variants by the hardware that they were measured on."""
    return grouped({name: machine_of(evaluation) for name, evaluation in evaluations.items()})


def grouped(values: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        groups[value].append(name)
    return dict(groups)
