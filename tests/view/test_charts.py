"""Charts: where lines, bands, episodes and labels lie, by hand; what is shown on hover; which values are left out."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest

from ringside.text import duration
from ringside.view.html.charts import MOST_TICKS, POINTS, Axis, ChartMark, Curve, chart, curves, ticks


def curve(x: Any, y: Any, **more: Any) -> Curve:
    return Curve("own", np.array(x, dtype=float), np.array(y, dtype=float), "s0", **more)


def hover(figure: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json">(.*?)</script>', figure)
    assert found
    return dict(json.loads(found[1]))


def labels(figure: str, kind: str) -> list[tuple[str, float, str]]:
    """Side, percent and text of the labels in an axis."""
    found = re.search(rf'<div class="{kind}">(.*?)</div>', figure)
    assert found
    spans = re.findall(r'<span(?: class="end")? style="(\w+):([\d.]+)%">(.*?)</span>', found[1])
    return [(side, float(percent), text) for side, percent, text in spans]


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]), (0, 4, [0, 1, 2, 3, 4]), (0, 10, [0, 2.5, 5, 7.5, 10]),
        (0, 8, [0, 2, 4, 6, 8]), (0.3, 4.1, [1, 2, 3, 4]), (-2, 2, [-2, -1, 0, 1, 2]), (5, 5, [5]), (5, 4, [5]),
        (100, 500, [100, 200, 300, 400, 500]), (0, 18, [0, 5, 10, 15]), (0, 24, [0, 10, 20]),
    ],
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, found: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(found)


def test_ticks_are_as_many_as_asked_for() -> None:
    assert ticks(0, 24, 12) == pytest.approx(range(0, 25, 2))


def test_a_line_goes_from_point_to_point_and_stops_where_nothing_is_known() -> None:
    """From zero to 1.2 times the largest: 5 of 6 is 833 of 1000 units up, 167 from the top."""
    figure = chart("a", "Own time", [curve([10, 11, 12, 13], [5.0, 2.5, math.nan, 0.0])])
    assert '<path class="line s0" d="M0 167l1+416M3 1000"/>' in figure
    assert 'viewBox="0 0 3 1000"' in figure
    assert labels(figure, "y") == [("bottom", pytest.approx(100 * v / 6, abs=0.01), f"{v} s" if v else "0 s") for v in
                                   (0, 2, 4, 6)]  # fmt: skip
    assert labels(figure, "x") == [
        ("left", 0.0, "10"), ("left", 33.33, "11"), ("left", 66.67, "12"), ("left", 100.0, "13"),
    ]  # fmt: skip
    assert figure.count('class="end"') == 1, "the last label ends where the plot does"
    assert "Medians: own: 2.50 s." in figure
    assert hover(figure) == {
        "steps": [10, 11, 12, 13], "series": [{"name": "own", "style": "s0", "text": ["5.00 s", "2.50 s", "–", "0 s"]}],
        "span": [10, 13], "marks": [],
    }  # fmt: skip


def test_one_step_is_a_dash_and_none_an_empty_plot() -> None:
    alone = chart("a", "Own time", [curve([7], [5.0])])
    assert '<path class="line s0" d="M0 500l1+0"/>' in alone
    assert 'viewBox="0 0 1 1000"' in alone
    nothing = chart("a", "Own time", [curve([], [])])
    assert '<path class="line s0" d=""/>' in nothing
    assert hover(nothing)["span"] == [0, 0]
    unknown = chart("a", "Own time", [curve([1, 2], [math.nan, math.nan])])
    assert [text for *_, text in labels(unknown, "y")] == ["0 s", "250 ms", "500 ms", "750 ms", "1 s"]


def test_a_band_is_gone_round_and_dots_are_no_line() -> None:
    ends = {"low": np.array([2.0, 1.0]), "high": np.array([6.0, 6.0])}
    figure = chart("a", "Own time", [curve([0, 1], [5.0, 2.5], **ends)])
    # the axis is that of the line: what of a band lies above it ends at its top
    assert '<path class="band" d="M0 0l1+0l0+833l-1-166Z"/><path class="line s0" d="M0 167l1+416"/>' in figure
    one_end = chart("a", "Own time", [curve([0, 1], [5.0, 2.5], low=np.array([1.0, 1.0]))])
    assert 'class="band"' not in one_end
    dotted = chart("a", "Own time", [curve([0, 1, 2], [5.0, math.nan, 2.5], dots=True)])
    assert '<path class="dots s0" d="M0 167h0M2 583h0"/>' in dotted
    assert '<span class="key s0 dotted">' in dotted
    assert "dotted" not in figure


def test_an_axis_begins_at_zero_unless_all_values_lie_close_together_far_above_it() -> None:
    def shown(*values: float, from_zero: bool = True) -> list[str]:
        figure = chart("a", "Loss", [curve(range(len(values)), values)], text=lambda v: f"{v:g}", from_zero=from_zero)
        return [text for *_, text in labels(figure, "y")]

    # its lowest is more than six tenths of its highest, or not: the axis is 0 to 12 then, else 4 times the room wide
    assert shown(*[5.9] * 50, *[10.0] * 50) == ["0", "5", "10"]
    assert shown(*[6.1] * 50, *[10.0] * 50) == ["6", "8", "10"]
    assert shown(*[5.9] * 50, *[10.0] * 50, from_zero=False) == ["6", "8", "10"]
    assert shown(4.0, 4.0, 4.0) == ["3.6", "3.8", "4", "4.2", "4.4"], "a tenth of it, where nothing moves"
    assert shown(0.0, 0.0) == ["0", "0.25", "0.5", "0.75", "1"]
    # one value far out is cut off: 1.6 times the others at most, and a quarter of what lies between
    assert shown(*[1.0] * 99, 50.0)[-1] == "1.75"


def test_episodes_are_shaded_and_labelled_where_there_is_room() -> None:
    marks = [
        ChartMark(20, 40, "early"),
        ChartMark(70, None, "late"),
        ChartMark(69, 10**9, "before"),
        ChartMark(-5, 0, "none"),
    ]
    figure = chart("a", "Own time", [curve(range(10, 111), np.ones(101))], marks=marks)
    places = [
        (float(x), float(w)) for x, w in re.findall(r'class="episode" x="([\d.]+)" y="0" width="([\d.]+)"', figure)
    ]
    # across it is a unit a step; what has no width is a thousandth of the plot
    assert places == [(10, 20), (60, 40), (59, 41), (0, 0.1)]
    flags = re.findall(r'<span class="flag (\w+)" style="(\w+):([\d.]+)%">(.*?)</span>', figure)
    assert flags == [
        ("left", "left", "10.00", "early"), ("right", "right", "40.00", "late"), ("left", "left", "59.00", "before"),
        ("left", "left", "0.00", "none"),
    ]  # fmt: skip
    assert hover(figure)["marks"] == [[20, 40], [70, None], [69, 10**9], [-5, 0]]


def test_of_many_steps_each_point_is_a_median() -> None:
    fits = chart("a", "Own time", [curve(range(POINTS), np.ones(POINTS))])
    assert len(hover(fits)["steps"]) == POINTS
    assert "median of" not in fits
    y = np.tile([1.0, 9.0, 2.0], POINTS)
    thinned = chart("a", "Own time", [curve(range(3 * POINTS), y, low=y - 1, high=y + 1)], text=lambda v: f"{v:g}")
    assert "Each point is the median of 3 steps." in thinned
    assert hover(thinned)["steps"] == list(range(0, 3 * POINTS, 3))
    assert set(hover(thinned)["series"][0]["text"]) == {"2"}
    more = chart("a", "Own time", [curve(range(POINTS + 1), np.ones(POINTS + 1))])
    assert hover(more)["steps"] == list(range(0, POINTS + 1, 2))


def byte_text(value: float) -> str:
    return f"{value:g} B"


def test_over_sizes_both_axes_are_logarithms() -> None:
    line = curve([10, 1000], [1e-3, 1e-1], low=np.array([1e-4, 1e-2]), high=np.array([1e-2, 1.0]))
    other = Curve("other", np.array([100.0]), np.array([1e-2]), "s1", dots=True)
    figure = curves("a", "Times", [line, other], Axis(byte_text), Axis(duration))
    # 10 to 1000: three decades are labelled, at 0, half and all of the width
    assert labels(figure, "xs") == [("left", 0.0, "10 B"), ("left", 50.0, "100 B"), ("left", 100.0, "1000 B")]
    # up: the band's ends count, 1e-4 to 1, with a twenty-fifth of the four decades below and above
    assert labels(figure, "y") == [
        ("bottom", pytest.approx(100 * (p + 4.16) / 4.32, abs=0.01), text)
        for p, text in ((-4, "100 µs"), (-3, "1 ms"), (-2, "10 ms"), (-1, "100 ms"), (0, "1 s"))
    ]
    # 1e-3 is 1.16 of 4.32 decades up: 269 of 1000, 731 from the top
    assert '<path class="line s0" d="M0 731l1000-462"/>' in figure
    assert '<path class="band s0"' in figure
    assert '<path class="dots s1" d="M500 500h0"/>' in figure
    found = hover(figure)
    assert (found["steps"], found["labels"], found["span"]) == ([0, 500, 1000], ["10 B", "100 B", "1000 B"], [0, 1000])
    assert found["series"][0]["text"] == ["1.00 ms (100 µs to 10.0 ms)", "", "100 ms (10.0 ms to 1.00 s)"]
    assert found["series"][1]["text"] == ["", "10.0 ms", ""]
    assert "Times. own: 100 ms at 1000 B; other: 10.0 ms at 100 B." in figure


def test_an_axis_holds_what_it_must_and_is_labelled_where_it_is_told() -> None:
    x = Axis(byte_text, log=False, low=0.0, marks=(0.0, 2.0, 8.0))
    figure = curves("a", "Times", [curve([4, 8], [1.0, 3.0])], x, Axis(byte_text, log=False))
    assert labels(figure, "xs") == [("left", 0.0, "0 B"), ("left", 25.0, "2 B"), ("left", 100.0, "8 B")]
    # up: from 1 to 3 with a twenty-fifth of 2 on either side, 0.92 to 3.08
    assert labels(figure, "y") == [
        ("bottom", pytest.approx(100 * (v - 0.92) / 2.16, abs=0.01), f"{v:g} B") for v in (1, 2, 3)
    ]
    assert '<path class="line s0" d="M500 963l500-926"/>' in figure
    flat = curves("a", "Times", [curve([4, 8], [2.0, 2.0])], x, Axis(byte_text, log=False))
    assert '<path class="line s0" d="M500 500l500+0"/>' in flat


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1, 10], ["1", "2", "5", "10"]), ([1, 5], ["1", "2", "5"]), ([1, 20], ["1", "2", "5", "10", "20"]),
        ([1, 50], ["1", "3", "10", "30"]), ([1, 99], ["1", "3", "10", "30"]), ([1, 100], ["1", "10", "100"]),
        ([1, 1e4], ["1", "10", "100", "1000", "10000"]), ([1, 1e5], ["1", "100", "10000"]),
        ([1, 1e9], ["1", "100", "10000", "1e+06", "1e+08"]), ([1, 1e10], ["1", "1000", "1e+06", "1e+09"]),
    ],
)  # fmt: skip
def test_decades_have_at_most_five_labels(values: list[float], found: list[str]) -> None:
    figure = curves("a", "Times", [curve(values, [1.0] * len(values), dots=True)], Axis(lambda v: f"{v:g}"),
                    Axis(duration, marks=(1.0,)))  # fmt: skip
    texts = [text for *_, text in labels(figure, "xs")]
    assert texts == found
    assert len(texts) <= MOST_TICKS


def test_a_label_has_no_zeros_that_say_nothing() -> None:
    figure = curves("a", "Times", [curve([1, 2], [1.0, 2.0])], Axis(byte_text, log=False),
                    Axis(lambda v: f"{v:.2f} MB", log=False, marks=(1.0, 1.5, 2.0)))  # fmt: skip
    assert [text for *_, text in labels(figure, "y")] == ["1 MB", "1.50 MB", "2 MB"]
