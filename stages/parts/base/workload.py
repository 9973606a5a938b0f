"""The workload: with which requests and questions variants are measured, and how carefully."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from stages.parts.base.settings import Positive, Settings


class Protocol(NamedTuple):
    """How carefully variants are measured."""

    budget_minutes: float
    error_rate: float
    """The profile's, unless it sets its own."""


PROTOCOLS: Final = {"quick": Protocol(20, 0.1), "standard": Protocol(120, 0.05), "thorough": Protocol(240, 0.02)}


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

    replaced: ClassVar = {
        "rounds": "every start of a server has one round; workload.budget_minutes says how long is measured",
        "restarts": "servers are started anew until the choice is settled, for at most workload.budget_minutes",
        "interleave": "the variants are measured in blocks of one start each, in an order that rotates",
        "drift_limit": "drift affects all variants of a block alike and is only recorded",
    }

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
    while measuring. The search for the capacity begins with what the server achieves with that many."""
    request_rate_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Requests arrive at random (a Poisson process) at this mean rate while latency is measured. None: at 70 % of
    fp16's capacity. The same for all variants."""
    steady_s: Annotated[float, Field(gt=0)] = 30
    """Seconds at this rate after each start of the server. Longer if fewer than 20 requests would arrive."""
    ramp_s: Annotated[float, Field(gt=0)] = 5
    """Before and after this time requests arrive at the same rate for this many seconds and do not count: the server is
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
    """Return the protocol of a workload that is not validated yet; the default one for an unknown name."""
    default = Workload.model_fields["protocol"].default
    return PROTOCOLS.get(str(workload.get("protocol", default)), PROTOCOLS[default])
