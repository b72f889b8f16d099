"""Plots: marks at their values, round ticks, labels that touch nothing, texts escaped."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structured_ensembles.report.style import STYLE
from structured_ensembles.report.web.axes import Axis, fit_axis, round_ticks
from structured_ensembles.report.web.grids import Bar, Cell, plot_bars, plot_grid, plot_strips
from structured_ensembles.report.web.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Mark,
    Series,
    plot_lines,
    thin_marks,
)

LINEAR = Axis("x", 0, 10, round_ticks(0, 10))


def marks_of(svg: str) -> list[tuple[float, float, str]]:
    """Return (x, y, tip) of all marks."""
    return [
        (float(one.get("data-x", "nan")), float(one.get("data-y", "nan")), one.get("data-tip", ""))
        for one in ElementTree.fromstring(svg).iter()
        if "mark" in (one.get("class") or "").split()
    ]


def test_marks_lie_at_their_values() -> None:
    up = Axis("y", 1, 100, (), "log")
    marks = [Mark(0, 1, "low"), Mark(5, 10, "middle"), Mark(10, 100, "high")]
    shown = marks_of(plot_lines("", [Series("a", STYLE["deep"], marks)], LINEAR, up).svg)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    expected = [(LEFT, bottom, "low"), ((LEFT + right) / 2, (bottom + TOP) / 2, "middle"), (right, TOP, "high")]
    assert [text for *_, text in shown] == [text for *_, text in expected]
    for (x, y, _), (across, down, _) in zip(shown, expected, strict=True):
        assert (x, y) == pytest.approx((across, down), abs=0.01)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_few_and_inside(low: float, span: float) -> None:
    ticks = round_ticks(low, low + span)
    values = [value for value, _ in ticks]
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-6 * span <= value <= low + span + 1e-6 * span for value in values)
    step = values[1] - values[0]
    digit = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(digit - round_digit) for round_digit in (1, 2, 5, 10)) < 1e-3
    assert len({label for _, label in ticks}) == len(ticks)


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=9))
def test_fitted_axes_hold_all_values(values: list[float]) -> None:
    for kind in ("linear", "log", "symlog"):
        axis = fit_axis("", values, kind=kind)
        assert all(0 <= axis.share(value) <= 1 for value in values)
        assert len(axis.ticks) >= 2


def test_texts_are_escaped_in_every_plot() -> None:
    evil = '"><script>alert(1)</script>\x00'
    bars = [(evil, [Bar(0, 5, evil, STYLE["deep"])])]
    plots = [
        plot_lines(evil, [Series(evil, STYLE["deep"], [Mark(1, 1, evil, evil)])], fit_axis(evil, [1]), LINEAR),
        plot_bars(evil, bars, LINEAR),
        plot_grid(evil, [[Cell(evil, 0.5, evil)]], evil, evil, [evil]),
        plot_strips(evil, [((0, 2), evil)], 4),
    ]
    for plot in plots:
        tree = ElementTree.fromstring(plot.svg)
        assert not [one for one in tree.iter() if "script" in one.tag]
        assert any(one.get("data-tip", "").startswith('"><script>alert(1)</script>\\x00') for one in tree.iter())


def test_strips_show_exactly_the_kept_channels() -> None:
    for size in (8, 600):  # single cells, and stretches of neighbours
        kept = (0, 1, 5, size - 1)
        svg = plot_strips("", [(kept, "tip")], size).svg
        outline = next(one.get("d", "") for one in ElementTree.fromstring(svg).iter() if one.tag == "path")
        width = (WIDTH - 4) / size
        covered = set()
        for start, length in re.findall(r"M([\d.]+) 1h([\d.]+)", outline):
            first = round((float(start) - 2) / width)
            covered |= set(range(first, first + max(1, round(float(length) / width))))
        assert covered == set(kept)


def test_long_lines_keep_their_ends_pointable() -> None:
    marks = [Mark(number, number, f"{number}") for number in range(1000)]
    thinned = thin_marks(marks, 50)
    tips = [mark.tip for mark in thinned if mark.tip]
    assert len(thinned) == 1000
    assert len(tips) == 50
    assert (tips[0], tips[-1]) == ("0", "999")
