"""What would have been predicted of an evaluation: to show the error, and to calibrate later plans."""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from scoring.capacity.accelerator import Accelerator
from scoring.capacity.architecture import Architecture, NotSizeable
from scoring.capacity.families import read_architecture
from scoring.capacity.kv_cache import cache_layout
from scoring.capacity.memory import MemorySettings, fit
from scoring.capacity.speed import PredictedSpeed, Requests, Roofline, SpeedCalibration
from scoring.capacity.weights import explained, stored_bytes, with_stored
from stages.parts.base.errors import SlipwayError
from stages.parts.base.store import ModelStore
from stages.parts.machine.accelerators import accelerator_of
from stages.parts.model.description import describe_directory
from stages.parts.model.published import storage_of_variant
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.vllm.arguments import GPU_ARGUMENT, value_of
from stages.parts.vllm.sizing import cpu_cache_rules, kv_value_bytes


@dataclass(frozen=True)
class Prediction:
    """What was predicted of a variant, under the conditions of its evaluation."""

    weights_bytes: int
    kv_cache_tokens: int | None
    """None if it would not have fitted."""
    speed: PredictedSpeed | None
    """None without a GPU, on one that the catalogue lacks, and with pipeline stages."""
    accelerator: str | None


def sized(store: ModelStore) -> Architecture | None:
    """Read the model in ``base/``; None if it is not there or can't be sized."""
    try:
        described = describe_directory(store.base, str(store.base))
        return with_stored(read_architecture(described.config), described.parameters)
    except (SlipwayError, NotSizeable, OSError):
        return None


def predict(
    model: Architecture,
    evaluation: Evaluation,
    variant: Variant,
    accelerators: Mapping[str, Accelerator],
    directory: Path,
) -> Prediction | None:
    """Predict an evaluation of the variant in *directory*; None for a method whose sizes are not known, NotSizeable for
    such a KV cache."""
    storage, arguments = storage_of_variant(variant, directory), evaluation.engine.arguments
    if storage is None:
        return None
    if variant.published:  # a plan knows the sizes of published files
        storage = explained(model, storage, variant.weights_bytes)
    weights = stored_bytes(model, storage)
    model = replace(model, kv_value_bytes=kv_value_bytes(value_of(arguments, "--kv-cache-dtype")))
    settings = MemorySettings(
        context=int(value_of(arguments, "--max-model-len") or model.longest_context),
        utilization=float(value_of(arguments, GPU_ARGUMENT) or MemorySettings.utilization),
        enforce_eager="--enforce-eager" in arguments,
        kv_cache_bytes=int(value_of(arguments, "--kv-cache-memory-bytes") or 0) or None,
    )
    if not evaluation.hardware.gpus:
        layout = cache_layout(model, cpu_cache_rules(model))
        tokens = layout.tokens(settings.kv_cache_bytes, settings.context) if settings.kv_cache_bytes else None
        return Prediction(weights, tokens, None, None)
    accelerator = accelerator_of(evaluation.hardware.gpus[0], accelerators)
    if accelerator is None or value_of(arguments, "--pipeline-parallel-size"):
        return Prediction(weights, None, None, None)
    gpus = int(value_of(arguments, "--tensor-parallel-size") or 1)
    fitted = fit(model, storage, accelerators[accelerator], gpus, settings)
    roofline = Roofline(model, storage, accelerators[accelerator], gpus)
    load = evaluation.load
    requests = Requests(max(1, load.prompt_tokens // load.requests), max(1, load.output_tokens // load.requests))
    return Prediction(
        weights_bytes=weights,
        kv_cache_tokens=fitted.cache.tokens(fitted.cache_bytes, settings.context) if fitted.cache else None,
        speed=roofline.speed(load.concurrency, requests),
        accelerator=accelerator,
    )


def calibrations(root: Path, accelerators: Mapping[str, Accelerator]) -> dict[str, SpeedCalibration]:
    """Compare measured times with predicted ones, by type of GPU: the geometric means over a store's evaluations.

    Models that can't be sized, what speculation speeds up, and damaged documents are left out.
    """
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for evaluation, prediction in _predicted(root, accelerators):
        if prediction.accelerator and prediction.speed and evaluation.load.tpot_ms.mean > 0:
            ttft = evaluation.load.ttft_ms.mean / prediction.speed.ttft_ms
            tpot = evaluation.load.tpot_ms.mean / prediction.speed.tpot_ms
            ratios[prediction.accelerator].append((ttft, tpot))
    return {
        name: SpeedCalibration(
            ttft=statistics.geometric_mean(ttft for ttft, _ in pairs),
            tpot=statistics.geometric_mean(tpot for _, tpot in pairs),
            evaluations=len(pairs),
        )
        for name, pairs in ratios.items()
    }


def _predicted(root: Path, accelerators: Mapping[str, Accelerator]) -> Iterator[tuple[Evaluation, Prediction]]:
    """Read the evaluations on GPUs of the catalogue, with their predictions."""
    for folder in sorted(root.glob("*--*/evaluations")):
        store = ModelStore(root, folder.parent.name.replace("--", "/", 1))
        model: Architecture | None = None
        for path in sorted(folder.glob("*.json")):
            with contextlib.suppress(SlipwayError, NotSizeable):
                evaluation, variant = Evaluation.read(path), Variant.read(store.optimized(path.stem) / VARIANT)
                if not (evaluation and variant and evaluation.hardware.gpus):
                    continue
                if "--speculative-config" in evaluation.engine.arguments:
                    continue
                model = model or sized(store)
                directory = store.optimized(path.stem)
                if model and (prediction := predict(model, evaluation, variant, accelerators, directory)):
                    yield evaluation, prediction
