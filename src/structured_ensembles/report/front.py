"""The front: accuracy and calibration against memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from structured_ensembles.common.colours import GREY
from structured_ensembles.report.labels import Label, Point, place_labels
from structured_ensembles.report.style import (
    Seeds,
    add_legend_below,
    choose_styles,
    darken,
    describe_bars,
    plot_seeds,
    require,
    summarise_seeds,
    tidy_axis,
)


@dataclass(frozen=True)
class FrontPoint:
    """Method at one size. memory: in networks; accuracy and ece as shares, nll in nats, each one value per seed."""

    method: str
    label: str  # distinguishes it from the method's other points, as "N=3" or "p=0.8"
    memory: float
    accuracy: Sequence[float]
    nll: Sequence[float]
    ece: Sequence[float]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.memory) and self.memory > 0):
            raise ValueError(f"memory of {self.method} {self.label} is {self.memory}; it must be a positive number")


def draw_front(points: Sequence[FrontPoint], memory: str = "parameters") -> Figure:
    """Draw accuracy, NLL and ECE against `memory`, the points of a method joined from small to large."""
    panels = {
        "accuracy (%)": [summarise_seeds(point.accuracy, 100) for point in points],
        "NLL (nats)": [summarise_seeds(point.nll) for point in points],
        "ECE (%)": [summarise_seeds(point.ece, 100) for point in points],
    }
    all_seeds = [seeds for panel in panels.values() for seeds in panel]
    require(any(all_seeds), "points", points)
    figure = Figure(figsize=(11, 4), layout="constrained")
    style = choose_styles(point.method for point in points)
    axes = dict(zip(panels, figure.subplots(1, len(panels)), strict=True))
    for title, axis in axes.items():
        for method in style:
            both = zip(points, panels[title], strict=True)
            line = [(point.memory, seeds) for point, seeds in both if point.method == method and seeds is not None]
            plot_seeds(axis, method, style[method], sorted(line))  # empty lines too: the first panel has the legend
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(f"{memory}, in networks")
        axis.margins(y=0.12)
        if not any(panels[title]):
            axis.set_yticks([])
            axis.text(
                0.5,
                0.5,
                "not known",
                transform=axis.transAxes,
                ha="center",
                fontsize=8,
                color=GREY,
                backgroundcolor="white",
            )
        _memory_axis(axis, [point.memory for point in points])
        tidy_axis(axis, "both")
    add_legend_below(figure, axes["accuracy (%)"], describe_bars(all_seeds))
    figure.draw_without_rendering()  # lays out everything, so that labels find free room
    for title, axis in axes.items():
        known = [(point, seeds) for point, seeds in zip(points, panels[title], strict=True) if seeds is not None]
        labels = [
            Label(point.memory, seeds.mean, point.label, darken(style[point.method][0])) for point, seeds in known
        ]
        place_labels(axis, labels, _list_lines(known))
    return figure


def _memory_axis(axis: Axes, memory: Sequence[float]) -> None:
    """Make the x axis logarithmic, with a line at one network."""
    low, high = min(1.0, *memory), max(1.0, *memory)
    padding = max(1.3, (high / low) ** 0.12)
    axis.axvline(1, color=GREY, linewidth=1, linestyle=":", zorder=1)
    axis.set_xscale("log")
    axis.set_xlim(low / padding, high * padding)
    decades = math.log10(high / low)
    if decades < 0.6:
        axis.xaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    else:
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _list_lines(known: Sequence[tuple[FrontPoint, Seeds]]) -> list[list[Point]]:
    """Return the lines drawn in a panel: a bar per point, and one through the points of each method."""
    methods: dict[str, list[Point]] = {}
    for point, seeds in sorted(known, key=lambda pair: pair[0].memory):
        methods.setdefault(point.method, []).append((point.memory, seeds.mean))
    return [[(point.memory, seeds.low), (point.memory, seeds.high)] for point, seeds in known] + list(methods.values())
