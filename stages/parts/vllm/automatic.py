"""What ``auto`` means in the serving settings, for one model on one kind of hardware, and what contradicts it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from scoring.capacity.accelerator import Accelerator, Tflops
from scoring.capacity.architecture import Architecture, NotSizeable
from scoring.capacity.families import read_architecture
from scoring.capacity.kv_cache import cache_layout
from scoring.capacity.layout import Wish, choose_layout, contradictions, left_out, rounded_context
from scoring.capacity.memory import Serving as Memory
from scoring.capacity.weights import HALF, Parameters, count_parameters, stored_bytes
from scoring.names import REFERENCE
from scoring.units import GIB, MIB
from stages.parts.base.errors import ConfigError
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import AskedServing, Serving
from stages.parts.base.workload import Workload
from stages.parts.machine.accelerators import accelerator_of
from stages.parts.machine.hardware import gpus, hardware, query_gpus
from stages.parts.machine.processor import cpu_dtype, processor
from stages.parts.model.description import Description
from stages.parts.vllm.arguments import CPU_KV_CACHE_MIB, serves_on_gpu
from stages.parts.vllm.host import CLIENT_BYTES, SERVER_BYTES, gpu_memory_bytes, shared_bytes, startup_s
from stages.parts.vllm.kv_cache_rules import cpu_cache_rules

OTHERWISE: Final = re.compile(
    r"--(cpu-offload|(pipeline|tensor|data)-parallel|quantization|load-format|max-model-len|hf-overrides|kv-cache"
    r"|block-size|speculative)[\w-]*|-[tpd]p\b|-q\b"
)
"""Extra arguments with which memory is used in another way than is calculated."""
FLOAT32_BYTES: Final = 4
WEIGHTS_SHARE: Final = 0.85
"""The most of the memory that weights should take where nothing else can be calculated."""


@dataclass(frozen=True)
class Place:
    """The hardware that one server may use."""

    name: str
    accelerator: Accelerator | None
    """None: there is no GPU."""
    gpus: int = 0
    memory_bytes: int | None = None
    """The machine's memory; None if it is not known."""
    dtype: str = "bfloat16"
    """Without a GPU, what vLLM computes in there."""

    @property
    def said(self) -> str:
        return f"{self.gpus} × {self.name}" if self.accelerator else self.name


@dataclass(frozen=True)
class Decided:
    """Literal settings, and what follows from them."""

    serving: Serving
    gpus: int
    memory_bytes: int
    """For the pod that measures, ``/dev/shm`` included."""
    shared_bytes: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why a variant can't be served with these settings."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """The parts of a run's settings that servers depend on."""

    serving: AskedServing
    workload: Workload | None
    """None: its lengths do not matter."""
    optimize: Optimize

    def wish(self, model: Architecture) -> Wish:
        size, context = self.serving.tensor_parallel_size, self.serving.max_model_len
        return Wish(
            tensor_parallel_size=None if size == "auto" else size,
            context=None if context == "auto" else context or model.longest_context,
            longest_request=sum(self.workload.longest()) if self.workload else 0,
            concurrency=self.workload.concurrency if self.workload else 1,
        )

    def unplanned(self, place: Place) -> str:
        """Why nothing is calculated with these settings; empty if it is."""
        arguments = " ".join(self.serving.extra_arguments).replace("_", "-")
        if found := OTHERWISE.search(arguments):
            return f"serving.extra_arguments has {found[0]}"
        return "serving.dtype is float32" if place.accelerator and self.serving.dtype == "float32" else ""


@dataclass(frozen=True)
class _Sized:
    model: Architecture
    parameters: Parameters
    optimize: Optimize

    def bytes_of_all(self) -> int:
        return sum(self.bytes_of(name) for name in self.optimize.variants)

    def bytes_of(self, variant: str) -> int:
        named = next(name for name in self.optimize.variants if name == variant)
        return stored_bytes(self.model, self.parameters, named, self.optimize.group_size)


def place_here(known: Mapping[str, Accelerator], most_gpus: int | None = None) -> Place:
    """This machine. *most_gpus* may serve one replica; None: all that are here."""
    if most_gpus == 0 or not serves_on_gpu():
        return Place("this machine", None, 0, hardware().memory_bytes, cpu_dtype(processor()))
    found = gpus()
    name = accelerator_of(found[0], known)
    each = known[name] if name else _unlisted(found[0].partition(",")[0])
    return Place(name or each.device, each, len(found) if most_gpus is None else most_gpus)


def decide(described: Description, asked: Asked, place: Place) -> Decided:
    """The settings with a number in place of every ``auto``.

    A model that can't be sized gets as many GPUs as its weights need, and its own longest context.

    Raises:
        ConfigError: settings contradict each other, the model or the hardware; every contradiction is named.
    """
    if why := asked.unplanned(place):
        return _literal(asked.serving, place, 0, note=f"nothing is planned: {why}")
    try:
        model = read_architecture(described.config)
        sized = _Sized(model, count_parameters(model, described.parameters), asked.optimize)
        if place.accelerator:
            return _on_gpus(sized, asked, place, place.accelerator, described.model)
        return _on_cpu(sized, asked, place, described.model)
    except NotSizeable as error:
        weights = HALF * (described.parameters or 0)
        return _literal(asked.serving, place, weights, note=f"{described.model} can't be sized: {error}")


def memory_of(serving: AskedServing, group_size: int, context: int = 0) -> Memory:
    """The settings that a server's memory on GPUs depends on."""
    return Memory(
        context=context,
        utilization=serving.gpu_memory_utilization,
        enforce_eager=serving.enforce_eager,
        kv_cache_bytes=serving.kv_cache_mib * MIB if serving.kv_cache_mib else None,
        group_size=group_size,
    )


def refuse_contradictions(described: Description, asked: Asked) -> None:
    """Refuse what no hardware could serve.

    Raises:
        ConfigError: settings contradict each other or the model; every contradiction is named.
    """
    try:
        model = read_architecture(described.config)
    except NotSizeable:
        return
    if wrong := list(contradictions(model, asked.wish(model))):
        raise _refused(wrong, described.model)


def _on_gpus(sized: _Sized, asked: Asked, place: Place, accelerator: Accelerator, source: str) -> Decided:
    model, wish, serving = sized.model, asked.wish(sized.model), asked.serving
    memory = memory_of(serving, asked.optimize.group_size)
    found = choose_layout(model, sized.parameters, accelerator, place.gpus, memory, wish)
    size, wrong = found.tensor_parallel_size, list(contradictions(model, wish))
    if size > place.gpus:
        wrong.append(f"tensor_parallel_size {size}: one server may have {place.gpus} GPUs")
    named = " ".join(wrong)
    wrong += [f"fp16 on {size} × {place.name}: {why}" for why in found.reasons if why not in named]
    waiting = _waiting(found.requests, wish, serving)
    wrong += waiting if serving.kv_cache_mib else []
    if wrong:
        raise _refused(wrong, f"{source} on {place.said}")
    left: dict[str, str] = {
        name: "; ".join(why)
        for name in asked.optimize.variants
        if name != REFERENCE and (why := left_out(model, name, size, asked.optimize.group_size))
    }
    return Decided(
        serving=_pinned(serving, size, found.context, sized.bytes_of_all()),
        gpus=size,
        memory_bytes=gpu_memory_bytes(sized.bytes_of(REFERENCE), size) + CLIENT_BYTES,
        shared_bytes=shared_bytes(size),
        left_out=left,
        notes=tuple(waiting),
    )


def _on_cpu(sized: _Sized, asked: Asked, place: Place, source: str) -> Decided:
    model, wish, serving = sized.model, asked.wish(sized.model), asked.serving
    size = wish.tensor_parallel_size or 1
    wide = (place.dtype if serving.dtype == "auto" else serving.dtype) == "float32"
    available = (serving.kv_cache_mib or CPU_KV_CACHE_MIB) * MIB
    rules = replace(cpu_cache_rules(model), tensor_parallel_size=size, value_bytes=FLOAT32_BYTES if wide else HALF)
    cache = cache_layout(model, rules)
    wrong = list(contradictions(model, wish))
    longest, least = cache.longest(available), min(wish.context or max(wish.longest_request, 1), model.longest_context)
    if longest < least:
        wrong.append(
            f"a KV cache of {available // MIB:,} MiB has room for {longest:,} of {least:,} tokens of context: "
            "raise serving.kv_cache_mib"
        )
    weights = sized.bytes_of(REFERENCE) * (2 if wide else 1)
    if place.memory_bytes and weights + available > place.memory_bytes:
        wrong.append(
            f"fp16 needs {(weights + available) / GIB:.1f} GiB for weights and KV cache, and {place.name} has "
            f"{place.memory_bytes / GIB:.1f}"
        )
    requests = cache.sequences(available, wish.longest_request or least)
    waiting = _waiting(requests, wish, serving) if longest >= least else []
    wrong += waiting if serving.kv_cache_mib else []
    if wrong:
        raise _refused(wrong, f"{source} on {place.said}")
    beside = len(asked.optimize.variants)
    return Decided(
        serving=_pinned(serving, size, wish.context or rounded_context(longest, model), sized.bytes_of_all()),
        gpus=0,
        memory_bytes=CLIENT_BYTES
        + beside * (SERVER_BYTES + available)
        + sized.bytes_of_all()
        + (weights - sized.bytes_of(REFERENCE)),
        shared_bytes=shared_bytes(0),
        notes=tuple(waiting),
    )


def _waiting(requests: int, wish: Wish, serving: AskedServing) -> list[str]:
    """What is to be said if not all requests in flight are in the KV cache of fp16 at once."""
    if not wish.longest_request or requests >= wish.concurrency:
        return []
    cache = f"a KV cache of {serving.kv_cache_mib:,} MiB" if serving.kv_cache_mib else "the KV cache of fp16"
    return [
        f"{cache} holds {requests} of the workload's {wish.concurrency} requests in flight ({wish.longest_request:,} "
        "tokens each); the others wait"
    ]


def _literal(serving: AskedServing, place: Place, weights_bytes: int, *, note: str) -> Decided:
    """Without a plan: as many GPUs as hold the weights, and the model's own context."""
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
        shared_bytes=shared_bytes(on_gpus),
        notes=(note,),
    )


def _pinned(serving: AskedServing, size: int, context: int | None, bytes_to_read: int) -> Serving:
    return serving.pinned(tensor_parallel_size=size, max_model_len=context, startup_timeout_s=startup_s(bytes_to_read))


def _refused(wrong: Sequence[str], what: str) -> ConfigError:
    error = ConfigError.of_many(wrong, f"the settings for {what}")
    error.hint = "slipway plan MODEL shows what fits; serving.tensor_parallel_size and max_model_len can be auto"
    return error


def _unlisted(device: str) -> Accelerator:
    """A GPU that the catalogue lacks. Only its memory and its kernels matter here, so the other figures are empty."""
    memory, capability = (query_gpus(each)[0] for each in ("memory.total", "compute_cap"))
    shared = hardware().memory_bytes  # a GPU that names no memory of its own uses the machine's
    return Accelerator(
        device=device,
        memory_gib=(int(memory) * MIB if memory.isdigit() else shared) / GIB,
        bandwidth_gb_per_s=1,
        tflops=Tflops(bf16=1),
        link="pcie",
        link_gb_per_s=1,
        compute_capability=float(capability),
        source="nvidia-smi",
    )
