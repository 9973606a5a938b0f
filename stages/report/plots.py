"""The report's plots as SVG: quality against another metric, and the scores' parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from scoring.pareto import pareto_front
from stages.report.svg import WIDTH, error_bar, figure, line, mark, text

HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 16, 46
"""Margins around the area of a plot."""
LABEL_HEIGHT: Final = 15
CHARACTER_WIDTH: Final = 7.2
"""Approximate width of a label's character, which suffices to keep labels apart."""
BAR_ROW: Final = 40
"""Height of a variant's row in the plot of the scores."""


@dataclass(frozen=True)
class Point:
    """A variant in a scatter plot. An interval of no width is not drawn."""

    variant: str
    style: int
    x: float
    y: float
    x_interval: tuple[float, float] | None = None
    y_interval: tuple[float, float] | None = None
    chosen: bool = False
    eligible: bool = True
    """Other points are drawn hollow, and are not on the Pareto front."""
    reference: bool = False
    """Draws a line across the plot at its y."""


@dataclass(frozen=True)
class Bar:
    """A variant's score, the sum of its parts."""

    variant: str
    style: int
    parts: tuple[tuple[str, float], ...]
    """Each metric and what it adds."""
    score: float
    low: float
    high: float
    chosen: bool


@dataclass(frozen=True)
class Scale:
    """Maps values to coordinates linearly; the first tick lies at *start*, which may be the larger coordinate."""

    ticks: Sequence[float]
    """Values that have a grid line and a number, from the lowest to the highest of the scale."""
    start: float
    end: float

    def __call__(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 2)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Choose numbers that enclose *low* and *high*, in about *count* steps of 1, 2, 2.5 or 5 times a power of ten."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power * count >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def front(points: Sequence[Point]) -> list[Point]:
    """Find the eligible points on the Pareto front for low x and high y, sorted by x."""
    able = [point for point in points if point.eligible]
    best = pareto_front([(-point.x, point.y) for point in able])
    return sorted((point for point, on in zip(able, best, strict=True) if on), key=lambda point: (point.x, point.y))


def scatter(name: str, title: str, x_label: str, y_label: str, points: Sequence[Point]) -> Markup:
    """Plot y against x, with the Pareto front for low x and high y. *name* is unique in the page."""
    x = Scale(ticks(*_reach([(point.x, point.x_interval) for point in points])), LEFT, WIDTH - RIGHT)
    y = Scale(ticks(*_reach([(point.y, point.y_interval) for point in points])), HEIGHT - BOTTOM, TOP)
    description = "; ".join(
        f"{point.variant}: {x_label} {_number(point.x)}, {y_label} {_number(point.y)}" for point in points
    )
    parts = [_axes(x_label, x, y_label, y), _front_line(front(points), x, y)]
    parts += [line(LEFT, y(point.y), WIDTH - RIGHT, y(point.y), "reference") for point in points if point.reference]
    parts += [_error_bars(point, x, y) for point in points]
    parts += [mark(point.style, x(point.x), y(point.y), hollow=not point.eligible) for point in points]
    parts += _labels(points, x, y)
    return figure(name, title, f"{description}. The line is the Pareto front.", (WIDTH, HEIGHT), parts)


def score_bars(name: str, title: str, bars: Sequence[Bar], width: float = 2 * WIDTH) -> Markup:
    """Plot each variant's score as the sum of its parts, with the score's interval below."""
    height = BAR_ROW * len(bars) + 34
    x = Scale((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), 96, width - 64)
    parts = []
    for value in x.ticks:
        parts.append(line(x(value), 6, x(value), height - 24, "grid"))
        parts.append(text(x(value), height - 7, _number(value), anchor="middle"))
    for number, bar in enumerate(bars):
        top = BAR_ROW * number + 8
        parts += _score_row(bar, top, x)
        parts.append(text(width - 56, top + 16, f"{bar.score:.3f}", kind="label"))
    description = "; ".join(f"{bar.variant} {bar.score:.3f} ({bar.low:.2f} to {bar.high:.2f})" for bar in bars)
    return figure(name, title, description, (width, height), parts)


def _score_row(bar: Bar, top: float, x: Scale) -> list[Markup]:
    parts = [mark(bar.style, 10, top + 13)]
    parts.append(text(22, top + 18, _short(bar.variant, 9), kind="label chosen" if bar.chosen else "label"))
    rect = Markup('<rect class="part {}" x="{}" y="{}" width="{:.2f}" height="20"/>')
    reached = 0.0
    for metric, share in bar.parts:
        start, end = x(reached), x(reached + share)
        parts.append(rect.format(metric, start, top, max(end - start, 0.0)))
        if end - start > 34:
            parts.append(text((start + end) / 2, top + 15, f"{share:.2f}", kind="inside", anchor="middle"))
        reached += share
    parts.append(error_bar(x(bar.low), top + 26, x(bar.high), top + 26))
    return parts


def _reach(values: Sequence[tuple[float, tuple[float, float] | None]]) -> tuple[float, float]:
    """Find the lowest and highest of values and intervals, with some room on both sides."""
    ends = [end for value, interval in values for end in (value, *(interval or ()))]
    low, high = min(ends), max(ends)
    room = (high - low) * 0.06 or abs(high) * 0.05 or 0.5
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def _axes(x_label: str, x: Scale, y_label: str, y: Scale) -> Markup:
    """Draw the grid, the numbers at it, and the labels of both axes."""
    parts = [line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid") for tick in y.ticks]
    parts += [line(x(tick), TOP, x(tick), HEIGHT - BOTTOM, "grid") for tick in x.ticks]
    parts += [text(LEFT - 7, y(tick) + 4, _number(tick), anchor="end") for tick in y.ticks]
    parts += [text(x(tick), HEIGHT - BOTTOM + 17, _number(tick), anchor="middle") for tick in x.ticks]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 7, x_label, kind="axis", anchor="middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = Markup('<text class="axis" text-anchor="middle" transform="translate(12 {}) rotate(-90)">{}</text>')
    return Markup("").join([*parts, turned.format(middle, y_label)])


def _front_line(points: Sequence[Point], x: Scale, y: Scale) -> Markup:
    """Draw steps that rise at each point and stay level to the next."""
    if not points:
        return Markup("")
    steps = [f"M{x(points[0].x)},{HEIGHT - BOTTOM}", f"V{y(points[0].y)}"]
    for point in points[1:]:
        steps += [f"H{x(point.x)}", f"V{y(point.y)}"]
    return Markup('<path class="front" d="{}"/>').format(" ".join([*steps, f"H{WIDTH - RIGHT}"]))


def _error_bars(point: Point, x: Scale, y: Scale) -> Markup:
    (left, right), (low, high) = point.x_interval or (0.0, 0.0), point.y_interval or (0.0, 0.0)
    parts = [error_bar(x(left), y(point.y), x(right), y(point.y))] if left < right else []
    parts += [error_bar(x(point.x), y(low), x(point.x), y(high))] if low < high else []
    return Markup('<g class="v{}">{}</g>').format(point.style, Markup("").join(parts))


def _labels(points: Sequence[Point], x: Scale, y: Scale) -> list[Markup]:
    """Write the names beside the marks, moved up or down where they would cover one another."""
    placed: list[tuple[float, float, float]] = []
    labels, heights = [], range(TOP + 8, HEIGHT - BOTTOM - 2)
    for point in sorted(points, key=lambda point: -point.y):
        name, best = _short(point.variant, 16), y(point.y) - 8
        width = CHARACTER_WIDTH * len(name)
        left = x(point.x) + 10 if x(point.x) + 10 + width < WIDTH - RIGHT else x(point.x) - 10 - width
        covered = [height for start, end, height in placed if left < end and start < left + width]
        free = [height for height in heights if all(abs(height - label) >= LABEL_HEIGHT for label in covered)]
        height = min(free or heights, key=lambda height: abs(height - best))
        placed.append((left, left + width, height))
        labels.append(text(left, height, name, kind="label chosen" if point.chosen else "label"))
    return labels


def _number(value: float) -> str:
    return f"{value:,.6g}"


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
