"""The four metrics of a decision, and their text for people. Imports nothing, so that a report starts quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Metric:
    unit: str
    higher_is_better: bool
    meaning: str


METRICS: Final[dict[str, Metric]] = {
    "quality": Metric("0–1", True, "mean over the workload's tasks: accuracy, or probability per byte of text"),
    "latency": Metric("ms", False, "geometric mean of the requests' end-to-end times at a fixed rate"),
    "throughput": Metric("tokens/s", True, "output tokens per second at the highest rate that meets the targets"),
    "memory": Metric("bytes", False, "bytes of weights to load"),
}
TITLES: Final = {"quality": "Quality", "latency": "Latency", "throughput": "Throughput", "memory": "Weights"}


def shown(metric: str, value: float) -> str:
    """Write a raw metric with its unit, e.g. ``shown("memory", 5.8e6)`` → '5.80 MB'."""
    if metric == "memory":
        return f"{si(value)}B"
    return {"quality": f"{value:.4f}", "latency": f"{value:,.1f} ms", "throughput": f"{value:,.1f} tok/s"}[metric]


def si(value: float) -> str:
    """Write a number with a decimal prefix, ready for its unit: 1234567 → '1.23 M'."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.2f} {prefix}"
    return f"{value:.0f} "


def span(low: float, high: float | None, to: str = " to ") -> str:
    """Write an interval with three digits; without an upper bound if *high* is None."""
    return f"≥ {low:.3g}" if high is None else f"{low:.3g}{to}{high:.3g}"


def odds(probability: float) -> str:
    """Write an estimated probability; never certain, because it comes from draws."""
    if probability > 0.99:
        return ">99%"
    return "<1%" if probability < 0.01 else f"{probability:.0%}"
