"""The report's plots as SVG: quality against another metric, and the scores' parts.

Colors come from the page's style sheet (``--v0``…), so one drawing serves light and dark. Each variant has its own mark
as well, for readers who can't tell the colors apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

from scoring.pareto import pareto_front

WIDTH: Final = 460
"""Width of a plot that fills half the page, in the SVG's units."""
MARK: Final = 5.5
"""Radius of a mark."""
STYLES: Final = 5
"""Number of colors and marks; further variants begin again with the first."""
SHAPES: Final[tuple[tuple[tuple[float, float], ...] | None, ...]] = (
    ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    None,
    ((-0.95, -0.95), (0.95, -0.95), (0.95, 0.95), (-0.95, 0.95)),
    ((0, -1.25), (1.08, 0.62), (-1.08, 0.62)),
    ((0, 1.25), (1.08, -0.62), (-1.08, -0.62)),
)
"""Corners by style, in radii: diamond (fp16), circle (None), square, two triangles."""
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


def figure(name: str, title: str, description: str, size: tuple[float, float], parts: Sequence[Markup]) -> Markup:
    """Put a drawing together. *name* is its id, unique in the page; *description* its content in words, for screen
    readers; *size* its width and height."""
    return Markup(
        '<svg id="{0}" viewBox="0 0 {1} {2}" role="img" aria-labelledby="{0}-title {0}-desc">'
        '<title id="{0}-title">{3}</title><desc id="{0}-desc">{4}</desc>{5}</svg>'
    ).format(name, *size, title, description, Markup("").join(parts))


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(kind, x1, y1, x2, y2)


def text(x: float, y: float, content: str, *, kind: str = "tick", anchor: str = "start") -> Markup:
    escaped = escape(content)
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, escaped)


def error_bar(x1: float, y1: float, x2: float, y2: float) -> Markup:
    """Draw a horizontal or vertical bar with caps across its ends."""
    dx, dy = (0, 3.5) if y1 == y2 else (3.5, 0)
    caps = [line(x - dx, y - dy, x + dx, y + dy, "bar") for x, y in ((x1, y1), (x2, y2))]
    return Markup("").join([line(x1, y1, x2, y2, "bar"), *caps])


def mark(style: int, x: float, y: float, *, hollow: bool = False, size: float = MARK) -> Markup:
    kind = f"mark v{style % STYLES}" + (" hollow" if hollow else "")
    corners = SHAPES[style % STYLES]
    if corners is None:
        return Markup('<circle class="{}" cx="{}" cy="{}" r="{}"/>').format(kind, x, y, size)
    path = " ".join(f"{x + a * size:.1f},{y + b * size:.1f}" for a, b in corners)
    return Markup('<polygon class="{}" points="{}"/>').format(kind, path)


def legend_mark(style: int) -> Markup:
    """Draw a variant's mark for a line of text."""
    return Markup('<svg class="key" viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">{}</svg>').format(
        mark(style, 8, 8)
    )
