"""The settings of vLLM and of the endpoint in front of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from scoring.names import PRODUCTION, WITH_RECIPE, recipe_of
from stages.parts.base.settings import AbsolutePath, Positive, Settings

PINNED: Final = (
    *("max_model_len", "tensor_parallel_size", "startup_timeout_s", "max_queued_tokens"),
    *("tool_parser", "reasoning_parser"),
)
"""The serving settings in which *auto* becomes what a release was measured with."""
KvCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
Parser = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
"""auto, none, or a name that vLLM knows."""
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,62}$")]
"""The name of a directory and, for clients, of a model."""

HostPort = Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:]+\]|[\w.-]+):([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3})$")]
RecipeName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,38}[a-z0-9])?$")]

EngineVersion = Annotated[str, Field(pattern=r"^\d+(\.\d+)+[a-z0-9.]*$", max_length=32)]
"""A version of vLLM, as the package index has it."""


class Speculation(Settings):
    """How vLLM guesses tokens ahead, which the model then checks all at once (``--speculative-config``)."""

    method: Literal["ngram", "mtp"]
    """ngram: what followed the same tokens earlier in the prompt or answer. mtp: what layers say that some models are
    published with for it. A second model would have to be a part of the release, and is not taken."""
    num_speculative_tokens: Positive = 4
    """Tokens that are guessed at a time."""
    prompt_lookup_min: Positive | None = None
    """The fewest tokens that have to be the same, for ngram."""
    prompt_lookup_max: Positive | None = None


class Recipe(Settings):
    """A named set of engine settings that is tried with variants: what is left out is as in the serving settings."""

    description: str = ""
    variants: tuple[str, ...] | None = None
    """The variants that it is tried with; None: all."""
    optional: bool = False
    """Whether a decision is complete without its candidates, if they can't be measured."""
    kv_cache_dtype: KvCacheDtype | None = None
    speculation: Speculation | None = None
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    extra_arguments: tuple[str, ...] | None = None
    engine_version: EngineVersion | None = None
    tensor_parallel_size: Positive | None = None
    """GPUs per replica. The load is in proportion, and throughput and cost are those of as many GPUs as without it."""

    @property
    def changes(self) -> dict[str, Any]:
        """The serving settings in the place of which it has others."""
        fields = set(type(self).model_fields) - {"description", "variants", "optional"}
        return {name: value for name in sorted(fields) if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.changes:
            raise ValueError("it changes no setting")
        return self


class EngineSettings(Settings):
    """The engine under which ``slipway requalify`` tries the release in production."""

    version: EngineVersion | None = None
    """vLLM's, in an environment of its own. None: the installed one."""
    arguments: tuple[str, ...] = ()
    """Further arguments of ``vllm serve``, beside ``serving.extra_arguments``."""


class ReferenceServing(Settings):
    """How a reference is asked the quality questions that does not fit where the variants are served."""

    tensor_parallel_size: Positive = 1
    """GPUs of its server."""
    cpu_offload_gib: Annotated[int, Field(ge=0)] = 0
    """GiB of its weights for each GPU that stay in the host's memory."""
    kept: bool = False
    """Whether its answers were kept before, so that it is not served."""


class ProductionServing(Settings):
    """The release in production, which is measured beside the variants."""

    release: str
    recipe: Recipe | None = None
    """The one that it is served by."""


class AskedServing(Settings):
    """How vLLM is to serve. Evaluation and production use the same settings, so that the measurements hold in
    production. ``check`` decides what *auto* means, and everything after it uses ``Serving``."""

    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """auto: on a GPU the 16-bit type in which the variant is stored, which is the model's own; float16 on a GPU without
    bfloat16 (compute capability below 8.0). Without a GPU, bfloat16 if the processor has bf16 arithmetic, otherwise
    float32, which is faster there and takes twice the memory; awq and gptq are served in bfloat16 there too, since vLLM
    computes 4-bit weights in 16 bit only."""
    max_model_len: Positive | Literal["auto"] | None = "auto"
    """Tokens of prompt and answer together. auto: the longest that fits the largest variant where it is measured, at
    most the model's own. None: the model's own."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that vLLM uses. Not used on a CPU."""
    kv_cache_mib: Positive | None = None
    """Size of the KV cache in MiB. Without it, the memory that is free on a GPU, and 1024 on a CPU."""
    tensor_parallel_size: Positive | Literal["auto"] = "auto"
    """GPUs per replica, the same for every variant. auto: the fewest on which the largest variant that fits has room
    for the workload's requests in flight. Variants that fit on fewer are tried there too, as candidates with a recipe
    such as ``tp1``."""
    enforce_eager: bool = False
    """True: no compilation and no CUDA graphs, which starts faster and decodes slower. A GPU's kernels are then
    compiled at the first requests, which those measure."""
    startup_timeout_s: Positive | Literal["auto"] = "auto"
    """A server that is not ready after this time is stopped, and the variant fails. auto: what compiling takes, and
    reading the weights from a slow volume; at least 900. For a release, by the start that was measured."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """How keys and values are stored (``--kv-cache-dtype``). auto: in the served type. The others in 8 bit take half of
    the memory and change answers a little."""
    speculation: Speculation | None = None
    """None: every token is computed alone."""
    max_num_seqs: Positive | None = None
    """The most requests that are computed at once (``--max-num-seqs``); None: as vLLM chooses."""
    max_num_batched_tokens: Positive | None = None
    """The most tokens that are computed at once (``--max-num-batched-tokens``); None: as vLLM chooses."""
    recipes: Mapping[RecipeName, Recipe] = {}
    """Sets of engine settings, each of which is tried with variants. Configurations name files of ``configs/recipes``,
    or paths. ``gptq+ngram`` is the candidate of the variant gptq and the recipe ngram."""
    extra_arguments: tuple[str, ...] = ()
    """Further arguments of ``vllm serve``, passed unchanged."""
    adapters: Mapping[AdapterName, str] = {}
    """LoRA adapters that are measured, released and served with the model, under names of their own. Each is a
    repository on the Hub (``org/name`` or ``org/name@revision``) or a directory. A release has its own."""
    max_queued_tokens: Positive | Literal["auto"] | None = "auto"
    """Prompt tokens that may wait at a server of production before further requests are answered 503. auto: as many as
    the release was measured to read within the workload's target for the first token, and at least its context; no
    limit if that is not known, or if ``extra_arguments`` has one. None: no limit. Evaluations have none."""
    tool_parser: Parser = "auto"
    """How vLLM finds calls of tools in answers (``--tool-call-parser``); without it ``tool_choice: auto`` is refused.
    auto: as the model's chat template has it write them, if that is known. none: they stay in the text."""
    reasoning_parser: Parser = "auto"
    """How vLLM parts thoughts from answers (``--reasoning-parser``). auto: as the model's chat template has it write
    them, if that is known. none: they stay in the text."""
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
    clients wait for the longest answer; a hung request is eventually cancelled. On a cluster: ``kserve.timeout_s``."""
    text_only: bool = False
    """True: serve only the language part of a model that sees or hears, without memory for the other parts
    (``--language-model-only``)."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port of the production endpoint; 0 for any free port. Evaluations always use a free port."""
    tls_certificate: AbsolutePath | None = None
    """A PEM file on this machine: the production endpoint's certificate, with its chain. Read again when it changes."""
    tls_key: AbsolutePath | None = None
    """The certificate's key, a PEM file without a password."""
    plain_http: bool = False
    """True: without a certificate, serve on an address that other machines reach all the same."""
    shared_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The port of one more address, at which all models of the store on this machine are reached: the model that a
    request names decides. It has this ``host`` and this certificate. All models of a store that set it have the same.
    None: each model only has its own address."""
    metrics_address: HostPort | None = None
    """An address, such as 127.0.0.1:9400, at which Prometheus reads vLLM's own metrics of all servers of the store on
    this machine, without a key and without TLS. All models of a store that set it have the same. None: nowhere."""
    signing: Literal["off", "warn", "require"] = "off"
    """Whether releases must be signed. They are verified each time before a server loads one, which reads all of it
    once more. require: one that is not signed with the key is not served. warn: it is, with a line in the log."""
    verification_key: AbsolutePath | None = None
    """A PEM file on this machine, outside of the store: the public key of those who may sign releases, or the root
    certificates of their authorities. On a cluster ``slipway install`` reads it, and makes a ConfigMap of it."""

    @model_validator(mode="after")
    def _keys_where_needed(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together")
        if self.signing != "off" and self.verification_key is None:
            raise ValueError(f"signing: {self.signing} needs a verification_key")
        return self

    def candidates_of(self, variants: Iterable[str]) -> list[str]:
        """List the candidates of these variants: each as it is, and with the recipes that are tried with it."""
        names = []
        for variant in variants:
            tried = (name for name, each in self.recipes.items() if each.variants is None or variant in each.variants)
            names += [variant, *(f"{variant}{WITH_RECIPE}{name}" for name in tried)]
        return names

    def pinned(self, **figures: int | str | None) -> Serving:
        """Put these figures, or else the defaults of ``Serving``, in the place of every *auto*."""
        settings = self.model_dump()
        fixed = {name: value for name, value in settings.items() if name not in PINNED or value != "auto"}
        return Serving(**({name: value for name, value in figures.items() if name not in fixed} | fixed))


class Serving(AskedServing):
    """How vLLM serves, with nothing left open."""

    max_model_len: Positive | None = None
    tensor_parallel_size: Positive = 1
    startup_timeout_s: Positive = 900
    max_queued_tokens: Positive | None = None
    engine_version: EngineVersion | Literal[""] = Field(default="", exclude_if=lambda value: not value)
    """On one machine, the version of vLLM that serves; empty: the one that is installed."""
    reference: ReferenceServing | None = Field(default=None, exclude_if=lambda value: value is None)
    """None if the reference is served as the variants are."""
    production: ProductionServing | None = Field(default=None, exclude_if=lambda value: value is None)
    """None if nothing is in production that can be measured beside the variants."""

    def recipe_of(self, candidate: str) -> Recipe | None:
        """Return the recipe by which a candidate is served, if it has one."""
        if candidate == PRODUCTION:
            return self.production.recipe if self.production else None
        return self.recipes.get(recipe_of(candidate))

    def of_candidate(self, candidate: str) -> Serving:
        """Return how a candidate is served."""
        return self.with_recipe(self.recipe_of(candidate))

    def with_recipe(self, recipe: Recipe | None) -> Serving:
        return self.model_copy(update={"recipes": {}} | (recipe.changes if recipe else {}))

    def of_reference(self) -> Serving:
        """Return how the reference is served that does not fit as the variants do."""
        if self.reference is None:
            return self
        arguments = self.extra_arguments
        if offloaded := self.reference.cpu_offload_gib:
            arguments = (*arguments, "--cpu-offload-gb", str(offloaded))
        changed = {"tensor_parallel_size": self.reference.tensor_parallel_size, "extra_arguments": arguments}
        return self.model_copy(update=changed | {"reference": None})
