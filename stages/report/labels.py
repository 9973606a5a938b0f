"""Where the labels of a scatter plot stand: beside their marks, covering neither one another nor any mark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

DISTANCES: Final = (9, 14, 20, 28, 38, 50, 65, 85, 110, 140, 180, 230, 290, 360)
"""Between a mark's center and its label, from the nearest."""
DIRECTIONS: Final = 16
ROOM: Final = 2.0
"""Between a label and what it must not cover."""
COVERED: Final = 12.0
"""What it costs to cover a bar, or a point of a line, in units of distance."""
CROSSED: Final = 60.0
"""What it costs if the line from a label to its mark crosses a label or a mark, or if another mark is nearer."""
STEPS: Final = 8
"""Points of a line at which it is looked at."""


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box, room: float = 0.0) -> bool:
        beside = self.left < other.right + room and other.left < self.right + room
        return beside and self.top < other.bottom + room and other.top < self.bottom + room

    def encloses(self, other: Box) -> bool:
        inside = self.left <= other.left and other.right <= self.right
        return inside and self.top <= other.top and other.bottom <= self.bottom

    @property
    def middle(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """Find the point of the box that is nearest to another."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)


def placed(marks: Sequence[Box], sizes: Sequence[tuple[float, float]], area: Box, bars: Sequence[Box]) -> list[Box]:
    """Find a place for the label of each mark within *area*. *sizes*: width and height of each label; *bars*: what they
    had better not cover."""
    labels, covered = list[Box](), [*bars]
    for mark, size in zip(marks, sizes, strict=True):
        tried = _around(mark, *size)
        free = [
            label
            for label in tried
            if area.encloses(label.box) and not any(label.box.overlaps(each, ROOM) for each in (*labels, *marks))
        ]
        others = [each for each in marks if not each.overlaps(mark)]
        best = min(free or tried, key=lambda label: label.cost(others, labels, covered))
        labels.append(best.box)
        covered += best.line
    return labels


class _Label(NamedTuple):
    """A place that is tried."""

    box: Box
    line: tuple[Box, ...]
    """Points of the line to the mark."""
    distance: float

    def cost(self, marks: Sequence[Box], labels: Sequence[Box], bars: Sequence[Box]) -> float:
        crossed = sum(any(point.overlaps(each) for point in self.line) for each in (*marks, *labels))
        crossed += any(math.dist(each.middle, self.box.nearest(*each.middle)) < self.distance for each in marks)
        return self.distance + COVERED * sum(self.box.overlaps(bar) for bar in bars) + CROSSED * crossed


def _around(mark: Box, width: float, height: float) -> list[_Label]:
    """List the places around a mark; to the right is best, and above or below better than aslant."""
    x, y = mark.middle
    tried = []
    for distance in DISTANCES:
        for number in range(DIRECTIONS):
            angle = 2 * math.pi * number / DIRECTIONS
            left = x + math.cos(angle) * (distance + width / 2) - width / 2
            top = y + math.sin(angle) * (distance + height / 2) - height / 2
            box = Box(left, top, left + width, top + height)
            end = box.nearest(x, y)
            points = [(x + (end[0] - x) * step / STEPS, y + (end[1] - y) * step / STEPS) for step in range(1, STEPS)]
            line = tuple(Box(a - 1, b - 1, a + 1, b + 1) for a, b in points)
            tried.append(_Label(box, line, math.dist((x, y), end) + (number % 4 != 0) + 2 * (number != 0)))
    return tried
