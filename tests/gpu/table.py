"""What was made and measured of each variant, as a Markdown table for docs."""

from __future__ import annotations

from collections.abc import Iterable

from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.variant import VARIANT, Variant

MIB = 1 << 20
HEADS = (
    *("variant", "kernel", "weights, MiB", "made in, s", "GPU memory while made, MiB"),
    *("ready in, s", "GPU memory, MiB", "tokens/s", "TTFT p50, ms", "end to end p95, ms", "quality"),
)


def markdown(store: ModelStore, names: Iterable[str]) -> str:
    """One row per variant that was measured; above them the machine, the engine and the workload."""
    measured = [each for name in names if (each := Evaluation.read(store.evaluation(name)))]
    first = measured[0]
    machine = ", ".join(first.hardware.gpus) or f"{first.hardware.cpu}, {first.hardware.cores} cores"
    said = f"{store.model} on {machine}; vLLM {first.tool_versions['vllm']} in {first.engine.dtype}"
    rate = f"{first.load.rate_per_s:.3g} requests/s" if first.load.rate_per_s else f"{first.load.concurrency} in flight"
    load = f"{rate}, {first.load.requests} requests per variant"
    lines = [HEADS, ["---"] * len(HEADS), *(row(store, each) for each in measured)]
    return "\n".join([f"{said}; {load}.", "", *(f"| {' | '.join(line)} |" for line in lines)])


def row(store: ModelStore, evaluation: Evaluation) -> list[str]:
    variant = Variant.read(store.optimized(evaluation.variant) / VARIANT)
    assert variant is not None
    load = evaluation.load
    return [
        evaluation.variant,
        evaluation.engine.kernel or "–",
        mib(variant.weights_bytes),
        f"{variant.seconds:.0f}",
        mib(variant.peak_gpu_memory_bytes),
        f"{evaluation.engine.ready_s:.0f}",
        mib(evaluation.memory.peak_gpu_bytes),
        f"{load.output_tokens_per_s:.0f}",
        f"{load.ttft_ms.p50:.1f}",
        f"{load.e2el_ms.p95:.0f}",
        f"{evaluation.metrics()['quality']:.3f}",
    ]


def mib(size_bytes: int | None) -> str:
    return "–" if size_bytes is None else f"{size_bytes / MIB:.0f}"
