"""What is true of the simulated variants, and how noisy their measurements are, for ``benchmarks.choice``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from pipeline.settings.config import load
from scoring.anchored import log_margins, log_ratios, scores
from scoring.arrays import Floats
from scoring.criteria import Criteria
from scoring.names import PRODUCTION, REFERENCE

CRITERIA: Final[Criteria] = load().profile


@dataclass(frozen=True)
class SimulatedTask:
    """A task that is scored by accuracy."""

    items: int
    """Asked at first."""
    most: int
    """That there are."""
    accuracy: float
    """The share of items that the reference answers rightly."""
    seconds: float
    """For the items that are asked at first, of one variant; with the texts, 270 s in all."""


TASKS: Final = {
    "gsm8k": SimulatedTask(1319, 1319, 0.85, 60.0),
    "instructions": SimulatedTask(2000, 8000, 0.75, 150.0),
    "structured_output": SimulatedTask(2000, 8000, 0.9, 36.0),
    "long_context": SimulatedTask(2000, 8000, 0.9, 18.0),
}
"""Longer answers take longer."""
NATS_PER_BYTE: Final = 0.5
"""The perplexity task's loss."""
MEMORY: Final = 16e9
SHARES: Final = CRITERIA.weights.shares()
TIE: Final = float(log_margins(CRITERIA.margins)[1] / math.log(4) * (SHARES["latency"] + SHARES["throughput"]))
"""The score that the margin of speed is worth."""
EPSILON: Final = 1e-9
"""The weight of the sum without clipping, which orders equal scores."""


@dataclass(frozen=True)
class StartNoise:
    """Standard deviations of logarithms."""

    requests: float
    rounds: float
    starts: float
    machine: float
    """Between blocks; from one start to the next it drifts by a fifth of this."""
    slow: float = 0.0
    """The share of the starts that are 15 % slower than the others."""

    @property
    def name(self) -> str:
        return f"{100 * self.starts:.1f} %{f', {100 * self.slow:.0f} % slow' if self.slow else ''}"


NOISES: Final = (
    StartNoise(0.05, 0.002, 0.003, 0.005),
    StartNoise(0.10, 0.005, 0.010, 0.010),
    StartNoise(0.20, 0.010, 0.020, 0.030),
    StartNoise(0.40, 0.020, 0.050, 0.100),
    StartNoise(0.80, 0.100, 0.400, 0.300),
)


@dataclass(frozen=True)
class TrueVariant:
    """What is true of a variant, relative to the reference, and how its answers differ."""

    speed: float = 1.0
    memory: float = 1.0
    losses: tuple[float, ...] = (0.0,) * (len(TASKS) + 1)
    """The share of the score lost on each task, the perplexity last."""
    like: str | None = None
    """The variant whose answers these are, apart from flips and losses."""
    flips: float = 0.0
    """The share of items answered otherwise than by that variant, both ways equally often."""
    noise: float = 1.0
    """How many times as much noise its starts have."""


@dataclass(frozen=True)
class Case:
    name: str
    variants: Mapping[str, TrueVariant]
    """The reference first."""
    cluster: int = 1
    """Items that share a text. Their differences between two variants have a correlation of 0.2."""
    lost: float = 0.0
    """The share of starts that fail, but for the reference's. A variant whose first start failed is missing."""
    asked: bool = False
    """Whether the reference is asked the questions only, because it does not fit."""
    budgets: float = 1.0
    """The time for measuring, in budgets of the default workload."""

    def true_scores(self, names: Sequence[str]) -> Floats:
        ratios = np.array([self._ratios(self.variants[name]) for name in names])
        score, beyond = scores(ratios, CRITERIA)
        return score + EPSILON * beyond

    def right(self) -> set[str]:
        """Find the variants that are right to choose: within the gates, and with a score that no other exceeds by more
        than the margin of speed is worth."""
        names = [name for name, variant in self.variants.items() if max(variant.losses) < CRITERIA.task_loss]
        names = [name for name in names if not (self.asked and name == REFERENCE)]
        score = self.true_scores(names)
        return {name for name, value in zip(names, score, strict=True) if value >= score.max() - TIE}

    def best(self, names: Sequence[str]) -> str:
        return names[int(self.true_scores(names).argmax())]

    @property
    def equal(self) -> bool:
        """Whether several are right, and differ by less than the margins: to call one of them better is wrong."""
        ratios = np.array([self._ratios(self.variants[name]) for name in self.right()])
        return len(ratios) > 1 and bool((np.ptp(ratios, axis=0) <= log_margins(CRITERIA.margins)).all())

    def _ratios(self, variant: TrueVariant) -> Floats:
        scores_of_tasks = np.array([*(task.accuracy for task in TASKS.values()), math.exp(-NATS_PER_BYTE)])
        quality = float((scores_of_tasks * (1 - np.array(variant.losses))).sum() / scores_of_tasks.sum())
        speed = variant.speed
        return log_ratios(np.array([quality, 1 / speed, speed, variant.memory]), np.ones(4))


SLOW: Final = replace(NOISES[2], slow=0.1)
UNTIDY: Final = (NOISES[0], NOISES[2], SLOW)
"""The noises of the truths that are less tidy."""
COPY_FLIPS: Final = 0.003
"""The same weights: only near-ties between tokens are decided otherwise."""
FLIPS: Final = 0.02
"""Share of the items on which variants of the same quality differ."""


def lossy(every: float = 0.0, first: float = 0.0) -> tuple[float, ...]:
    """List losses on every task, and on the first in addition."""
    return (every + first, *(every,) * len(TASKS))


def rivals(name: str, *, speed: float = 1.0, flips: float = FLIPS, losses: tuple[float, ...] = lossy()) -> Case:
    """Make a reference and two quantized variants, of which the second is faster and may lose quality."""
    first = TrueVariant(speed=1.3, memory=0.3, like=REFERENCE, flips=FLIPS)
    second = TrueVariant(1.3 * speed, 0.3, losses, like="a", flips=flips)
    return Case(name, {REFERENCE: TrueVariant(), "a": first, "b": second})


def copies(count: int) -> Case:
    copy = TrueVariant(like=REFERENCE, flips=COPY_FLIPS)
    return Case(f"{count} copies", {REFERENCE: TrueVariant(), **{f"copy {number}": copy for number in range(1, count)}})


IDENTICAL: Final = (copies(2), copies(3), rivals("identical variants", flips=COPY_FLIPS))
LEADS: Final = tuple(
    rivals(f"{100 * (speed - 1):.0f} % faster, {100 * loss:.0f} % lost", speed=speed, losses=lossy(loss))
    for loss in (0.0, 0.01, 0.03)
    for speed in (1.05, 1.1, 1.2)
)
MORE_FLIPS: Final = tuple(
    rivals(f"{100 * (speed - 1):.0f} % faster, 6 % flips", speed=speed, flips=0.06) for speed in (1.1, 1.2)
)
AT_MARGIN: Final = rivals("3.1 % faster, 0.3 % flips", speed=1.031, flips=COPY_FLIPS)
NOISY: Final = replace(
    rivals("identical, ten times the noise of fp16", flips=COPY_FLIPS),
    variants={
        name: replace(variant, noise=1.0 if name == REFERENCE else 10.0)
        for name, variant in rivals("", flips=COPY_FLIPS).variants.items()
    },
)
"""The reference is the quiet one beside two that are identical."""
CLUSTERED: Final = replace(rivals("identical, 2 % flips, 20 items a text"), cluster=20)
LOST: Final = replace(rivals("10 % faster, 5 % of starts lost", speed=1.1), lost=0.05)
ASKED: Final = tuple(
    replace(case, name=f"{case.name}, reference asked only", asked=True)
    for case in (IDENTICAL[-1], rivals("10 % faster", speed=1.1), rivals("2 % lost", speed=1.1, losses=lossy(0.02)))
)
ONE_TASK: Final = rivals("3 % lost on one task", speed=1.1, losses=lossy(first=0.03))


REVISION_FLIPS: Final = 0.1
"""Share of the items that two revisions of equal quality answer differently."""


def revision(
    name: str, *, speed: float = 1.0, flips: float = REVISION_FLIPS, losses: tuple[float, ...] = lossy()
) -> Case:
    """Make a new revision with a quantized variant, and what is in production. *speed* and *losses*: of that variant,
    relative to what is in production."""
    variant = TrueVariant(speed=1.3, memory=0.3, like=REFERENCE, flips=FLIPS)
    gained = tuple(-loss / (1 - loss) for loss in losses)
    before = TrueVariant(1.3 / speed, 0.3, gained, like=REFERENCE, flips=flips)
    return Case(name, {REFERENCE: TrueVariant(), "a": variant, PRODUCTION: before})


REVISIONS: Final = (
    revision("worse: 2 % lost on every task", losses=lossy(0.02)),
    revision("worse: 6 % lost on one task, 2 % gained on the others", losses=lossy(-0.02, first=0.08)),
    revision("worse: 10 % slower, 3 % gained on every task", speed=1 / 1.1, losses=lossy(-0.03)),
    revision("at the margin: 3 % slower, 3 % gained on every task", speed=0.97, losses=lossy(-0.03)),
    revision("at the margin: 3 % lost on one task, 2 % gained", losses=lossy(-0.02, first=0.05)),
    revision("equal, other answers"),
    revision("equal, the same answers", flips=COPY_FLIPS),
    revision("better: 3 % gained on every task", losses=lossy(-0.03)),
    revision("better: 10 % faster, the same answers", speed=1.1, flips=COPY_FLIPS),
)
"""What a new revision is, compared with what is in production."""


def twelve(name: str, second: float = 0.94, noise: float = 1.0) -> Case:
    """Make formats, and the best of them with recipes, which share its answers or lose a little. *second*: the speed of
    the second best as a share of the best one's; *noise*: of those that are not among the first."""
    made = partial(TrueVariant, like=REFERENCE, flips=FLIPS)
    variants = {
        REFERENCE: TrueVariant(),
        "int8": made(1.2, 0.55, lossy(0.002)),
        "fp8": made(1.4, 0.55, lossy(0.001)),
        "awq": made(1.15, 0.35, lossy(0.01), noise=noise),
        "gptq": made(1.1, 0.35, lossy(0.012), noise=noise),
        "w4a16": made(1.2, 0.35, lossy(0.008), noise=noise),
        "mxfp4": made(1.3, 0.35, lossy(0.04)),
        "nvfp4": made(0.3, 0.35, lossy(0.01), noise=noise),
        "fp16+ngram": made(1.1, like=REFERENCE, flips=0.0),
        "fp8+ngram": made(1.4 * 1.3, 0.55, like="fp8", flips=0.0),
        "fp8+kv-fp8": made(1.4 * 1.3 * second, 0.55, lossy(0.001), like="fp8", flips=COPY_FLIPS),
        "fp8+small-batches": made(1.25, 0.55, like="fp8", flips=0.0),
    }
    return Case(name, variants, budgets=2.0)


TWELVE: Final = (
    replace(copies(12), name="twelve copies", budgets=2.0),
    twelve("twelve, 6 % faster"),
    twelve("twelve, 20 % faster", 1 / 1.2),
    twelve("twelve, some with five times the noise", noise=5.0),
)
