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
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from stages.parts.base.errors import ConfigError

CONFIGS: Final = Path(__file__).parents[3] / "configs"
SettingsT = TypeVar("SettingsT", bound=BaseModel)
SHOWN_VALUE_CHARACTERS: Final = 60
Positive = Annotated[int, Field(gt=0)]
Percent = Annotated[int, Field(gt=0, le=100)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=1)]


VariantName = Literal["fp16", "awq", "gptq", "int8"]
REFERENCE: Final = "fp16"
"""The variant with which the others are compared; every run makes and measures it."""


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

    @field_validator("variants")
    @classmethod
    def _with_the_reference_once(cls, variants: tuple[str, ...]) -> tuple[str, ...]:
        if REFERENCE not in variants:
            raise ValueError(f"{REFERENCE} is the reference and can't be left out")
        if len(set(variants)) < len(variants):
            raise ValueError("variants names a variant twice")
        return variants


class Serving(Settings):
    """How vLLM serves. Evaluation and production use the same settings, so that the measurements hold in production."""

    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """auto: float16 on a GPU. Without one, bfloat16 if the processor has bf16 arithmetic, otherwise float32, which is
    faster there and takes twice the memory; awq and gptq are served in bfloat16 there too, since vLLM computes 4-bit
    weights in 16 bit only."""
    max_model_len: Positive | None = None
    """Tokens of prompt and answer together. None: the maximum in the model's config."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that vLLM uses. Not used on a CPU."""
    kv_cache_mib: Positive | None = None
    """Size of the KV cache in MiB. None: the memory that is free on a GPU, 1024 on a CPU."""
    tensor_parallel_size: Positive = 1
    """GPUs per replica, the same for every variant. If the weights do not fit into their memory, an error before the
    start says how many GPUs are enough."""
    enforce_eager: bool = False
    """True: no compilation and no CUDA graphs, which starts faster and decodes slower."""
    startup_timeout_s: Positive = 900
    """A server that is not ready after this time is stopped, and the variant fails. Large models load for minutes."""
    extra_arguments: tuple[str, ...] = ()
    """Further arguments of ``vllm serve``, passed unchanged."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port of the production endpoint. 0: any free port. Evaluations always use a free port."""


PROTOCOLS: Final[dict[str, dict[str, Any]]] = {
    "quick": {"rounds": 3, "restarts": 1, "interleave": False, "drift_limit": None},
    "standard": {"rounds": 4, "restarts": 1, "interleave": True, "drift_limit": 0.15},
    "thorough": {"rounds": 4, "restarts": 3, "interleave": True, "drift_limit": 0.15},
}
"""The fields that each protocol sets, unless the workload sets them itself."""


class Slo(Settings):
    """The latency limits that a request must meet to count towards goodput."""

    ttft_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Maximum time to the first token, in ms."""
    tpot_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Maximum time per output token after the first, in ms."""


class Workload(Settings):
    """The requests and the quality tasks with which variants are measured. Every result names its workload."""

    name: str
    protocol: Literal["quick", "standard", "thorough"] = "standard"
    """How carefully variants are measured: the defaults of ``rounds``, ``restarts``, ``interleave`` and ``drift_limit``
    (see ``PROTOCOLS``). standard: one start of the server, four rounds and the quality tasks per variant; quick: one
    round less; thorough: three times as much. A sweep is run once in addition."""
    prompt_tokens: Positive | None = None
    """Mean length of the prompts. Set it together with ``output_tokens``, or set a ``trace`` instead of both."""
    prompt_spread: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lengths are drawn uniformly from mean × (1 ± spread). 0: all prompts have the same length."""
    output_tokens: Positive | None = None
    output_spread: Annotated[float, Field(ge=0, lt=1)] = 0.0
    trace: str | None = None
    """Your own requests instead of random ones: a .jsonl file with one request per line, either
    ``{"prompt": "…", "output_tokens": n}`` or only lengths, ``{"prompt_tokens": n, "output_tokens": m}``. The path is
    relative to the workload's file. Each round continues after the last line of the previous round, and starts
    again at the top after the end of the file."""
    concurrency: Positive
    """Requests in flight at the same time. Not used with ``request_rate_per_s``: users do not wait for each other."""
    request_rate_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Requests arrive at random (a Poisson process) at this mean rate. None: as fast as ``concurrency`` allows."""
    sweep: tuple[Positive, ...] = ()
    """Further concurrencies, each measured for one round. Only ``concurrency`` is scored."""
    requests: Positive
    """Number of requests in each round."""
    rounds: Positive = PROTOCOLS["standard"]["rounds"]
    """Rounds after each start of the server. Each round has its own prompts, the same for every variant. Differences
    between rounds are noise, and a difference between variants has to exceed it. One round measures no noise."""
    restarts: Positive = PROTOCOLS["standard"]["restarts"]
    """Starts of the server, each followed by all rounds and quality tasks: a restart alone changes both results."""
    interleave: bool = PROTOCOLS["standard"]["interleave"]
    """The servers of all variants run side by side and take turns (A B C, C B A, …), so that a slow drift of the
    machine affects all of them equally. If they don't fit, the variants are measured one after another."""
    warmup_requests: Annotated[int, Field(ge=0)] = 4
    """Requests sent before each round and not measured."""
    slo: Slo | None = None
    """The limits for goodput. None: goodput is not measured."""
    drift_limit: Annotated[float, Field(gt=0, lt=1)] | None = PROTOCOLS["standard"]["drift_limit"]
    """If the machine itself becomes faster or slower by more than this share during the load, the load is measured once
    more. None: drift is only recorded. GPUs are not probed, so on a machine with GPUs drift is only recorded."""
    seed: int = 0
    quality_tasks: tuple[str, ...] = Field(min_length=1)
    """Names of lm-eval tasks."""
    tasks_path: str | None = None
    """A folder with your own task definitions, in addition to lm-eval's. Relative to the workload's file."""
    quality_limit: Positive | None = None
    """Maximum number of items per task. None: all."""
    divergence_documents: Annotated[int, Field(ge=0)] = 32
    """Number of held-out texts on which the variants' next-token distributions are compared with fp16's. 0: no
    comparison; then only fp16 passes a profile's limits on ``kl_divergence`` and ``top1_agreement``."""
    divergence_tokens: Annotated[int, Field(ge=2)] = 128
    """Tokens from the start of each text."""
    divergence_text: str = "python-docs"
    """A name in ``configs/held-out/``, or a path to a .txt or .jsonl file as in ``Calibration.text``, relative to the
    workload's file. It must not contain the texts with which the quantizers were calibrated."""

    @model_validator(mode="before")
    @classmethod
    def _filled_by_the_protocol(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        defaults = PROTOCOLS.get(str(data.get("protocol", cls.model_fields["protocol"].default)), PROTOCOLS["quick"])
        return {**defaults, **data}

    @model_validator(mode="after")
    def _one_kind_of_requests(self) -> Self:
        lengths = (self.prompt_tokens, self.output_tokens)
        if self.trace is None and None in lengths:
            raise ValueError("prompt_tokens and output_tokens are required without a trace")
        if self.trace is not None and (lengths != (None, None) or self.prompt_spread or self.output_spread):
            raise ValueError("a trace has its own lengths: remove prompt_tokens, output_tokens and the spreads")
        if len(set(self.sweep)) < len(self.sweep):
            raise ValueError("sweep names a concurrency twice")
        return self

    def longest(self) -> tuple[int, int]:
        """Tokens of the longest prompt and of the longest answer that can be drawn; (0, 0) with a trace."""
        prompt = math.ceil((self.prompt_tokens or 0) * (1 + self.prompt_spread))
        return prompt, math.ceil((self.output_tokens or 0) * (1 + self.output_spread))


class Rollout(Settings):
    """How traffic is moved to a new release, and when it is moved back.

    A latency limit is the stable release's figure times the ratio, plus the slack. The slack tolerates a few
    milliseconds of a fast model; the ratio tolerates as much, in proportion, of a slow one.
    """

    steps: tuple[Percent, ...] = (10, 50, 100)
    """Percentages of new requests, ascending to 100. A first release gets 100 % once it answers."""
    step_s: Seconds = 60
    """The shortest time of each step."""
    min_requests: Positive = 50
    """Each release must have answered so many within a step: fewer can't show a 95th percentile."""
    step_timeout_s: Seconds = 900
    """If a step has shown neither good nor bad results by then, the rollout goes back: no evidence is no success."""
    ready_timeout_s: Seconds = 1800
    """The longest time from deploying to the first answer; large models load for minutes."""
    poll_s: Annotated[float, Field(gt=0)] = 2
    synthetic: bool = True
    """If clients send too few requests within ``step_s``, the rollout sends short ones of its own to both releases."""
    own_timeout_s: Annotated[float, Field(gt=0)] = 30
    """If one of these is not answered by then, it has failed. A look at a canary that hangs takes about twice as long.
    Raise it if the stable release needs longer for 16 tokens under load."""
    approval: bool = False
    """True: stop before 100 % until a person runs ``slipway rollout promote``; then observe the canary once more."""
    ttft_ratio: Ratio = 1.25
    """p95 time to first token, relative to the stable release's."""
    ttft_slack_ms: Seconds = 50
    tpot_ratio: Ratio = 1.25
    """p95 time per output token, relative to the stable release's."""
    tpot_slack_ms: Seconds = 5
    speed_ratio: Share = 0.75
    """Output tokens per second of each request in flight must be at least this share of the stable release's, in at
    least half of the looks. 0 turns the check off."""
    error_slack: Share = 0.01
    """The canary's share of failed requests may exceed the stable release's by this much."""
    significance: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """The p-value below which a worse result is not due to chance. It is below 0.05 because there are many looks."""
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
            close = difflib.get_close_matches(str(each["loc"][-1]), _fields_at(model, each["loc"][:-1]), n=1)
            message = "unknown field" + (f", did you mean {close[0]!r}?" if close else "")
        elif each["type"] != "missing":
            message += f" (got {str(each['input'])[:SHOWN_VALUE_CHARACTERS]!r})"
        lines.append(f"{field}: {message}")
    return lines


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for name in path:
        field = model.model_fields.get(str(name))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
