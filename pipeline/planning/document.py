"""What a model needs on each type of GPU, as a document for programs.

``python -m pipeline.planning.document`` prints its JSON Schema, which is committed as ``docs/plan.schema.json``.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pydantic import ConfigDict

from pipeline.planning.refusal import place_of, requirements
from pipeline.settings.config import RunConfig
from scoring.capacity.accelerator import Accelerator
from scoring.capacity.architecture import NotSizeable
from scoring.capacity.assumptions import ASSUMED, Assumption
from scoring.capacity.families import read_architecture
from scoring.capacity.memory import Demand, contradictions
from scoring.capacity.plan import Option, PlannedRecipe, PlanRequest, Targets, options
from scoring.capacity.speed import Requests
from scoring.capacity.weights import Parameters, count_parameters, stored_bytes, with_stored
from scoring.closed import PlanRecord
from scoring.names import recipe_of, variant_of
from stages.parts.base.errors import ConfigError, UnusableModel, check_known
from stages.parts.base.store import ModelStore
from stages.parts.model.description import Description
from stages.parts.records.evaluation import ColdStart, cold_starts
from stages.parts.vllm.automatic import Place, Requirements, decide
from stages.parts.vllm.prediction import calibrations
from stages.parts.vllm.sizing import kv_value_bytes, memory_settings

SLO: Final = re.compile(r"(ttft|tpot)=(\d+(?:\.\d+)?)(ms|s)")


class Calibrated(PlanRecord):
    """Measured divided by predicted times of the evaluations in the store on the same type of GPU."""

    accelerator: str
    ttft: float
    tpot: float
    evaluations: int


class Automatic(PlanRecord):
    """What a run on this type of GPU, or on this machine without any, takes for the serving settings: a number in place
    of every *auto*."""

    accelerator: str
    tensor_parallel_size: int | None = None
    """None if a run is refused."""
    max_model_len: int | None = None
    candidates: tuple[str, ...] = ()
    """What it measures: variants, and variants with recipes."""
    untried: dict[str, str]
    """Why *auto* in ``optimize.variants`` does not try a variant on this hardware."""
    left_out: dict[str, str]
    """Why one of them can't be served with these settings."""
    notes: tuple[str, ...]
    """What else is to be known, or the contradictions for which a run is refused."""

    @property
    def refused(self) -> bool:
        return self.tensor_parallel_size is None


class PlanDocument(PlanRecord):
    """What a model needs on each type of GPU, before anything is downloaded."""

    model_config = ConfigDict(title="Plan")

    model: str
    commit: str | None
    """None for a local directory."""
    model_type: str
    parameters: Parameters
    kv_bytes_per_token: int
    """In 16 bits, while no sliding window is full; over all layers and GPUs."""
    state_bytes_per_sequence: int
    """State of state-space and linear-attention layers; 0 without such."""
    stored_bytes: dict[str, int]
    """Bytes of each variant's weights in the store."""
    context: int
    """Tokens of prompt and answer that a server must have room for (max_model_len)."""
    workload: str
    prompt_tokens: int
    """Mean length."""
    output_tokens: int
    peak: int
    """Requests in flight at the peak."""
    targets: Targets
    currency: str
    options: tuple[Option, ...]
    """Every candidate on every number of GPUs of one node: the cheapest that meets the targets first; without prices,
    that on the GPUs with the least memory in total. Those that do not fit, or that no run would come to, are last."""
    automatic: tuple[Automatic, ...]
    calibrations: tuple[Calibrated, ...]
    starts: dict[str, ColdStart]
    """How long the server of a candidate took to start when it was measured, where the store has that."""
    assumptions: tuple[Assumption, ...]


def make_plan(
    described: Description,
    config: RunConfig,
    accelerators: Mapping[str, Accelerator],
    *,
    context: int | None = None,
    peak: int | None = None,
    targets: Targets | None = None,
    store: ModelStore | None = None,
) -> PlanDocument:
    """Plan a model and its candidates. The run's configuration says what is not passed. The *store* may have answers of
    its reference, and evaluations by which the predicted times are corrected.

    Raises:
        UnusableModel: the model can't be sized; the message names what can't.
        ConfigError: the workload has no lengths, or does not fit into the context.
    """
    workload, slo, length = config.workload, config.workload.slo, config.serving.max_model_len
    if not (workload.prompt_tokens and workload.output_tokens):
        raise ConfigError(
            f"workload {workload.name} has a trace, whose lengths are known only with the model's tokenizer",
            hint="name a workload with prompt_tokens and output_tokens, for example --workload chat",
        )
    try:
        model = read_architecture(described.config)
        context = context or (length if isinstance(length, int) else model.longest_context)
        longest_request = sum(workload.longest())
        for why in contradictions(model, Demand(context=context, longest_request=longest_request)):
            span = f"from {longest_request} to {model.longest_context}"
            raise ConfigError(why, hint=f"set a --context {span}, or name another --workload")
        runs = automatic(described, config, accelerators, store)
        untried = {run.accelerator: run.untried.keys() for run in runs if run.accelerator in accelerators}
        nowhere = set.intersection(*map(set, untried.values()))
        required = Requirements(config.serving, config.workload, config.optimize).of(described)
        model = replace(model, kv_value_bytes=kv_value_bytes(config.serving.kv_cache_dtype))
        variants = [name for name in required.optimize.variants if name not in nowhere]
        request = PlanRequest(
            model=with_stored(model, described.parameters),
            recipes={
                name: PlannedRecipe(kv_value_bytes(recipe.kv_cache_dtype), recipe.tensor_parallel_size)
                for name in config.serving.candidates_of(variants)
                if (recipe := config.serving.recipes.get(recipe_of(name)))
            },
            formats={name: required.storage_of(name) for name in variants},
            accelerators=accelerators,
            settings=memory_settings(config.serving, context),
            requests=Requests(workload.prompt_tokens, workload.output_tokens),
            longest_request=longest_request,
            peak=peak or workload.concurrency,
            targets=targets or (Targets(ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms) if slo else Targets()),
            calibrations=calibrations(store.root, accelerators) if store else {},
            untried=untried,
        )
        layouts = options(request)
    except NotSizeable as error:
        hint = "a run measures it nevertheless: slipway run"
        raise UnusableModel(f"{described.model} can't be planned: {error}", hint=hint) from error
    return _document(described, config, request, layouts, runs).model_copy(update={"starts": cold_starts(store)})


def parse_targets(text: str) -> Targets:
    """Read targets such as ``ttft=1s,tpot=50ms``. Raises: ConfigError: *text* is not of that form."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = SLO.fullmatch(part.strip())
        if not match or match[1] in limits or not float(match[2]):
            hint = "for example --slo ttft=1s,tpot=50ms"
            raise ConfigError(f"--slo {text}: {part.strip()!r} is not a target", hint=hint)
        limits[match[1]] = float(match[2]) * (1000 if match[3] == "s" else 1)
    return Targets(ttft_ms=limits.get("ttft"), tpot_ms=limits.get("tpot"))


def choose_accelerators(catalogue: Mapping[str, Accelerator], names: str | None) -> dict[str, Accelerator]:
    """Pick the accelerators that *names* lists, separated by commas, or all. Raises: UnknownName."""
    listed = [name.strip() for name in names.split(",")] if names else list(catalogue)
    for name in listed:
        check_known("accelerator", name, catalogue)
    return {name: catalogue[name] for name in listed}


def automatic(
    described: Description, config: RunConfig, accelerators: Mapping[str, Accelerator], store: ModelStore | None = None
) -> tuple[Automatic, ...]:
    """Decide the serving settings that a run would take on each type of GPU. The *store* may have answers of the
    reference."""
    required = requirements(config, store, described)
    places = [Place(name, accelerator, accelerator.gpus_per_node) for name, accelerator in accelerators.items()]
    with contextlib.suppress(ConfigError):  # vLLM need not be installed where a plan is made
        if (own := place_of(config)) and own.accelerator is None:
            places.append(own)
    return tuple(_automatic(described, required, place) for place in places)


def _automatic(described: Description, required: Requirements, place: Place) -> Automatic:
    untried = required.untried(described, place)
    try:
        decided = decide(described, required, place)
    except (ConfigError, UnusableModel) as error:
        first, *lines = str(error).splitlines()
        mistakes = tuple(map(str.strip, lines)) or (first,)
        return Automatic(accelerator=place.name, untried=untried, left_out={}, notes=mistakes)
    left_out = {**decided.left_out, **decided.recipes_left_out}
    candidates = decided.serving.candidates_of(decided.variants)
    return Automatic(
        accelerator=place.name,
        tensor_parallel_size=decided.serving.tensor_parallel_size,
        max_model_len=decided.serving.max_model_len,
        candidates=tuple(name for name in candidates if name not in left_out),
        untried=untried,
        left_out={name: why for name, why in left_out.items() if name not in untried},
        notes=decided.notes,
    )


def _offered(layouts: Sequence[Option], runs: Sequence[Automatic]) -> tuple[Option, ...]:
    """List the layouts, those that no run would come to last, as if they did not fit."""
    refused = {run.accelerator for run in runs if run.refused}
    left_out = {(run.accelerator, variant): why for run in runs for variant, why in run.left_out.items()}
    offered = []
    for layout in layouts:
        names = variant_of(layout.variant), layout.variant
        why = next((why for name in names if (why := left_out.get((layout.accelerator, name)))), None)
        if layout.accelerator in refused:
            why = f"a run on {layout.accelerator} is refused"
        if layout.fits and why:
            nothing = dict.fromkeys(("predicted", "replicas", "cost_per_hour", "cost_per_million_tokens"))
            nothing |= {"fits": False, "reasons": (why,), "meets_targets": False}
            layout = layout.model_copy(update=nothing)
        offered.append(layout)
    return tuple(sorted(offered, key=lambda option: not option.fits))


def with_prices(
    accelerators: Mapping[str, Accelerator], prices: Iterable[str], config: RunConfig, described: Description
) -> dict[str, Accelerator]:
    """Give the accelerators their prices per hour: from ``NAME=PRICE``, or, if there is only one, the platform's, which
    is that of a replica with as many GPUs as a run takes. Raises: ConfigError."""
    per_hour = {}
    if len(accelerators) == 1 and config.platform.price_per_hour:
        run, *_ = automatic(described, config, accelerators)
        per_hour[run.accelerator] = config.platform.price_per_hour / (run.tensor_parallel_size or 1)
    for assignment in prices:
        name, _, text = assignment.partition("=")
        if not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text):
            raise ConfigError(f"--price {assignment}: not of the form GPU=PRICE", hint="for example --price h100=2.50")
        check_known("accelerator", name, accelerators)
        per_hour[name] = float(text)
    priced = {name: accelerators[name].model_copy(update={"price_per_hour": price}) for name, price in per_hour.items()}
    return {**accelerators, **priced}


def _document(
    described: Description,
    config: RunConfig,
    request: PlanRequest,
    layouts: Sequence[Option],
    runs: tuple[Automatic, ...],
) -> PlanDocument:
    model = request.model
    calibrated = sorted(request.accelerators.keys() & request.calibrations.keys())
    return PlanDocument(
        model=described.model,
        commit=described.commit,
        model_type=model.model_type,
        parameters=count_parameters(model),
        kv_bytes_per_token=model.kv_bytes(1),
        state_bytes_per_sequence=model.state_bytes(),
        stored_bytes={name: stored_bytes(model, storage) for name, storage in request.formats.items()},
        context=request.settings.context,
        workload=config.workload.name,
        prompt_tokens=request.requests.prompt_tokens,
        output_tokens=request.requests.output_tokens,
        peak=request.peak,
        targets=request.targets,
        currency=config.platform.currency,
        options=_offered(layouts, runs),
        automatic=runs,
        starts={},
        calibrations=tuple(Calibrated(accelerator=name, **vars(request.calibrations[name])) for name in calibrated),
        assumptions=tuple(vars(ASSUMED).values()),
    )


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the document, draft 2020-12."""
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return draft | PlanDocument.model_json_schema(mode="serialization")


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2, ensure_ascii=False))
