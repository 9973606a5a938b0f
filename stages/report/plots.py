"""The report's plots as SVG: what quality is lost at which cost, and the scores' parts.

Colors come from the page's style sheet (``--v0``…), so one drawing serves light and dark. Each format also has a shape,
for readers who can't tell the colors apart, and each recipe a sign inside the shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from markupsafe import Markup, escape

from scoring.pareto import pareto_front
from stages.report.labels import Box, placed

WIDTH: Final = 460
"""Width of a plot for a small screen, in the SVG's units; that for a wide one is twice as wide."""
NARROW: Final = "-narrow"
"""Ends the id of a plot for a small screen; the style sheet shows one of the two."""
COLORS: Final = 8
"""Number of colors; further formats begin again with the first, in shapes of their own."""
SHAPES: Final = (
    "M0-8 8 0 0 8-8 0Z",
    "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0Z",
    "M-5.5-5.5h11v11h-11Z",
    "M0-7.5 7 5H-7Z",
    "M0 7.5 7-5H-7Z",
    "M-2.5-7h5v4.5H7v5H2.5V7h-5V2.5H-7v-5h4.5Z",
    "M0-8 2.2-2.8 7.8-2.5 3.4 1 4.8 6.5 0 3.4-4.8 6.5-3.4 1-7.8-2.5-2.2-2.8Z",
    "M7.5 0-5 7V-7Z",
    "M-7.5 0 5 7V-7Z",
    "M0-3.5 3.5-7 7-3.5 3.5 0 7 3.5 3.5 7 0 3.5-3.5 7-7 3.5-3.5 0-7-3.5-3.5-7Z",
    "M-8-3.5H8v7H-8Z",
    "M-3.5-8h7V8h-7Z",
)
"""Paths around the center: diamond (the reference's format), circle, square, triangles up and down, plus, star,
triangles right and left, cross, lying and standing rectangle."""
SIGNS: Final = ("", "M-.5 0h1", "M-3 0h6", "M0-3v6", "M-3 0h6M0-3v6")
"""Paths inside a shape: none without a recipe; dot, lying and standing line, cross."""
MARK: Final = 8
"""Half the width and height of the largest shape."""
RING: Final = 12
"""Radius of the ring around the chosen one's mark."""
HEIGHT: Final = 400
LEFT, RIGHT, TOP, BOTTOM = 66, 22, 16, 50
"""Margins around the area of a plot."""
LABEL_HEIGHT: Final = 16
CHARACTER_WIDTH: Final = 8.8
BOLD_WIDTH: Final = 10.2
"""Width of a label's character, on average in a wide font, which suffices to keep labels apart."""
FAR: Final = 20.0
"""A label at a larger distance has a line to its mark."""
DECADE: Final = 8.0
"""From this ratio of the largest to the smallest cost on, their axis is logarithmic."""
BAR_ROW: Final = 40
"""Height of a variant's row in the plot of the scores, without a line for the name."""
Ends = tuple[float, float] | None
"""An interval, if it is known."""


class Style(NamedTuple):
    """How a variant looks."""

    format: int = 0
    """Tells color and shape; 0 is the reference's."""
    recipe: int = 0
    """Tells the sign inside; 0 is none."""


@dataclass(frozen=True)
class Point:
    """A variant in a scatter plot. An interval of no width is not drawn."""

    variant: str
    style: Style
    x: float
    y: float
    x_interval: Ends = None
    y_interval: Ends = None
    chosen: bool = False
    eligible: bool = True
    """Other points are drawn hollow, and are not on the Pareto front; those far above it at the upper edge."""


@dataclass(frozen=True)
class Bar:
    """A variant's score, the sum of its parts."""

    variant: str
    style: Style
    parts: tuple[tuple[str, float], ...]
    """Each metric and what it adds."""
    score: float
    low: float
    high: float
    chosen: bool


@dataclass(frozen=True)
class Scale:
    """Maps values to coordinates; the first tick lies at *start*, which may be the larger coordinate. What is beyond
    the ticks lies at the ends."""

    ticks: Sequence[float]
    """Values that have a grid line and a number, from the lowest to the highest of the scale."""
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        value = min(max(value, low), high)
        low, high, value = (math.log(each) if self.log else each for each in (low, high, value))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 2)


def ticks(low: float, high: float, count: int = 8) -> list[float]:
    """Choose numbers that enclose *low* and *high*, in about *count* steps of 1, 2, 2.5 or 5 times a power of ten."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power * count >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Choose numbers that enclose *low* and *high*, both above 0: 1, 2 and 5 times each power of ten."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    numbers = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
    first = max(place for place, number in enumerate(numbers) if number <= low)
    last = min(place for place, number in enumerate(numbers) if number >= high)
    return numbers[first : max(last, first + 1) + 1]


def front(points: Sequence[Point]) -> list[Point]:
    """Find the eligible points on the Pareto front for low x and low y, sorted by x."""
    able = [point for point in points if point.eligible]
    best = pareto_front([(-point.x, -point.y) for point in able])
    return sorted((point for point, on in zip(able, best, strict=True) if on), key=lambda point: (point.x, -point.y))


def scatter(name: str, title: str, x_label: str, y_label: str, points: Sequence[Point]) -> tuple[Markup, Markup]:
    """Plot y against x, with the Pareto front where both are low: for a wide screen, with names beside the marks, and
    for a small one, with the points' numbers in their place. The first point lies on top. *name* is unique in the
    page."""
    description = "; ".join(f"{each.variant}: {x_label} {_number(each.x)}, {y_label} {each.y:.3g}" for each in points)
    description += ". The line is the Pareto front."
    log = max(point.x for point in points) >= DECADE * min(point.x for point in points) > 0
    x_ticks = (decades if log else ticks)(*_reach([(point.x, point.x_interval) for point in points], log=log))
    edge = 2 * max((end for each in points if each.eligible for end in (each.y, *(each.y_interval or ()))), default=0.0)
    inside = [point for point in points if point.eligible or not point.y > edge > 0]
    y = Scale(ticks(*_reach([(point.y, point.y_interval) for point in inside])), HEIGHT - BOTTOM, TOP)
    figures = []
    for ending, width in (("", 2 * WIDTH), (NARROW, WIDTH)):
        x = Scale(x_ticks, LEFT, width - RIGHT, log)
        names = [
            (str(number) if ending else point.variant) + ("" if point in inside else f": {point.y:.1f}% ↑")
            for number, point in enumerate(points, 1)
        ]
        steps = _front_steps(front(points), x, y)
        parts = [_axes(x_label, x, y_label, y), *(line(*step, "front") for step in steps)]
        parts += [line(x.start, y(0), x.end, y(0), "reference")] if y.ticks[0] <= 0 <= y.ticks[-1] else []
        for point in points:
            bars = Markup("").join(error_bar(*ends) for ends in _bars(point, x, y))
            parts.append(Markup('<g class="v{}">{}</g>').format(point.style.format % COLORS, bars))
        labels = _labels(points, names, steps, x, y)
        parts += [*(leader for leader, _ in labels), *(_mark(point, x, y) for point in reversed(points))]
        parts += [label for _, label in labels]
        figures.append(figure(f"{name}{ending}", title, description, (width, HEIGHT), parts))
    return figures[0], figures[1]


def score_bars(name: str, title: str, bars: Sequence[Bar]) -> tuple[Markup, Markup]:
    """Plot each variant's score as the sum of its parts, with the score's interval below: for a wide screen, with the
    names beside the bars, and for a small one, with the names above them."""
    description = "; ".join(f"{bar.variant} {bar.score:.3f} ({bar.low:.2f} to {bar.high:.2f})" for bar in bars)
    names = 32 + BOLD_WIDTH * max(len(bar.variant) for bar in bars)
    figures = []
    for ending, width, left, above in (("", 2 * WIDTH, min(names, WIDTH), 0), (NARROW, WIDTH, 8, 22)):
        height = (BAR_ROW + above) * len(bars) + 34
        x = Scale((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), left, width - 64)
        parts = [line(x(value), 6, x(value), height - 24, "grid") for value in x.ticks]
        parts += [text(x(value), height - 7, _number(value), anchor="middle") for value in x.ticks]
        for number, bar in enumerate(bars):
            top = (BAR_ROW + above) * number + 8
            parts += [mark(bar.style, 10, top + 10)]
            parts.append(text(24, top + 15, bar.variant, kind="label chosen" if bar.chosen else "label"))
            parts += _score_row(bar, top + above, x)
            parts.append(text(width - 56, top + above + 15, f"{bar.score:.3f}", kind="label"))
        figures.append(figure(f"{name}{ending}", title, description, (width, height), parts))
    return figures[0], figures[1]


def _score_row(bar: Bar, top: float, x: Scale) -> list[Markup]:
    parts = []
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


def _reach(values: Sequence[tuple[float, Ends]], *, log: bool = False) -> tuple[float, float]:
    """Find the lowest and highest of values and intervals, with some room on both sides. Intervals reach no further
    from the values than these from each other, so that one of great noise does not squeeze all marks together."""
    ends = [end for _, interval in values for end in interval or ()]
    low, high = min(value for value, _ in values), max(value for value, _ in values)
    if log:
        return low / 1.1, high * 1.1
    span = high - low or math.inf
    low, high = max(low - span, min([low, *ends])), min(high + span, max([high, *ends]))
    room = (high - low) * 0.06 or abs(high) * 0.05 or 0.5
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def _axes(x_label: str, x: Scale, y_label: str, y: Scale) -> Markup:
    """Draw the grid, the numbers at it, and the labels of both axes."""
    parts = [line(x.start, y(tick), x.end, y(tick), "grid") for tick in y.ticks]
    parts += [line(x(tick), TOP, x(tick), y.start, "grid") for tick in x.ticks]
    parts += [text(x.start - 7, y(tick) + 4, _number(tick), anchor="end") for tick in y.ticks]
    parts += [text(x(tick), y.start + 20, _number(tick), anchor="middle") for tick in x.ticks]
    parts.append(text((x.start + x.end) / 2, HEIGHT - 7, x_label, kind="axis", anchor="middle"))
    turned = Markup('<text class="axis" text-anchor="middle" transform="translate(17 {}) rotate(-90)">{}</text>')
    return Markup("").join([*parts, turned.format((y.start + y.end) / 2, y_label)])


def _front_steps(points: Sequence[Point], x: Scale, y: Scale) -> list[Box]:
    """Find the lines that fall at each point and stay level to the next."""
    corners = [(x(point.x), y(point.y)) for point in points]
    pairs = list(pairwise([(0.0, TOP), *corners, (x.end, 0.0)]))
    down = [Box(at, above, at, height) for (_, above), (at, height) in pairs[:-1]]
    return down + [Box(at, height, end, height) for (at, height), (end, _) in pairs[1:]]


def _bars(point: Point, x: Scale, y: Scale) -> list[Box]:
    """Find where the bars of the intervals are: they end at the edges of the plot."""
    (left, right), (low, high) = point.x_interval or (0.0, 0.0), point.y_interval or (0.0, 0.0)
    bars = [Box(x(left), y(point.y), x(right), y(point.y))] if left < right else []
    return bars + ([Box(x(point.x), y(high), x(point.x), y(low))] if low < high else [])


def _mark(point: Point, x: Scale, y: Scale) -> Markup:
    ring = Markup('<circle class="ring v{}" cx="{}" cy="{}" r="{}"/>')
    place = x(point.x), y(point.y)
    around = ring.format(point.style.format % COLORS, *place, RING) if point.chosen else Markup("")
    return around + mark(point.style, *place, hollow=not point.eligible)


def _labels(
    points: Sequence[Point], names: Sequence[str], lines: Sequence[Box], x: Scale, y: Scale
) -> list[tuple[Markup, Markup]]:
    """Write the names beside the marks, if possible on no lines, each with a line to a mark that is far."""
    places = [(x(point.x), y(point.y)) for point in points]
    radii = [RING if point.chosen else MARK for point in points]
    marks = [Box(at - r, height - r, at + r, height + r) for (at, height), r in zip(places, radii, strict=True)]
    bars = [*lines, *(bar for point in points for bar in _bars(point, x, y))]
    widths = [BOLD_WIDTH if point.chosen else CHARACTER_WIDTH for point in points]
    sizes = [(width * len(name), LABEL_HEIGHT) for name, width in zip(names, widths, strict=True)]
    area = Box(x.start, TOP, x.end, y.start)
    labels = []
    for point, name, place, box in zip(points, names, places, placed(marks, sizes, area, bars), strict=True):
        end = box.nearest(*place)
        leader = line(*place, *end, "leader") if math.dist(place, end) > FAR else Markup("")
        kind = "label chosen" if point.chosen else "label"
        anchor, at = ("end", box.right) if box.right < place[0] else ("start", box.left)
        if box.left <= place[0] <= box.right:
            anchor, at = "middle", (box.left + box.right) / 2
        labels.append((leader, text(round(at, 1), round(box.top + 12.5, 1), name, kind=kind, anchor=anchor)))
    return labels


def _number(value: float) -> str:
    return f"{value:,.6g}".replace("-", "−")


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


def mark(style: Style, x: float, y: float, *, hollow: bool = False) -> Markup:
    drawn = Markup('<g class="mark v{}{}" transform="translate({} {})"><path d="{}"/>{}</g>')
    number = min(style.recipe, len(SIGNS) - 1)
    sign = Markup('<path class="sign" d="{}"/>').format(SIGNS[number]) if number else ""
    shape, kind = SHAPES[style.format % len(SHAPES)], " hollow" if hollow else ""
    return drawn.format(style.format % COLORS, kind, x, y, shape, sign)


def legend_mark(style: Style) -> Markup:
    """Draw a variant's mark for a line of text."""
    return Markup('<svg class="key" viewBox="-9 -9 18 18" width="16" height="16" aria-hidden="true">{}</svg>').format(
        mark(style, 0, 0)
    )
