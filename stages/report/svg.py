"""The elements that the report's plots are drawn with.

Colors come from the page's style sheet (``--v0``…), so one drawing serves light and dark. Each variant has its own mark
as well, for readers who can't tell the colors apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup, escape

WIDTH: Final = 460
"""Width of a plot that fills half the page, in the SVG's units."""
MARK: Final = 5.5
"""Radius of a mark."""
STYLES: Final = 5
"""Number of colors and marks; further variants begin again with the first."""


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


SHAPES: Final[tuple[tuple[tuple[float, float], ...] | None, ...]] = (
    ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    None,
    ((-0.95, -0.95), (0.95, -0.95), (0.95, 0.95), (-0.95, 0.95)),
    ((0, -1.25), (1.08, 0.62), (-1.08, 0.62)),
    ((0, 1.25), (1.08, -0.62), (-1.08, -0.62)),
)
"""Corners by style, in radii: diamond (fp16), circle (None), square, two triangles."""
