"""What ``auto`` means in the serving settings, for one model on one kind of hardware, and what contradicts it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from scoring.capacity.accelerator import Accelerator
from scoring.capacity.architecture import Architecture, NotSizeable
from scoring.capacity.families import BYTES, read_architecture
from scoring.capacity.kv_cache import cache_layout
from scoring.capacity.memory import Demand, Layout, choose_layout, contradictions, left_out, rounded_context
from scoring.capacity.storage import HALF, SIXTEEN_BIT, Storage
from scoring.capacity.weights import explained, stored_bytes, with_stored
from scoring.names import REFERENCE, variant_of
from scoring.units import GIB, MIB
from stages.parts.base.errors import ConfigError, UnusableModel
from stages.parts.base.formats import quantized_formats, storage_of, why_not_made
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import AskedServing, Recipe, ReferenceServing, Serving
from stages.parts.base.workload import Workload
from stages.parts.machine.accelerators import accelerator_here
from stages.parts.machine.hardware import Processor, cpu_dtype, gpus, hardware, processor
from stages.parts.machine.hardware_table import kind_of
from stages.parts.model.checkpoint import why_not_quantized
from stages.parts.model.description import Description
from stages.parts.records.evaluation import grouped
from stages.parts.vllm.arguments import CPU_KV_CACHE_MIB, serves_on_gpu
from stages.parts.vllm.sizing import (
    CLIENT_BYTES,
    SERVER_BYTES,
    cpu_cache_rules,
    gpu_memory_bytes,
    kv_value_bytes,
    memory_settings,
    startup_s,
    why_not_planned,
)

NO_KERNEL: Final = "run where vLLM has one, such as on a GPU, or name another model"
WEIGHTS_SHARE: Final = 0.85
"""The most of the memory that weights should take where nothing else can be calculated."""


@dataclass(frozen=True)
class Place:
    """The hardware that one server may use."""

    name: str
    accelerator: Accelerator | None
    """None without a GPU."""
    gpus: int = 0
    memory_bytes: int | None = None
    """The machine's memory; None if it is not known."""
    processor: Processor | None = None
    """None if it is not known."""

    def __str__(self) -> str:
        return f"{self.gpus} × {self.name}" if self.accelerator else self.name


@dataclass(frozen=True)
class Decided:
    """Literal settings, and what follows from them."""

    serving: Serving
    gpus: int
    memory_bytes: int
    """For the pod that measures, ``/dev/shm`` included."""
    variants: tuple[str, ...] = ()
    """Those that can be made from the model, and the candidates."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why a variant can't be made from the model, or served with these settings."""
    recipes_left_out: Mapping[str, str] = field(default_factory=dict)
    """Why a candidate can't be served on the GPUs of its recipe."""
    notes: tuple[str, ...] = ()
    weights_bytes: int = 0
    """Of the model in 16 bit; 0 if that is not known."""


@dataclass(frozen=True)
class Requirements:
    """The parts of a run's settings that its servers depend on."""

    serving: AskedServing
    workload: Workload | None
    """The requests; None if their lengths do not matter."""
    optimize: Optimize
    reference: str = REFERENCE
    """The variant that the others are compared with; empty if fixed values are in its place. fp16 stands for the format
    in which the model was published."""
    answers_kept: bool = False
    """Whether the reference's answers to the workload's questions were kept before."""
    published: Mapping[str, Storage] = field(default_factory=dict)
    """How the variants are stored that are taken as they were published, but for a reference in 16 or 32 bit."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why variants can't be made from the model."""

    def untried(self, described: Description, place: Place) -> dict[str, str]:
        """Say of the variants that *auto* does not try why. On hardware that the table lacks, it tries all it can."""
        form, kind = described.form.name, kind_of(place.accelerator, place.processor)
        names = [name for name in self.optimize.names if self.optimize.is_automatic(name)]
        reasons = kind.untried(names) if kind else {}
        reasons |= {name: why for name in names if (why := why_not_made(name, form, described.config))}
        return {name: why for name, why in reasons.items() if name not in (form, self.reference)}

    def of(self, described: Description, place: Place | None = None) -> Requirements:
        """Adapt them to a model, its candidates and, if it is known, the hardware."""
        form, published = described.form.name, {}
        with contextlib.suppress(NotSizeable):
            model = with_stored(read_architecture(described.config), described.parameters)
            for name, one in described.all.items():
                if one.form.method or name in described.candidates:
                    published[name] = explained(model, one.form.storage, one.weights_bytes)
        names = self.optimize.variants_of(form)
        left_out = {name: why for name in names if (why := why_not_made(name, form, described.config))}
        left_out |= self.untried(described, place) if place else {}
        kept = (*(name for name in names if name not in left_out), *described.candidates)
        optimize = self.optimize.model_copy(update={"variants": kept})
        reference = form if self.reference == REFERENCE else self.reference
        return replace(self, optimize=optimize, reference=reference, published=published, left_out=left_out)

    def storage_of(self, variant: str) -> Storage:
        return self.published.get(variant) or storage_of(variant, self.optimize.group_size)

    def demand(self, model: Architecture) -> Demand:
        size, context = self.serving.tensor_parallel_size, self.serving.max_model_len
        return Demand(
            tensor_parallel_size=None if size == "auto" else size,
            context=None if context == "auto" else context or model.longest_context,
            longest_request=sum(self.workload.longest()) if self.workload else 0,
            concurrency=self.workload.concurrency if self.workload else 1,
        )

    def weights_bytes(self, model: Architecture) -> dict[str, int]:
        """Compute the sizes of the variants' weights, the largest first."""
        sizes = {variant: stored_bytes(model, self.storage_of(variant)) for variant in self.optimize.variants}
        return dict(sorted(sizes.items(), key=lambda each: each[1], reverse=True))


def place_here(most_gpus: int | None = None, memory_bytes: int | None = None) -> Place:
    """Describe this machine. *most_gpus* and *memory_bytes* may serve one replica; None: all that it has."""
    memory_bytes = memory_bytes or hardware().memory_bytes
    if most_gpus == 0 or not serves_on_gpu():
        return Place("this machine", None, 0, memory_bytes, processor())
    name, accelerator = accelerator_here()
    return Place(name, accelerator, len(gpus()) if most_gpus is None else most_gpus, memory_bytes)


def decide(described: Description, required: Requirements, place: Place) -> Decided:
    """Choose a number for every ``auto`` in the serving settings.

    A model that can't be sized gets as many GPUs as its weights need, and its own longest context. Raise ConfigError if
    settings contradict each other, the model or the hardware; every contradiction is named. Raise UnusableModel if vLLM
    surely has no kernel for the format in which the model was published."""
    required = required.of(described, place)
    on_cpu = {
        name: why
        for name, model in described.all.items()
        if not place.accelerator and (why := model.form.missing_on_cpu(model.config, place.processor))
    }
    if required.reference in on_cpu:
        raise UnusableModel(on_cpu[required.reference], hint=NO_KERNEL)
    decided = _decide(described, required, place)
    left_out = {**required.left_out, **on_cpu, **decided.left_out}
    if why := why_not_quantized(described.tensors):
        left_out |= dict.fromkeys((name for name in required.optimize.variants if name in quantized_formats()), why)
    variants = tuple(name for name in required.optimize.variants if name not in left_out)
    notes = (f"candidate {model.model}: {model.note}" for model in described.candidates.values() if model.note)
    return replace(decided, variants=variants, left_out=left_out, notes=(*decided.notes, *notes))


def _decide(described: Description, required: Requirements, place: Place) -> Decided:
    if why := why_not_planned(required.serving, on_gpu=place.accelerator is not None):
        return _unplanned(required.serving, place, 0, note=f"nothing is planned: {why}")
    try:
        model = with_stored(read_architecture(described.config), described.parameters)
        model = replace(model, kv_value_bytes=kv_value_bytes(required.serving.kv_cache_dtype))
        if place.accelerator:
            decided = _on_gpus(model, required, place, place.accelerator, described.model)
        else:
            decided = _on_cpu(model, required, place, described.model)
        return replace(decided, weights_bytes=stored_bytes(model, SIXTEEN_BIT))
    except NotSizeable as error:
        weights = described.weights_bytes if described.form.method else HALF * (described.parameters or 0)
        return _unplanned(required.serving, place, weights, note=f"{described.model} can't be sized: {error}")


def refuse_contradictions(described: Description, required: Requirements) -> None:
    """Refuse, with a ConfigError that names all of them, settings that contradict each other or the model."""
    try:
        model = read_architecture(described.config)
    except NotSizeable:
        return
    _refuse(list(contradictions(model, required.demand(model))), described.model)


def _on_gpus(
    model: Architecture, required: Requirements, place: Place, accelerator: Accelerator, source: str
) -> Decided:
    serving, demand, weights_bytes = required.serving, required.demand(model), required.weights_bytes(model)

    def layout_of(variant: str, demand: Demand, gpus: int = place.gpus) -> Layout:
        storage = required.storage_of(variant)
        return choose_layout(model, storage, accelerator, gpus, memory_settings(serving), demand)

    def without_room(candidate: str, gpus: int) -> str:
        given = replace(demand, context=layout.context, tensor_parallel_size=gpus)
        too_many = f"it takes {gpus} GPUs, and one server may have {place.gpus}" if gpus > place.gpus else ""
        return too_many or "; ".join(layout_of(variant_of(candidate), given).reasons)

    reference = required.reference
    compared = required.storage_of(reference) if reference in weights_bytes else SIXTEEN_BIT
    mistakes = list(contradictions(model, demand, compared))
    if demand.tensor_parallel_size and demand.tensor_parallel_size > place.gpus:
        mistakes.append(f"tensor_parallel_size {demand.tensor_parallel_size}: one server may have {place.gpus} GPUs")
    layouts = {variant: layout_of(variant, demand) for variant in weights_bytes}
    fitting = [variant for variant, layout in layouts.items() if not layout.reasons]
    largest = next(iter(fitting or layouts))
    layout = layouts[largest]
    size = layout.tensor_parallel_size
    # The quantizer and vLLM themselves say what one GPU can't compute.
    reasons = {
        name: (() if each.short_bytes is None else each.reasons) or left_out(model, required.storage_of(name), size)
        for name, each in layouts.items()
    }
    asked = None
    if reference in layouts and reference not in fitting:
        more = layout_of(reference, replace(demand, tensor_parallel_size=None))
        asked = _reference_elsewhere(weights_bytes[reference], place, more, kept=required.answers_kept)
    named, refused = " ".join(mistakes), reference if reasons.get(reference) and not asked else ""
    refused = refused if fitting else largest
    new = [reason for reason in reasons.get(refused, ()) if reason not in named]
    mistakes += [f"{refused} on {layouts[refused].tensor_parallel_size} × {place.name}: {reason}" for reason in new]
    notes = _notes_on_queueing(layout.requests, demand, serving, largest)
    _refuse(mistakes + (notes if serving.kv_cache_mib else []), f"{source} on {place}")
    served = [variant for variant in required.optimize.variants if not reasons[variant]]
    if size > 1 and serving.tensor_parallel_size == "auto":
        # They are also tried on fewer. Each of two servers on half of the GPUs has half of the requests.
        half = replace(demand, context=layout.context, concurrency=math.ceil(demand.concurrency / 2))
        serving = _tried_on_fewer(serving, {variant: layout_of(variant, half, size // 2) for variant in served})
    pinned = _pinned(serving, size, layout.context, sum(map(weights_bytes.__getitem__, served)), asked)
    sizes = {name: pinned.of_candidate(name).tensor_parallel_size for name in pinned.candidates_of(served)}
    gpus = max(each for each in (size, *sizes.values()) if each <= max(size, place.gpus))
    memory_bytes = gpu_memory_bytes(weights_bytes[largest], gpus)
    if asked and not asked.kept:
        gpus = max(gpus, asked.tensor_parallel_size)
        offloaded_bytes = asked.tensor_parallel_size * asked.cpu_offload_gib * GIB
        memory_bytes = max(memory_bytes, gpu_memory_bytes(weights_bytes[reference], gpus) + offloaded_bytes)
    return Decided(
        serving=pinned,
        gpus=gpus,
        memory_bytes=memory_bytes + CLIENT_BYTES,
        left_out={variant: "; ".join(reasons[variant]) for variant in required.optimize.variants if reasons[variant]},
        recipes_left_out={name: why for name, own in sizes.items() if own != size and (why := without_room(name, own))},
        notes=(*notes, *_notes_on_reference(asked, reference, served, place)),
    )


def _tried_on_fewer(serving: AskedServing, layouts: Mapping[str, Layout]) -> AskedServing:
    """Add recipes by which variants are tried on as few GPUs as *layouts* say, where they have room there."""
    fewer = grouped({name: f"{each.tensor_parallel_size}" for name, each in layouts.items() if each.with_room})
    recipes = {
        f"tp{number}": Recipe(tensor_parallel_size=int(number), variants=tuple(names), optional=True)
        for number, names in fewer.items()
    }
    return serving.model_copy(update={"recipes": recipes | {**serving.recipes}})


def _reference_elsewhere(weights_bytes: int, place: Place, more: Layout, *, kept: bool) -> ReferenceServing | None:
    """Find how a reference can be asked the questions that does not fit where the variants are served: on *more* GPUs,
    with weights in the host's memory, or never, because its answers were *kept*. None if it can't."""
    if not more.reasons:
        return ReferenceServing(tensor_parallel_size=more.tensor_parallel_size)
    size = more.tensor_parallel_size
    # vLLM keeps whole parameters; what is short is rounded up.
    short_gib = math.ceil(more.short_bytes / GIB) + 1 if more.short_bytes else 0
    needed_bytes = gpu_memory_bytes(weights_bytes, size) + size * short_gib * GIB + CLIENT_BYTES
    if 0 < short_gib * GIB < weights_bytes / size and place.memory_bytes and needed_bytes <= place.memory_bytes:
        return ReferenceServing(tensor_parallel_size=size, cpu_offload_gib=short_gib)
    return ReferenceServing(kept=True) if kept else None


def _notes_on_reference(
    asked: ReferenceServing | None, reference: str, served: Sequence[str], place: Place
) -> list[str]:
    """Say how a reference is asked that is not served as the variants are, and what takes its place."""
    if asked is None:
        return []
    how = f"it is served on {asked.tensor_parallel_size} × {place.name} for the quality questions only"
    if asked.cpu_offload_gib:
        how += (
            f", slowly, with {asked.cpu_offload_gib} GiB of its weights for each GPU in the host's memory, and asked "
            "as many as a third of the budget allows"
        )
    if asked.kept:
        how = "its answers to the quality questions were kept before"
    return [
        f"{reference} does not fit as the variants are served; {how}. Speed, memory and cost are compared with those "
        f"of {served[0]}"
    ]


def _on_cpu(model: Architecture, required: Requirements, place: Place, source: str) -> Decided:
    serving, demand, weights_bytes = required.serving, required.demand(model), required.weights_bytes(model)
    size = demand.tensor_parallel_size or 1
    value_bytes = BYTES[cpu_dtype(place.processor) if serving.dtype == "auto" else serving.dtype]
    rules = replace(cpu_cache_rules(model), tensor_parallel_size=size, value_bytes=value_bytes)
    cache, cache_bytes = cache_layout(model, rules), (serving.kv_cache_mib or CPU_KV_CACHE_MIB) * MIB
    longest = cache.longest(cache_bytes)
    least = min(demand.context or max(demand.longest_request, 1), model.longest_context)
    mistakes = list(contradictions(model, demand))
    if longest < least:
        mistakes.append(
            f"a KV cache of {cache_bytes // MIB:,} MiB has room for {longest:,} of {least:,} tokens of context: "
            "raise serving.kv_cache_mib"
        )
    # vLLM holds 16-bit weights in the served type.
    loaded_bytes = {
        variant: stored * value_bytes // HALF
        if required.storage_of(variant).weight_bits == SIXTEEN_BIT.weight_bits
        else stored
        for variant, stored in weights_bytes.items()
    }
    besides_bytes = cache_bytes + SERVER_BYTES + CLIENT_BYTES
    reasons = {
        variant: f"{variant} needs {(loaded + besides_bytes) / GIB:.1f} GiB for weights, KV cache, vLLM itself and "
        f"what asks it, and {place.name} has {place.memory_bytes / GIB:.1f}"
        for variant, loaded in loaded_bytes.items()
        if place.memory_bytes and loaded + besides_bytes > place.memory_bytes
    }
    served = [variant for variant in required.optimize.variants if variant not in reasons]
    asked = ReferenceServing(kept=True) if required.reference in reasons and required.answers_kept else None
    if required.reference in reasons and not asked:
        mistakes.append(reasons[required.reference])
    elif not served:
        mistakes.append(reasons[min(loaded_bytes, key=loaded_bytes.__getitem__)])
    requests = cache.sequences(cache_bytes, demand.longest_request or least)
    largest = served[0] if served else REFERENCE
    notes = _notes_on_queueing(requests, demand, serving, largest) if longest >= least else []
    _refuse(mistakes + (notes if serving.kv_cache_mib else []), f"{source} on {place}")
    files_bytes = sum(map(weights_bytes.__getitem__, served))
    return Decided(
        serving=_pinned(serving, size, demand.context or rounded_context(longest, model), files_bytes, asked),
        gpus=0,
        memory_bytes=CLIENT_BYTES + sum(loaded_bytes[name] + SERVER_BYTES + cache_bytes for name in served),
        left_out=reasons,
        notes=(*notes, *_notes_on_reference(asked, required.reference, served, place)),
    )


def _notes_on_queueing(requests: int, demand: Demand, serving: AskedServing, largest: str) -> list[str]:
    """Say that not all requests in flight are in the KV cache of the largest variant at once; empty if they are."""
    if not demand.longest_request or requests >= demand.concurrency:
        return []
    cache = f"a KV cache of {serving.kv_cache_mib:,} MiB" if serving.kv_cache_mib else f"the KV cache of {largest}"
    return [
        f"{cache} holds {requests} of the workload's {demand.concurrency} requests in flight "
        f"({demand.longest_request:,} tokens each); the others wait"
    ]


def _unplanned(serving: AskedServing, place: Place, weights_bytes: int, *, note: str) -> Decided:
    """Choose as many GPUs as hold the weights, and the model's own context."""
    size = 1
    if place.accelerator:
        share = place.accelerator.usable_bytes * serving.gpu_memory_utilization * WEIGHTS_SHARE
        while weights_bytes > size * share and 2 * size <= place.gpus:
            size *= 2
    size = size if serving.tensor_parallel_size == "auto" else serving.tensor_parallel_size
    on_gpus = size if place.accelerator else 0
    return Decided(
        serving=_pinned(serving, size, None, 2 * weights_bytes),
        gpus=on_gpus,
        memory_bytes=gpu_memory_bytes(weights_bytes, on_gpus) + CLIENT_BYTES,
        notes=(note,),
        weights_bytes=weights_bytes,
    )


def _pinned(
    serving: AskedServing, size: int, context: int | None, bytes_to_read: int, asked: ReferenceServing | None = None
) -> Serving:
    sizes = {"tensor_parallel_size": size, "max_model_len": context, "startup_timeout_s": startup_s(bytes_to_read)}
    return serving.pinned(**sizes).model_copy(update={"reference": asked})


def _refuse(mistakes: Sequence[str], subject: str) -> None:
    if mistakes:
        error = ConfigError.of_many(mistakes, f"the settings for {subject}")
        error.hint = (
            "slipway plan MODEL shows what fits; serving.tensor_parallel_size and max_model_len can be auto. A "
            "reference that fits nowhere: bring its answers from a machine where it does (slipway samples export), or "
            "name another one, such as profile.reference=int8"
        )
        raise error
