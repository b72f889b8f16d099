"""Plots as inline SVG: lines with points, bars, grids. Every mark has a text that page.js shows when pointed at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from markupsafe import Markup

from structured_ensembles.report.style import Style
from structured_ensembles.report.web.axes import Axis, fit_axis
from structured_ensembles.report.web.svg import colour_class, dashes, element, marker

WIDTH, HEIGHT = 360.0, 250.0  # of a panel, which a phone shows at its full width
LEFT, RIGHT, TOP, BOTTOM = 48.0, 14.0, 10.0, 38.0  # margins for ticks and titles
LETTER = 8.5  # width of a letter, the broader ones of common fonts, such as those of "N=5"
Point = tuple[float, float]
MAX_MARKS = 60  # of a line that can be pointed at


@dataclass(frozen=True)
class Mark:
    """Point of a line. tip: shown when pointed at. label: beside the point, where there is room."""

    x: float
    y: float
    tip: str
    label: str = ""
    low: float | None = None  # ends of a bar over seeds
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Line through points. markers: drawn at every point, not only where one points. filled: the area below."""

    name: str
    style: Style
    marks: Sequence[Mark]
    markers: bool = True
    filled: bool = False


@dataclass(frozen=True)
class Guide:
    """Line for reference from (x, y) to (x, y), in data coordinates."""

    start: Point
    end: Point


@dataclass(frozen=True)
class Panel:
    """Plot with the title above it."""

    title: str
    svg: Markup


@dataclass(frozen=True)
class Chart:
    """Panels that share a legend and a caption. legend: (name, style); "" as the marker's letter is a plain line."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    legend: tuple[tuple[str, Style], ...] = ()
    broad: bool = False

    @property
    def keys(self) -> list[tuple[str, Markup]]:
        """Return the names of the legend with their drawn keys."""
        return [(name, draw_key(style)) for name, style in self.legend]


@dataclass
class _Room:
    """Rectangles (left, top, right, bottom) that labels must not cover."""

    boxes: list[tuple[float, float, float, float]] = field(default_factory=list)

    def take_if_free(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = box
        inside = left >= LEFT and right <= WIDTH - RIGHT and top >= TOP - 8 and bottom <= HEIGHT - BOTTOM
        if not inside or any(
            left < other[2] and right > other[0] and top < other[3] and bottom > other[1] for other in self.boxes
        ):
            return False
        self.boxes.append(box)
        return True


def plot_lines(title: str, series: Sequence[Series], across: Axis, up: Axis, guides: Sequence[Guide] = ()) -> Panel:
    """Plot lines with points."""

    def place(x: float, y: float) -> Point:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * across.share(x),
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up.share(y),
        )

    shapes = [_frame(across, up)]
    shapes += [draw_line([place(*guide.start), place(*guide.end)], class_="guide") for guide in guides]
    room = _Room()
    labels = []
    for line in series:
        points = [place(mark.x, mark.y) for mark in line.marks]
        room.boxes += [(x - 5, y - 5, x + 5, y + 5) for x, y in points if line.markers]
        room.boxes += [(x - 1, y - 1, x + 1, y + 1) for x, y in _along(points)]
        ends = [_ends(mark, place) for mark in line.marks]
        room.boxes += [(x - 1, y - 1, x + 1, y + 1) for bar in ends for x, y in _along(bar)]
        shapes.append(_series(line, points, ends))
    for line in series:
        for mark in line.marks:
            labels += _label(mark.label, *place(mark.x, mark.y), room)
    svg = draw_svg(HEIGHT, title, *shapes, *labels)
    return Panel(title, svg)


def fit_upward_axis(title: str, series: Sequence[Series]) -> Axis:
    """Fit the upward axis to all points and the bars over their seeds."""
    marks: list[Mark] = [mark for line in series for mark in line.marks]
    values = [value for mark in marks for value in (mark.y, mark.low, mark.high) if value is not None]
    return fit_axis(title, values)


def thin_marks(marks: Sequence[Mark], number: int = MAX_MARKS) -> list[Mark]:
    """Drop the tips of points so that at most `number` can be pointed at, the first and the last among them."""
    if len(marks) <= number:
        return list(marks)
    pointed = {round(index * (len(marks) - 1) / (number - 1)) for index in range(number)}
    return [mark if index in pointed else replace(mark, tip="") for index, mark in enumerate(marks)]


def draw_key(style: Style) -> Markup:
    """Draw the key of a legend: a piece of the line with its marker."""
    shapes = [
        draw_line([(1, 7), (27, 7)], stroke="currentColor", stroke_width=1.6, stroke_dasharray=dashes(style)),
        *([marker(style[1], 14, 7, fill="currentColor")] if style[1] else []),
    ]
    return element(
        "svg", *shapes, class_=colour_class(style), viewBox="0 0 28 14", width=28, height=14, aria_hidden="true"
    )


def draw_svg(height: float, summary: str, *shapes: Markup) -> Markup:
    """Draw a plot of the panel's width; it can be focused, so that arrow keys go through its marks."""
    return element(
        "svg", *shapes, viewBox=f"0 0 {WIDTH:g} {height:g}", role="img", aria_label=summary, tabindex=0, class_="plot"
    )


def _frame(across: Axis, up: Axis) -> Markup:
    """Draw the axes with their ticks, the titles, and the grid."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    shapes = []
    for value, label in up.ticks:
        y = bottom - (bottom - TOP) * up.share(value)
        if TOP - 1 <= y <= bottom + 1:
            shapes.append(element("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid"))
            shapes.append(element("text", label, x=LEFT - 5, y=y + 4, class_="tick", text_anchor="end"))
    places = [(LEFT + (right - LEFT) * across.share(value), label) for value, label in across.ticks]
    places = [(x, label) for x, label in places if LEFT - 1 <= x <= right + 1]
    shapes += ticks_below(across, places, HEIGHT)
    shapes.append(draw_line([(LEFT, TOP), (LEFT, bottom), (right, bottom)], class_="frame"))
    return element("g", *shapes)


def ticks_below(axis: Axis, places: Sequence[tuple[float, str]], height: float) -> list[Markup]:
    """Draw the labels of ticks below a plot, without those that would touch the one before; and the title."""
    shapes, end = [], -math.inf
    for x, label in places:
        half = LETTER * len(label) / 2
        middle = min(max(x, half + 1), WIDTH - half - 1)
        if middle - half > end + 4:
            shapes.append(element("text", label, x=middle, y=height - 22, class_="tick", text_anchor="middle"))
            end = middle + half
    shapes.append(element("text", axis.title, x=WIDTH / 2 + 12, y=height - 5, class_="axis", text_anchor="middle"))
    return shapes


def _series(series: Series, points: Sequence[Point], ends: Sequence[tuple[Point, ...]]) -> Markup:
    """Draw a line, the bars over seeds, and a mark for every point that has a tip."""
    shapes = []
    if series.filled and points:
        floor = HEIGHT - BOTTOM
        outline = [(points[0][0], floor), *points, (points[-1][0], floor)]
        shapes.append(draw_line(outline, fill="currentColor", fill_opacity=0.14, stroke="none"))
    if len(points) > 1:
        shapes.append(draw_line(points, stroke="currentColor", stroke_dasharray=dashes(series.style), class_="line"))
    shapes += [draw_line(list(bar), stroke="currentColor", class_="whisker") for bar in ends if bar]
    lonely = len(points) == 1
    for (x, y), mark in zip(points, series.marks, strict=True):
        if mark.tip:
            kind, shown = (series.style[1], "mark") if series.markers or lonely else ("o", "mark quiet")
            shapes.append(marker(kind, x, y, class_=shown, data_tip=mark.tip, data_x=x, data_y=y))
    return element("g", *shapes, class_=colour_class(series.style))


def _ends(mark: Mark, place: Callable[[float, float], Point]) -> tuple[Point, ...]:
    """Return the ends of the bar over seeds; none where there is one value."""
    if mark.low is None or mark.high is None or mark.low == mark.high:
        return ()
    return place(mark.x, mark.low), place(mark.x, mark.high)


def _label(text: str, x: float, y: float, room: _Room) -> list[Markup]:
    """Write a label beside its point, at the first side where it covers nothing; none if there is no such side."""
    if not text:
        return []
    width = LETTER * len(text)
    for dx, dy, anchor in ((7, 4, "start"), (-7, 4, "end"), (0, -8, "middle"), (0, 17, "middle")):
        left = x + dx - {"start": 0, "end": width, "middle": width / 2}[anchor]
        if room.take_if_free((left, y + dy - 10, left + width, y + dy + 2)):
            return [element("text", text, x=x + dx, y=y + dy, class_="label", text_anchor=anchor)]
    return []


def _along(points: Sequence[Point], step: float = 5.0) -> list[Point]:
    """Return points along a line, `step` apart."""
    along = []
    for (left, high), (right, low) in pairwise(points):
        count = max(1, int(math.hypot(right - left, low - high) / step))
        along += [(left + (right - left) * k / count, high + (low - high) * k / count) for k in range(1, count)]
    return along


def draw_line(points: Sequence[Point], **attributes: object) -> Markup:
    """Draw a line through points."""
    outline = "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
    return element("path", d=outline, **{"fill": "none", **attributes})
