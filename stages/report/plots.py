"""The report's plots as SVG: drawn here, so that the page needs neither a script nor anything from outside.

Colors come from the page's style sheet (``--v0``…), so one drawing serves light and dark; each variant has a mark of
its own as well, for who can't tell the colors apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

WIDTH: Final = 460
HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 16, 46
"""Margins around the area of a plot."""
MARK: Final = 5.5
LABEL_HEIGHT: Final = 15
CHARACTER: Final = 7.2
"""Width of one at the labels' size, roughly: enough to keep labels apart."""
STYLES: Final = 8
"""Colors and marks; with more variants they begin again."""


@dataclass(frozen=True)
class Point:
    """A variant in a scatter plot; an interval of no width has no bar."""

    variant: str
    style: int
    x: float
    y: float
    x_interval: tuple[float, float] | None = None
    y_interval: tuple[float, float] | None = None
    chosen: bool = False
    eligible: bool = True
    """Others are drawn hollow, and are not on the front."""


@dataclass(frozen=True)
class Line:
    """A variant's values over concurrency: two percentiles."""

    variant: str
    style: int
    at: tuple[float, ...]
    p50: tuple[float, ...]
    p95: tuple[float, ...]


@dataclass(frozen=True)
class Bar:
    """A variant's score, made of its metrics' shares."""

    variant: str
    style: int
    parts: tuple[tuple[str, float], ...]
    score: float
    low: float
    high: float
    chosen: bool


@dataclass(frozen=True)
class Scale:
    """From values to pixels; *low* may be at the larger pixel."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 2)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that enclose *low* and *high*: about *count* steps."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power * count >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats: lower x and higher y, at least as good in both and better in one. By x."""
    able = [each for each in points if each.eligible]
    kept = [
        each
        for each in able
        if not any(o.x <= each.x and o.y >= each.y and (o.x < each.x or o.y > each.y) for o in able)
    ]
    return sorted(kept, key=lambda each: (each.x, each.y))


def scatter(name: str, title: str, x_label: str, y_label: str, points: Sequence[Point]) -> Markup:
    """y over x, with the Pareto front of what is high and to the left. *name* is unique in the page."""
    x_ticks = ticks(*_reach([(each.x, each.x_interval) for each in points]))
    y_ticks = ticks(*_reach([(each.y, each.y_interval) for each in points]))
    x, y = _scales(x_ticks, y_ticks)
    said = "; ".join(f"{each.variant}: {x_label} {_number(each.x)}, {y_label} {_number(each.y)}" for each in points)
    parts = [_axes(x, y, x_ticks, y_ticks, x_label, y_label), _front_line(front(points), x, y)]
    parts += [_reference(each, y) for each in points if each.variant == "fp16"]
    parts += [_error_bars(each, x, y) for each in points]
    parts += [_mark(each.style, x(each.x), y(each.y), hollow=not each.eligible) for each in points]
    parts += _labels(points, x, y)
    return _figure(name, title, f"{said}. The line is the Pareto front.", HEIGHT, parts)


def lines(name: str, title: str, y_label: str, given: Sequence[Line]) -> Markup:
    """Percentiles over concurrency: solid p95, dashed p50. Each concurrency has the same room."""
    places = sorted({at for each in given for at in each.at})
    y_ticks = ticks(0.0, max(value for each in given for value in (*each.p50, *each.p95)) or 1.0)
    x, y = _scales([0.0, float(max(len(places) - 1, 1))], y_ticks, inset=22)
    where = {at: x(float(place)) if len(places) > 1 else (LEFT + WIDTH - RIGHT) / 2 for place, at in enumerate(places)}
    parts = [_axes(x, y, [], y_ticks, "requests in flight", y_label)]
    parts += [_text(where[at], HEIGHT - BOTTOM + 17, _number(at), anchor="middle") for at in places]
    for each in given:
        for kind, values in (("p50", each.p50), ("p95", each.p95)):
            path = " ".join(f"{where[at]},{y(value)}" for at, value in zip(each.at, values, strict=True))
            parts.append(Markup('<polyline class="line {} v{}" points="{}"/>').format(kind, each.style, path))
            for at, value in zip(each.at, values, strict=True):
                parts.append(_mark(each.style, where[at], y(value), hollow=kind == "p50", size=4.2))
    said = "; ".join(
        f"{each.variant} at {_number(at)}: p50 {_number(a)}, p95 {_number(b)}"
        for each in given
        for at, a, b in zip(each.at, each.p50, each.p95, strict=True)
    )
    return _figure(name, title, f"{y_label}. {said}.", HEIGHT, parts)


def score_bars(name: str, title: str, bars: Sequence[Bar], width: float = 2 * WIDTH) -> Markup:
    """Each variant's score as the sum of what its metrics add, with the score's interval."""
    row, left = 40, 96
    height = row * len(bars) + 34
    x = Scale(0.0, 1.0, left, width - 64)
    parts = []
    for value in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(_line(x(value), 6, x(value), height - 24, "grid"))
        parts.append(_text(x(value), height - 7, _number(value), anchor="middle"))
    for number, each in enumerate(bars):
        top, reached = row * number + 8, 0.0
        parts.append(_mark(each.style, 10, top + 13))
        parts.append(_text(22, top + 18, _short(each.variant, 9), kind="label chosen" if each.chosen else "label"))
        for metric, share in each.parts:
            start, end = x(reached), x(reached + share)
            parts.append(
                Markup('<rect class="part {}" x="{}" y="{}" width="{:.2f}" height="20"/>').format(
                    metric, start, top, max(end - start, 0.0)
                )
            )
            if end - start > 34:
                parts.append(_text((start + end) / 2, top + 15, f"{share:.2f}", kind="inside", anchor="middle"))
            reached += share
        parts.append(_bar(x(each.low), top + 26, x(each.high), top + 26))
        parts.append(_text(width - 56, top + 16, f"{each.score:.3f}", kind="label"))
    said = "; ".join(f"{each.variant} {each.score:.3f} ({each.low:.2f} to {each.high:.2f})" for each in bars)
    return _figure(name, title, said, height, parts, width=width)


def legend_mark(style: int) -> Markup:
    """A variant's mark, to stand in a line of text."""
    mark = _mark(style, 8, 8)
    return Markup('<svg class="key" viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">{}</svg>').format(
        mark
    )


def _reach(values: Sequence[tuple[float, tuple[float, float] | None]]) -> tuple[float, float]:
    """From the lowest to the highest, intervals included, with some air."""
    ends = [end for value, interval in values for end in (value, *(interval or ()))]
    low, high = min(ends), max(ends)
    air = (high - low) * 0.06 or abs(high) * 0.05 or 0.5
    return (max(low - air, 0.0) if low >= 0 else low - air), high + air


def _scales(x_ticks: Sequence[float], y_ticks: Sequence[float], inset: float = 0) -> tuple[Scale, Scale]:
    return (
        Scale(x_ticks[0], x_ticks[-1], LEFT + inset, WIDTH - RIGHT - inset),
        Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP),
    )


def _axes(x: Scale, y: Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> Markup:
    parts = [_line(LEFT, y(each), WIDTH - RIGHT, y(each), "grid") for each in y_ticks]
    parts += [_line(x(each), TOP, x(each), HEIGHT - BOTTOM, "grid") for each in x_ticks]
    parts += [_text(LEFT - 7, y(each) + 4, _number(each), anchor="end") for each in y_ticks]
    parts += [_text(x(each), HEIGHT - BOTTOM + 17, _number(each), anchor="middle") for each in x_ticks]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 7, x_label, kind="axis", anchor="middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = Markup('<text class="axis" text-anchor="middle" transform="translate(12 {}) rotate(-90)">{}</text>')
    return Markup("").join([*parts, turned.format(middle, y_label)])


def _front_line(points: Sequence[Point], x: Scale, y: Scale) -> Markup:
    """Steps: at each point as good as it, and to its right no better until the next."""
    if not points:
        return Markup("")
    steps = [f"M{x(points[0].x)},{HEIGHT - BOTTOM}", f"V{y(points[0].y)}"]
    for each in points[1:]:
        steps += [f"H{x(each.x)}", f"V{y(each.y)}"]
    return Markup('<path class="front" d="{}"/>').format(" ".join([*steps, f"H{WIDTH - RIGHT}"]))


def _reference(point: Point, y: Scale) -> Markup:
    return _line(LEFT, y(point.y), WIDTH - RIGHT, y(point.y), "reference")


def _error_bars(point: Point, x: Scale, y: Scale) -> Markup:
    parts = []
    if point.x_interval and point.x_interval[0] < point.x_interval[1]:
        parts.append(_bar(x(point.x_interval[0]), y(point.y), x(point.x_interval[1]), y(point.y)))
    if point.y_interval and point.y_interval[0] < point.y_interval[1]:
        parts.append(_bar(x(point.x), y(point.y_interval[0]), x(point.x), y(point.y_interval[1])))
    return Markup('<g class="v{}">{}</g>').format(point.style, Markup("").join(parts))


def _bar(x1: float, y1: float, x2: float, y2: float) -> Markup:
    """An error bar with caps across its ends."""
    across = (0, 3.5) if y1 == y2 else (3.5, 0)
    caps = [_line(x - across[0], y - across[1], x + across[0], y + across[1], "bar") for x, y in ((x1, y1), (x2, y2))]
    return Markup("").join([_line(x1, y1, x2, y2, "bar"), *caps])


def _labels(points: Sequence[Point], x: Scale, y: Scale) -> list[Markup]:
    """Names beside the marks, moved up or down where they would cover one another."""
    placed: list[tuple[float, float, float]] = []
    found = []
    for each in sorted(points, key=lambda point: -point.y):
        name = _short(each.variant, 16)
        width = CHARACTER * len(name)
        left = x(each.x) + 10 if x(each.x) + 10 + width < WIDTH - RIGHT else x(each.x) - 10 - width
        taken = [at for start, end, at in placed if left < end and start < left + width]
        height = _free(y(each.y) - 8, taken)
        placed.append((left, left + width, height))
        found.append(_text(left, height, name, kind="label chosen" if each.chosen else "label"))
    return found


def _free(wanted: float, taken: Sequence[float]) -> float:
    """The height nearest to the one *wanted* that keeps apart from those *taken*."""
    heights = range(TOP + 8, HEIGHT - BOTTOM - 2)
    apart = [each for each in heights if all(abs(each - other) >= LABEL_HEIGHT for other in taken)]
    return min(apart or heights, key=lambda each: abs(each - wanted))


def _mark(style: int, x: float, y: float, *, hollow: bool = False, size: float = MARK) -> Markup:
    kind = f"mark v{style % STYLES}" + (" hollow" if hollow else "")
    corners = SHAPES[style % STYLES]
    if corners is None:
        return Markup('<circle class="{}" cx="{}" cy="{}" r="{}"/>').format(kind, x, y, size)
    path = " ".join(f"{x + a * size:.1f},{y + b * size:.1f}" for a, b in corners)
    return Markup('<polygon class="{}" points="{}"/>').format(kind, path)


def _star(corners: int, outer: float, inner: float | None = None) -> tuple[tuple[float, float], ...]:
    """A regular polygon, its first corner on top; with *inner*, a star."""
    reaches = [outer] if inner is None else [outer, inner]
    turns = [math.tau * each / (corners * len(reaches)) for each in range(corners * len(reaches))]
    return tuple(
        (reaches[number % len(reaches)] * math.sin(turn), -reaches[number % len(reaches)] * math.cos(turn))
        for number, turn in enumerate(turns)
    )


SHAPES: Final[tuple[tuple[tuple[float, float], ...] | None, ...]] = (
    _star(4, 1.3),
    None,
    ((-0.95, -0.95), (0.95, -0.95), (0.95, 0.95), (-0.95, 0.95)),
    _star(3, 1.25),
    ((0, 1.25), (1.08, -0.62), (-1.08, -0.62)),
    _star(5, 1.5, 0.6),
    _star(5, 1.2),
    _star(4, 1.4, 0.5),
)
"""Diamond (fp16), circle (None), square, triangles, star, pentagon, sharp star."""


def _figure(name: str, title: str, said: str, height: float, parts: Sequence[Markup], width: float = WIDTH) -> Markup:
    return Markup(
        '<svg id="{0}" viewBox="0 0 {1} {2}" role="img" aria-labelledby="{0}-title {0}-desc">'
        '<title id="{0}-title">{3}</title><desc id="{0}-desc">{4}</desc>{5}</svg>'
    ).format(name, width, height, title, said, Markup("").join(parts))


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(kind, x1, y1, x2, y2)


def _text(x: float, y: float, text: str, *, kind: str = "tick", anchor: str = "start") -> Markup:
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, escape(text))


def _number(value: float) -> str:
    return f"{value:,.6g}"


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
