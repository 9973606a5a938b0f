"""The positions in the report's plots, read back from the SVG."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.report.plots import STYLES, Bar, Point, front, legend_mark, scatter, score_bars, ticks

CIRCLE = 1
"""The style whose mark is a circle, whose position can be read from the SVG."""


def circles(svg: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'<circle[^>]* cx="([\d.]+)" cy="([\d.]+)"', svg)]


def bars(svg: str) -> list[tuple[float, float, float, float]]:
    found = re.findall(r'<line class="bar" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', svg)
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in found]


def test_a_larger_value_lies_further_right_and_higher_up():
    points = [Point(f"v{n}", CIRCLE, x=10.0 * n, y=0.5 + n * n / 50) for n in range(1, 6)]
    places = circles(scatter("plot", "title", "x", "y", points))
    assert len(places) == 5
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    steps = [after[0] - before[0] for before, after in pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 4, abs=0.05)


def test_error_bars_enclose_their_mark_in_proportion():
    point = Point("awq", CIRCLE, x=10, y=0.5, x_interval=(8, 14), y_interval=(0.4, 0.55))
    svg = scatter("plot", "title", "x", "y", [point, Point("fp16", 0, x=30, y=0.6)])
    ((x, y),) = circles(svg)
    wide = [each for each in bars(svg) if abs(each[0] - each[2]) > 8]
    high = [each for each in bars(svg) if abs(each[1] - each[3]) > 8]
    assert [(each[1], each[3]) for each in wide] == [(y, y)]
    assert wide[0][2] - x == pytest.approx(2 * (x - wide[0][0]), abs=0.1)
    assert [(each[0], each[2]) for each in high] == [(x, x)]
    assert high[0][1] - y == pytest.approx(2 * (y - high[0][3]), abs=0.1)


def test_no_interval_draws_no_bar():
    points = [Point("awq", CIRCLE, x=1, y=1), Point("gptq", 2, x=2, y=2, x_interval=(2, 2))]
    assert bars(scatter("plot", "title", "x", "y", points)) == []


def test_the_front_holds_the_points_that_no_other_beats():
    points = [
        Point("fast", 1, x=1, y=0.5),
        Point("beaten", 2, x=2, y=0.4),
        Point("good", 3, x=3, y=0.9),
        Point("as good but slower", 4, x=4, y=0.9),
        Point("out", 5, x=0.5, y=1.0, eligible=False),
    ]
    assert [each.variant for each in front(points)] == ["fast", "good"]


def test_the_front_is_drawn_in_steps_that_only_rise():
    points = [Point(f"v{n}", CIRCLE, x=float(n), y=n / 10) for n in (3, 1, 2)]
    svg = scatter("plot", "title", "x", "y", points)
    (path,) = re.findall(r'<path class="front" d="([^"]+)"', svg)
    heights = [float(each) for each in re.findall(r"V([\d.]+)", path)]
    assert heights == sorted(heights, reverse=True)
    assert heights == [y for _, y in sorted(circles(svg))]


def test_a_bar_is_as_long_as_its_score():
    svg = score_bars("plot", "t", [bar("a", 0.3, 0.6), bar("b", 0.2, 0.25)])
    widths = [float(each) for each in re.findall(r'<rect[^>]* width="([\d.]+)"', svg)]
    grid = [float(each) for each in re.findall(r'<line class="grid" x1="([\d.]+)"', svg)]
    scale = max(grid) - min(grid)
    assert widths == pytest.approx([0.3 * scale, 0.6 * scale, 0.2 * scale, 0.25 * scale], abs=0.05)


def bar(name: str, first: float, second: float) -> Bar:
    score = first + second
    return Bar(name, CIRCLE, (("quality", first), ("latency", second)), score, score - 0.1, score + 0.05, chosen=False)


def test_a_name_can_not_break_out_of_the_drawing():
    svg = scatter("plot", "<t>", "x", "y", [Point("<script>", 1, x=1, y=1), Point('"', 2, x=2, y=2)])
    assert "<script>" not in svg
    assert "&lt;script&gt;" in svg


def test_names_of_neighbors_do_not_cover_one_another():
    points = [Point(f"variant-{n}", n, x=3.7 + n / 1000, y=0.37 + n / 10000) for n in range(STYLES)]
    svg = scatter("plot", "title", "x", "y", [*points, Point("fp16", 0, x=8, y=0.4)])
    heights = sorted(float(y) for y in re.findall(r'<text class="label"[^>]* y="([\d.]+)"[^>]*>variant', svg))
    assert len(heights) == STYLES
    assert min(after - before for before, after in pairwise(heights)) >= 15


def test_every_style_has_its_own_mark():
    marks = {re.sub(r"v\d", "", str(legend_mark(style))) for style in range(STYLES)}
    assert len(marks) == STYLES


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_and_round_and_enclose_the_range(low, span):
    high = low + span
    if high <= low or span < 1e-9 * abs(low):
        return
    found = ticks(low, high)
    step = found[1] - found[0]
    assert found[0] <= low + 1e-6 * span + 1e-9 * abs(low)
    assert found[-1] >= high - 1e-6 * span - 1e-9 * abs(high)
    assert 2 <= len(found) <= 8
    assert step > 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 524, [0, 200, 400, 600]), (3.7, 3.7, None), (0, 0, None)],
)
def test_ticks_of_known_ranges(low, high, expected):
    found = ticks(low, high)
    assert found == expected if expected else found[0] <= low <= high <= found[-1]
