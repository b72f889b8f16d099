"""Plots of cells: horizontal bars, squares of values, strips of kept channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from structured_ensembles.report.style import Style
from structured_ensembles.report.web.axes import Axis
from structured_ensembles.report.web.plots import (
    BOTTOM,
    LETTER,
    RIGHT,
    TOP,
    WIDTH,
    Panel,
    draw_line,
    draw_svg,
    ticks_below,
)
from structured_ensembles.report.web.svg import colour_class, element


@dataclass(frozen=True)
class Bar:
    """Stretch of a horizontal bar, in data coordinates. style: None for the free rest."""

    start: float
    end: float
    tip: str
    style: Style | None = None
    shade: float | None = None  # instead of a colour: 0 is pale, 1 dark


def plot_bars(
    title: str, rows: Sequence[tuple[str, Sequence[Bar]]], across: Axis, guides: Sequence[float] = ()
) -> Panel:
    """Plot a row of stretches for each name, the name above its row so that no length of it is cut."""
    left, step, thickness = 8.0, 34.0, 13.0
    height = TOP + step * len(rows) + BOTTOM

    def place(value: float) -> float:
        return left + (WIDTH - left - RIGHT) * min(1.0, max(0.0, across.share(value)))

    shapes = [
        element("line", x1=place(value), x2=place(value), y1=TOP, y2=height - BOTTOM + 4, class_="grid")
        for value, _ in across.ticks
    ]
    for row, (name, bars) in enumerate(rows):
        top = TOP + step * row
        shapes.append(element("text", shorten(name, 52), x=left, y=top + 11, class_="row"))
        for bar in bars:
            shown = {"class_": "bar free"} if bar.style is None and bar.shade is None else {"class_": "bar"}
            if bar.style is not None:
                shown = {"class_": f"bar {colour_class(bar.style)}", "fill": "currentColor"}
            if bar.shade is not None:
                shown = {"class_": "bar shade", "style": f"--share:{100 * bar.shade:.0f}%"}
            width = max(place(bar.end) - place(bar.start), 0.75)
            shapes.append(
                element(
                    "rect", x=place(bar.start), y=top + 16, width=width, height=thickness, data_tip=bar.tip, **shown
                )
            )
    shapes += [draw_line([(place(guide), TOP), (place(guide), height - BOTTOM)], class_="guide") for guide in guides]
    shapes += ticks_below(across, [(place(value), label) for value, label in across.ticks], height)
    return Panel(title, draw_svg(height, title, *shapes))


@dataclass(frozen=True)
class Cell:
    """Cell of a grid: its text, its shade from 0 (pale) to 1 (dark), and what is said of it."""

    text: str
    shade: float
    tip: str


def plot_grid(title: str, rows: Sequence[Sequence[Cell | None]], across: str, down: str, names: Sequence[str]) -> Panel:
    """Plot a square of cells; `names` of rows and columns alike. Texts are left out where they do not fit."""
    number = max(1, len(names))
    left, top = 30.0, 34.0
    size = min((WIDTH - left - 6) / number, 46.0)
    height = top + size * number + 8
    shapes = [
        element("text", across, x=left + size * number / 2, y=12, class_="axis", text_anchor="middle"),
        element(
            "text",
            down,
            x=10,
            y=top + size * number / 2,
            class_="axis",
            text_anchor="middle",
            transform=f"rotate(-90 10 {top + size * number / 2:.1f})",
        ),
    ]
    every = max(1, math.ceil(14 / size))
    for index, name in list(enumerate(names))[::every]:
        middle = size * (index + 0.5)
        shapes.append(element("text", name, x=left + middle, y=top - 6, class_="tick", text_anchor="middle"))
        shapes.append(element("text", name, x=left - 4, y=top + middle + 4, class_="tick", text_anchor="end"))
    for row, cells in enumerate(rows):
        for column, cell in enumerate(cells):
            if cell is None:
                continue
            x, y = left + size * column, top + size * row
            shade = min(1.0, max(0.0, cell.shade))
            shapes.append(
                element(
                    "rect", x=x + 0.5, y=y + 0.5, width=size - 1, height=size - 1, class_="shade",
                    style=f"--share:{100 * shade:.0f}%", data_tip=cell.tip,
                )
            )  # fmt: skip
            if len(cell.text) * LETTER <= size:
                ground = "on-dark" if shade > DARK else "on-pale"
                shapes.append(
                    element("text", cell.text, x=x + size / 2, y=y + size / 2 + 4, class_=ground, text_anchor="middle")
                )
    return Panel(title, draw_svg(height, title, *shapes))


DARK = 0.65  # shade from which a text on it is of the other colour; tests compute the contrast in both themes


def plot_strips(title: str, rows: Sequence[tuple[Sequence[int], str]], size: int) -> Panel:
    """Plot a strip of `size` cells for each row, dark at the listed ones; each row with its text."""
    height = 13.0 * len(rows) + 2
    width = (WIDTH - 4) / size
    gap = 0.6 if width > 3 else 0.0
    shapes = []
    for row, (kept, tip) in enumerate(rows):
        top = 1 + 13 * row
        stretches = [(channel, channel) for channel in kept] if gap else _list_stretches(kept)
        lengths = [(first, width * (last - first + 1) - gap) for first, last in stretches]
        outline = "".join(f"M{2 + width * first:.2f} {top}h{length:.2f}v11h-{length:.2f}z" for first, length in lengths)
        shapes.append(element("rect", x=2, y=top, width=WIDTH - 4, height=11, class_="shade", style="--share:0%"))
        shapes.append(element("path", d=outline, class_="shade", style="--share:100%"))
        shapes.append(element("rect", x=2, y=top, width=WIDTH - 4, height=11, class_="cover", data_tip=tip))
    return Panel(title, draw_svg(height, title, *shapes))


def _list_stretches(kept: Sequence[int]) -> list[tuple[int, int]]:
    """Join neighbours to (first, last), so that a wide layer needs few shapes."""
    stretches: list[tuple[int, int]] = []
    for channel in sorted(kept):
        if stretches and stretches[-1][1] == channel - 1:
            stretches[-1] = (stretches[-1][0], channel)
        else:
            stretches.append((channel, channel))
    return stretches


def shorten(text: str, letters: int) -> str:
    """Cut a text in the middle, as layers' names differ at both ends."""
    half = letters // 2
    return text if len(text) <= letters else f"{text[:half]}…{text[-half + 1 :]}"
