"""The settings of the stages. Each model is frozen, and an unknown or wrong field is an error.

The defaults are here and in ``configs/defaults.yaml``, which a person reads; a test compares the two.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from scoring.names import REFERENCE, VariantName
from stages.parts.base.errors import ConfigError

CONFIGS: Final = Path(__file__).parents[3] / "configs"
SettingsT = TypeVar("SettingsT", bound=BaseModel)
SHOWN_VALUE_CHARACTERS: Final = 60
Positive = Annotated[int, Field(gt=0)]
Percent = Annotated[int, Field(gt=0, le=100)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=1)]
AbsolutePath = Annotated[str, Field(pattern="^/")]


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Calibration(Settings):
    """The text from which AWQ and GPTQ compute their scales."""

    text: str = "python-docs"
    """A name in ``configs/calibration/``, or a path to a .txt file (documents separated by form feeds or, if it has
    none, by blank lines) or to a .jsonl file with a ``text`` field. It must not contain the texts on which quality is
    measured."""
    samples: Positive = 128
    """Number of sequences. The GPTQ paper uses 128; fewer are faster and give noisier scales."""
    sequence_length: Positive = 512
    """Tokens per sequence."""
    seed: int = 0


class Optimize(Settings):
    """Which variants are made, and how."""

    variants: tuple[VariantName, ...] = ("fp16", "awq", "gptq", "int8")
    """fp16 is the reference with which the others are compared, so it can't be left out."""
    group_size: Literal[32, 64, 128] = 128
    """Weights that share one scale in awq and gptq. It must divide the input widths of the layers. 32 is the most exact
    and largest."""
    calibration: Calibration = Calibration()
    make_unservable: bool = False
    """True: make a variant that vLLM can't serve where it would be measured, for another machine. It is not measured
    and can't win. False: it is left out before it is made."""

    allow_incomplete: bool = False
    """What happens if a variant of ``variants`` could not be made or measured. False: the best of the others is
    published, but neither served nor put in production, and the run ends with exit code 45. True: it is used like any
    other winner. A variant that can't be served on this machine is left out beforehand and is not missing."""

    @field_validator("variants")
    @classmethod
    def _with_the_reference_once(cls, variants: tuple[str, ...]) -> tuple[str, ...]:
        if REFERENCE not in variants:
            raise ValueError(f"{REFERENCE} is the reference and can't be left out")
        if len(set(variants)) < len(variants):
            raise ValueError("variants names a variant twice")
        return variants


PINNED: Final = ("max_model_len", "tensor_parallel_size", "startup_timeout_s", "max_queued_tokens")
"""The serving settings in which *auto* becomes a number before anything is served."""


class AskedServing(Settings):
    """How vLLM is to serve. Evaluation and production use the same settings, so that the measurements hold in
    production. ``check`` decides what *auto* means, and everything after it uses ``Serving``."""

    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """auto: on a GPU the 16-bit type in which the variant is stored, which is the model's own; float16 on a GPU without
    bfloat16 (compute capability below 8.0). Without a GPU, bfloat16 if the processor has bf16 arithmetic, otherwise
    float32, which is faster there and takes twice the memory; awq and gptq are served in bfloat16 there too, since vLLM
    computes 4-bit weights in 16 bit only."""
    max_model_len: Positive | Literal["auto"] | None = "auto"
    """Tokens of prompt and answer together. auto: the longest that fits fp16 where it is measured, at most the model's
    own. None: the model's own."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that vLLM uses. Not used on a CPU."""
    kv_cache_mib: Positive | None = None
    """Size of the KV cache in MiB. None: the memory that is free on a GPU, 1024 on a CPU."""
    tensor_parallel_size: Positive | Literal["auto"] = "auto"
    """GPUs per replica, the same for every variant. auto: the fewest on which fp16 fits with room for the workload's
    requests in flight; in production fewer, if the winner was measured there and is cheaper per GPU-hour."""
    enforce_eager: bool = False
    """True: no compilation and no CUDA graphs, which starts faster and decodes slower."""
    startup_timeout_s: Positive | Literal["auto"] = "auto"
    """A server that is not ready after this time is stopped, and the variant fails. auto: what compiling takes, and
    reading the weights from a slow volume; at least 900."""
    extra_arguments: tuple[str, ...] = ()
    """Further arguments of ``vllm serve``, passed unchanged."""
    max_queued_tokens: Positive | Literal["auto"] | None = "auto"
    """Prompt tokens that may wait at a server of production before further requests are answered 503. auto: as many as
    the release was measured to read within the workload's target for the first token, and at least its context; no
    limit if that is not known, or if ``extra_arguments`` has one. None: no limit. Evaluations have none."""
    replicas: Positive = 1
    """Servers of each release on one machine: each with ``tensor_parallel_size`` GPUs of its own, or without GPUs with
    an equal part of the cores. Evaluations measure one of them. On a cluster ``kserve.scaling`` says how many."""
    affinity: Literal["session", "client", "none"] = "session"
    """Which requests go to the same replica, where the beginning of their prompt is cached. session: those with the
    same header ``x-session-id``; those without one go where the fewest are under way. That is the default because a
    client is often a program with many users, who share little of a prompt. client: also those of the same client at
    the same address that name no session. none: all go where the fewest are under way."""
    request_timeout_s: Positive = 3600
    """The longest time that one request to the production endpoint may take, to the end of its answer. Longer than
    clients wait for the longest answer; a request that hangs ends some time. On a cluster: ``kserve.timeout_s``."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port of the production endpoint. 0: any free port. Evaluations always use a free port."""
    tls_certificate: AbsolutePath | None = None
    """A PEM file on this machine: the production endpoint's certificate, with its chain. Read again when it changes."""
    tls_key: AbsolutePath | None = None
    """The certificate's key, a PEM file without a password."""
    plain_http: bool = False
    """True: without a certificate, serve on an address that other machines reach all the same."""

    @model_validator(mode="after")
    def _certificate_with_its_key(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together")
        return self

    def pinned(self, **figures: int | None) -> Serving:
        """The settings with these figures, or else the defaults of ``Serving``, in place of every *auto*."""
        asked = self.model_dump()
        given = {name: value for name, value in asked.items() if name not in PINNED or value != "auto"}
        return Serving(**({name: value for name, value in figures.items() if name not in given} | given))


class Serving(AskedServing):
    """How vLLM serves, with nothing left open."""

    max_model_len: Positive | None = None
    tensor_parallel_size: Positive = 1
    startup_timeout_s: Positive = 900
    max_queued_tokens: Positive | None = None


class Protocol(NamedTuple):
    """How carefully variants are measured."""

    budget_minutes: float
    error_rate: float
    """The profile's, unless it sets its own."""


PROTOCOLS: Final = {"quick": Protocol(20, 0.1), "standard": Protocol(120, 0.05), "thorough": Protocol(240, 0.02)}
REPLACED_IN_WORKLOAD: Final = {
    "rounds": "every start of a server has one round; workload.budget_minutes says how long is measured",
    "restarts": "servers are started anew until the choice is settled; workload.budget_minutes says how long at most",
    "interleave": "the variants are measured in blocks of one start each, in an order that rotates",
    "drift_limit": "drift affects all variants of a block alike and is only recorded",
}
REPLACED_IN_ROLLOUT: Final = {
    "significance": "rollout.error_rate is that of a whole rollout, all its looks and checks together",
    "speed_ratio": "rollout.tpot_ratio limits the time per output token of the same requests to both releases",
}
REPLACED: Final = {"budget_minutes": REPLACED_IN_WORKLOAD, "error_rate": REPLACED_IN_ROLLOUT}
"""Fields that there were once, and what there is in their place; by a field of the same settings."""


class Slo(Settings):
    """The latency targets. A rate of requests is within a variant's capacity if 95 % of the requests meet both."""

    ttft_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Maximum time to the first token, in ms."""
    tpot_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Maximum time per output token after the first, in ms."""


DEFAULT_SLO: Final = Slo(ttft_ms=2000, tpot_ms=200)
"""The limits of MLPerf Inference for Llama 2 70B in the server scenario."""


class Workload(Settings):
    """The requests and the quality tasks with which variants are measured. Every result names its workload."""

    name: str
    protocol: Literal["quick", "standard", "thorough"] = "standard"
    """How carefully variants are measured: the defaults of ``budget_minutes`` and of the profile's ``error_rate``."""
    budget_minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] = PROTOCOLS["standard"].budget_minutes
    """Time for measuring all variants of a model, their quality included. Measuring ends earlier once the choice is
    settled. Two starts of every server are measured in any case: a single one shows no noise."""
    prompt_tokens: Positive | None = None
    """Mean length of the prompts. Set it together with ``output_tokens``, or set a ``trace`` instead of both."""
    prompt_spread: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lengths are drawn uniformly from mean × (1 ± spread). 0: all prompts have the same length."""
    output_tokens: Positive | None = None
    output_spread: Annotated[float, Field(ge=0, lt=1)] = 0.0
    trace: str | None = None
    """Your own requests instead of random ones: a .jsonl file with one request per line, either
    ``{"prompt": "…", "output_tokens": n}`` or only lengths, ``{"prompt_tokens": n, "output_tokens": m}``. The path is
    relative to the workload's file. Each start of the server continues where the previous one stopped, and begins
    again at the top after the end of the file."""
    concurrency: Positive
    """Requests in flight at the expected peak, for ``slipway plan`` and ``slipway drill``; with ``slo: null`` also
    while measuring. The search for the capacity begins with what the server achieves with so many."""
    request_rate_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Requests arrive at random (a Poisson process) at this mean rate while latency is measured. None: at 70 % of
    fp16's capacity. The same for all variants."""
    steady_s: Annotated[float, Field(gt=0)] = 30
    """Seconds at this rate after each start of the server. Longer if fewer than 20 requests would arrive."""
    ramp_s: Annotated[float, Field(gt=0)] = 5
    """Before and after this time requests arrive at the same rate for so many seconds, and do not count: the server is
    not yet, or no longer, as busy as in between. It should be longer than most requests take."""
    trial_s: Annotated[float, Field(gt=0)] = 10
    """Seconds of each trial of a rate in the search for the capacity, between ramps. Longer for fewer than 20
    requests."""
    trials: Annotated[int, Field(ge=3)] = 8
    """The largest number of trials after each start, and up to five more where the capacity is not enclosed yet or a
    failure not confirmed. Later starts need two or three, because they begin with what was found before."""
    warmup_requests: Annotated[int, Field(ge=0)] = 4
    """Requests sent first after each start, with a prompt that is not measured."""
    slo: Slo | None = DEFAULT_SLO
    """The targets of capacity, which is the throughput that counts. null: nobody waits for the answers, as in offline
    generation; throughput is then what the server achieves with ``concurrency`` requests in flight all the time."""
    seed: int = 0
    quality_tasks: tuple[str, ...] = Field(min_length=1)
    """Names of our own tasks (``stages.evaluate.questions``) and of lm-eval's."""
    tasks_path: str | None = None
    """A folder with your own task definitions, in addition to lm-eval's. Relative to the workload's file."""
    quality_limit: Positive | None = None
    """Maximum number of items per task. None: all."""
    quality_concurrency: Positive | None = None
    """Questions asked at the same time. None: 64 on a GPU, 8 without one."""
    divergence_documents: Annotated[int, Field(ge=0)] = 32
    """Number of held-out texts on which the variants' next-token distributions are compared with fp16's. 0: no
    comparison; then only fp16 passes a profile's limits on ``kl_divergence`` and ``top1_agreement``."""
    divergence_tokens: Annotated[int, Field(ge=2)] = 128
    """Tokens from the start of each text."""
    divergence_text: str = "prose"
    """A name in ``configs/held-out/``, or a path to a .txt or .jsonl file as in ``Calibration.text``, relative to the
    workload's file. It must not contain the texts with which the quantizers were calibrated, and is best of another
    kind: what a calibration spoils does not show on text of its own kind."""

    @model_validator(mode="before")
    @classmethod
    def _filled_by_the_protocol(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {"budget_minutes": protocol_of(data).budget_minutes, **data}

    @model_validator(mode="after")
    def _one_kind_of_requests(self) -> Self:
        lengths = (self.prompt_tokens, self.output_tokens)
        if self.trace is None and None in lengths:
            raise ValueError("prompt_tokens and output_tokens are required without a trace")
        if self.trace is not None and (lengths != (None, None) or self.prompt_spread or self.output_spread):
            raise ValueError("a trace has its own lengths: remove prompt_tokens, output_tokens and the spreads")
        return self

    def longest(self) -> tuple[int, int]:
        """Tokens of the longest prompt and of the longest answer that can be drawn; (0, 0) with a trace."""
        prompt = math.ceil((self.prompt_tokens or 0) * (1 + self.prompt_spread))
        return prompt, math.ceil((self.output_tokens or 0) * (1 + self.output_spread))


def protocol_of(workload: Mapping[str, Any]) -> Protocol:
    """The protocol of a workload that is not validated yet; the default one for a name that is none."""
    default = Workload.model_fields["protocol"].default
    return PROTOCOLS.get(str(workload.get("protocol", default)), PROTOCOLS[default])


class Rollout(Settings):
    """How traffic is moved to a new release, and when it is moved back.

    A latency limit is the stable release's figure times the ratio, plus the slack. The slack tolerates a few
    milliseconds of a fast model; the ratio tolerates as much, in proportion, of a slow one.
    """

    steps: tuple[Percent, ...] = (10, 50, 90, 100)
    """Percentages of new requests, ascending to 100. A first release gets 100 % once it answers. Latencies are compared
    sharply up to 50 %, and most fairly at 50 %, where both releases carry the same load. Beyond, they are compared with
    those of the stable release at a similar load, which takes a step with a small share, such as 10 %."""
    step_s: Seconds = 60
    """The shortest time of each step."""
    min_requests: Positive = 50
    """Each release must have answered that many within a step; the pairs alone are as many."""
    step_timeout_s: Seconds = 900
    """If a step has shown neither good nor bad results by then, the rollout goes back: no evidence is no success."""
    ready_timeout_s: Seconds | Literal["auto"] = "auto"
    """The longest time from deploying to the first answer. auto: what ``serving.startup_timeout_s`` comes to, and 15
    minutes more, in which a node is found or added and the image pulled."""
    poll_s: Annotated[float, Field(gt=0)] = 2
    synthetic: bool = True
    """Send pairs: the same request to both releases at the same moment, about one a second. Without them, latencies are
    those of the clients' requests, which must then be alike at both releases: False is wrong for clients that stick to
    a server."""
    own_timeout_s: Annotated[float, Field(gt=0)] = 30
    """A request of a pair that is not answered by then has failed. A look at a canary that hangs takes as long. Raise
    it if the stable release needs longer for 16 tokens under load."""
    approval: bool = False
    """True: stop before 100 % until a person runs ``slipway rollout promote``; then observe the canary once more."""
    ttft_ratio: Ratio = 1.25
    """Time to first token, relative to the stable release's."""
    ttft_slack_ms: Seconds = 20
    tpot_ratio: Ratio = 1.1
    """Time per output token, relative to the stable release's. The nearer it is to 1, the longer it takes to show that
    a good canary is within the limit."""
    tpot_slack_ms: Seconds = 1
    error_slack: Share = 0.01
    """The canary's share of failed requests may exceed the stable release's by this much, and so may the share of those
    that are answered far too late."""
    error_rate: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """The probability that a canary as good as the stable release is rolled back by chance: over the whole rollout, all
    looks, steps and checks together."""
    agreement: Share = 0.9
    """How far the answers to the recorded questions must agree with those that were recorded when the release was
    measured (``scoring.probes``). 0 turns the questions off."""
    restarts: Annotated[int, Field(ge=0)] = 1
    """How often a canary's server may restart during a rollout, for instance because a pod moves. One more restart
    counts as crashing."""

    @field_validator("steps")
    @classmethod
    def _ascending_to_all(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if not steps or steps[-1] != 100 or any(a >= b for a, b in itertools.pairwise(steps)):
            raise ValueError("steps must ascend and end with 100")
        return steps


def parse(model: type[SettingsT], data: Mapping[str, Any], where: str) -> SettingsT:
    """Validate *data* and show all mistakes at once, one per line.

    Raises:
        ConfigError: names each wrong field and *where* it is: the file or the flag.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError.of_many(mistakes(error, model), where) from error


def parse_json(model: type[SettingsT], text: str, where: str) -> SettingsT:
    """Like ``parse``, from the JSON text of a flag.

    Raises:
        ConfigError: *text* is not a JSON object, or has a wrong field.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is not a JSON object")
    return parse(model, data, where)


def mistakes(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per mistake. For an unknown field it suggests the most similar known name."""
    lines = []
    for each in error.errors():
        field = ".".join(str(part) for part in each["loc"]) or "(root)"
        message = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            message = _unknown(str(each["loc"][-1]), _fields_at(model, each["loc"][:-1]))
        elif each["type"] != "missing":
            message += f" (got {str(each['input'])[:SHOWN_VALUE_CHARACTERS]!r})"
        lines.append(f"{field}: {message}")
    return lines


def _unknown(field: str, known: list[str]) -> str:
    for name, replaced in REPLACED.items():
        if name in known and field in replaced:
            return f"there is no such field any more: {replaced[field]}"
    close = difflib.get_close_matches(field, known, n=1)
    return "unknown field" + (f", did you mean {close[0]!r}?" if close else "")


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for name in path:
        field = model.model_fields.get(str(name))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
