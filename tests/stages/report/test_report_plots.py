"""The positions in the report's plots, read back from the SVG."""

from __future__ import annotations

import html
import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.report.labels import Box
from stages.report.plots import (
    CHARACTER_WIDTH,
    HEIGHT,
    MARK,
    SHAPES,
    SIGNS,
    WIDTH,
    Bar,
    Point,
    Style,
    decades,
    front,
    legend_mark,
    scatter,
    score_bars,
    ticks,
)

STYLE = Style(1)


def marks(svg: str) -> list[tuple[float, float]]:
    """The places of the marks; the first of the points is drawn last, on top."""
    found = re.findall(r'<g class="mark[^>]* transform="translate\(([\d.]+) ([\d.]+)\)"', svg)
    return [(float(x), float(y)) for x, y in reversed(found)]


def labels(svg: str) -> dict[str, Box]:
    """Where the names are written, in a font of the given width."""
    found = re.findall(r'<text class="label[^"]*" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([^<]+)<', svg)
    boxes = {}
    for x, y, anchor, text in found:
        width = CHARACTER_WIDTH * len(html.unescape(text))
        left = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
        boxes[text] = Box(left, float(y) - 11, left + width, float(y) + 3)
    return boxes


def bars(svg: str) -> list[tuple[float, float, float, float]]:
    found = re.findall(r'<line class="bar" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', svg)
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in found]


def plotted(points: list[Point]) -> str:
    """The plot for a wide screen."""
    return str(scatter("plot", "<title>", "x", "y", points)[0])


def test_a_larger_value_lies_further_right_and_higher_up():
    places = marks(plotted([Point(f"v{n}", STYLE, x=10.0 * n, y=0.5 + n * n / 50) for n in range(1, 6)]))
    assert len(places) == 5
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    steps = [after[0] - before[0] for before, after in pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 4, abs=0.05)


def test_costs_of_different_magnitudes_are_as_far_apart_as_their_ratios():
    places = marks(plotted([Point(f"v{n}", STYLE, x=0.03 * 4**n, y=1.0) for n in range(4)]))
    steps = [after[0] - before[0] for before, after in pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.05)


def test_error_bars_enclose_their_mark_in_proportion():
    point = Point("awq", STYLE, x=10, y=0.5, x_interval=(8, 14), y_interval=(0.4, 0.55))
    svg = plotted([point, Point("fp16", Style(), x=30, y=0.7)])
    x, y = marks(svg)[0]
    wide = [each for each in bars(svg) if abs(each[0] - each[2]) > 8]
    high = [each for each in bars(svg) if abs(each[1] - each[3]) > 8]
    assert [(each[1], each[3]) for each in wide] == [(y, y)]
    assert wide[0][2] - x == pytest.approx(2 * (x - wide[0][0]), abs=0.1)
    assert [(each[0], each[2]) for each in high] == [(x, x)]
    assert max(high[0][1::2]) - y == pytest.approx(2 * (y - min(high[0][1::2])), abs=0.1)


def test_no_interval_draws_no_bar():
    points = [Point("awq", STYLE, x=1, y=1), Point("gptq", Style(2), x=2, y=2, x_interval=(2, 2))]
    assert bars(plotted(points)) == []


def test_an_interval_of_great_noise_does_not_squeeze_the_marks_together():
    points = [Point("a", STYLE, x=1, y=1, x_interval=(0.1, 90)), Point("b", STYLE, x=2, y=2, y_interval=(-70, 80))]
    (left, low), (right, high) = marks(plotted(points))
    assert right - left > 200
    assert low - high > 80


def test_an_excluded_point_far_above_the_others_is_drawn_at_the_edge_and_says_how_far():
    points = [Point("a", STYLE, x=1, y=0.2), Point("b", STYLE, x=2, y=1), Point("c", STYLE, x=3, y=44, eligible=False)]
    wide, narrow = scatter("plot", "title", "x", "y", points)
    (_, first), (_, second), (_, third) = marks(wide)
    assert third < second < first
    assert first - second > 100
    assert set(labels(wide)) == {"a", "b", "c: 44.0% ↑"}
    assert set(labels(narrow)) == {"1", "2", "3: 44.0% ↑"}


def test_the_front_holds_the_points_that_no_other_beats():
    points = [
        Point("cheap", Style(1), x=1, y=0.5),
        Point("beaten", Style(2), x=2, y=0.6),
        Point("good", Style(3), x=3, y=0.1),
        Point("as good but dearer", Style(4), x=4, y=0.1),
        Point("out", Style(5), x=0.5, y=0.0, eligible=False),
    ]
    assert [each.variant for each in front(points)] == ["cheap", "good"]


def test_the_front_is_drawn_in_steps_that_only_fall():
    svg = plotted([Point(f"v{n}", STYLE, x=float(n), y=1 - n / 10) for n in (3, 1, 2)])
    found = re.findall(r'<line class="front" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', svg)
    lines = [tuple(map(float, each)) for each in found]
    assert [(x2, y2) for x1, _, x2, y2 in lines if x1 == x2] == sorted(marks(svg))
    assert all(y1 < y2 for x1, y1, x2, y2 in lines if x1 == x2)
    assert all(x1 < x2 for x1, y1, x2, y2 in lines if y1 == y2)


def test_a_bar_is_as_long_as_its_score():
    for svg in score_bars("plot", "t", [bar("a", 0.3, 0.6), bar("b", 0.2, 0.25)]):
        widths = [float(each) for each in re.findall(r'<rect[^>]* width="([\d.]+)"', svg)]
        grid = [float(each) for each in re.findall(r'<line class="grid" x1="([\d.]+)"', svg)]
        scale = max(grid) - min(grid)
        assert widths == pytest.approx([0.3 * scale, 0.6 * scale, 0.2 * scale, 0.25 * scale], abs=0.05)


def bar(name: str, first: float, second: float) -> Bar:
    score = first + second
    return Bar(name, STYLE, (("quality", first), ("latency", second)), score, score - 0.1, score + 0.05, chosen=False)


def test_a_name_can_not_break_out_of_the_drawing():
    svg = plotted([Point("<script>", Style(1), x=1, y=1), Point('"', Style(2), x=2, y=2)])
    assert "<script>" not in svg
    assert "&lt;script&gt;" in svg


NAMES = [
    f"{variant}{recipe}" for variant in ("fp16", "fp8-block", "w4a16") for recipe in ("", "+ngram", "+kv-fp8", "+tp1")
]
NUMBERS = st.floats(0.01, 1)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.booleans()), min_size=12, max_size=12),
    st.sampled_from((1.0, 0.1, 0.0)),
    st.integers(0, 11),
)
def test_twelve_labels_neither_cover_anything_nor_leave_the_plot(drawn, spread, chosen):
    points = [
        Point(
            name,
            Style(number // 4, number % 4),
            x=1 + spread * x,
            y=1 + spread * y,
            x_interval=(1 + spread * x - dx, 1 + spread * x + dx),
            y_interval=(1 + spread * y - dy, 1 + spread * y + dy),
            chosen=number == chosen,
            eligible=eligible or number == chosen,
        )
        for number, (name, (x, y, dx, dy, eligible)) in enumerate(zip(NAMES, drawn, strict=True))
    ]
    for svg, width in zip(scatter("plot", "title", "x", "y", points), (2 * WIDTH, WIDTH), strict=True):
        boxes = labels(svg)
        assert len(boxes) == 12
        assert not [(a, b) for (a, one), (b, other) in combinations(boxes.items(), 2) if one.overlaps(other)]
        assert not [name for name, box in boxes.items() if not Box(0, 0, width, HEIGHT).encloses(box)]
        places = [Box(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in marks(svg)]
        assert not [name for name, box in boxes.items() if any(box.overlaps(place) for place in places)]


def test_a_dozen_formats_and_recipes_of_one_format_are_told_apart_without_color():
    styles = [*(Style(number) for number in range(len(SHAPES))), *(Style(0, number) for number in range(1, len(SIGNS)))]
    drawings = {re.sub(r"v\d", "", str(legend_mark(style))) for style in styles}
    assert len(SHAPES) == 12
    assert len(drawings) == len(styles)


@given(st.floats(1e-4, 1e4), st.floats(1.01, 1e4))
def test_decades_enclose_the_range(low, ratio):
    found = decades(low, low * ratio)
    assert found[0] <= low
    assert found[-1] >= low * ratio
    assert found == sorted(found)
    assert found[1] > low


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_and_round_and_enclose_the_range(low, span):
    high = low + span
    if high <= low or span < 1e-9 * abs(low):
        return
    found = ticks(low, high)
    step = found[1] - found[0]
    assert found[0] <= low + 1e-6 * span + 1e-9 * abs(low)
    assert found[-1] >= high - 1e-6 * span - 1e-9 * abs(high)
    assert 2 <= len(found) <= 11
    assert step > 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 524, [0, 100, 200, 300, 400, 500, 600]), (3.7, 3.7, None), (0, 0, None)],
)
def test_ticks_of_known_ranges(low, high, expected):
    found = ticks(low, high)
    assert found == expected if expected else found[0] <= low <= high <= found[-1]
