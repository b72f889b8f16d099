"""What memory buys: accuracy and calibration of every method at every size."""

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
    darker,
    legend_below,
    over_seeds,
    plot_seeds,
    require,
    seeds_note,
    styles,
    tidy,
)


@dataclass(frozen=True)
class FrontPoint:
    """A method at one size. memory: in networks; accuracy and ece as shares, nll in nats, each one value per seed."""

    method: str
    label: str  # what tells it from the method's other points, as "N=3" or "p=0.8"
    memory: float
    accuracy: Sequence[float]
    nll: Sequence[float]
    ece: Sequence[float]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.memory) and self.memory > 0):
            raise ValueError(f"memory of {self.method} {self.label} is {self.memory}; it must be a positive number")


def front(points: Sequence[FrontPoint], memory: str = "parameters") -> Figure:
    """What memory buys: accuracy, NLL and ECE against `memory`, the points of a method joined from small to large."""
    panels = {
        "accuracy (%)": [over_seeds(point.accuracy, 100) for point in points],
        "NLL (nats)": [over_seeds(point.nll) for point in points],
        "ECE (%)": [over_seeds(point.ece, 100) for point in points],
    }
    every = [own for panel in panels.values() for own in panel]
    require(any(every), "points", points)
    figure = Figure(figsize=(11, 4), layout="constrained")
    style = styles(point.method for point in points)
    axes = dict(zip(panels, figure.subplots(1, len(panels)), strict=True))
    for title, axis in axes.items():
        for method in style:
            both = zip(points, panels[title], strict=True)
            line = [(point.memory, own) for point, own in both if point.method == method and own is not None]
            plot_seeds(axis, method, style[method], sorted(line))  # also an empty one: the first panel has the legend
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
        tidy(axis, "both")
    legend_below(figure, axes["accuracy (%)"], seeds_note(every))
    figure.draw_without_rendering()  # lays everything out; labels go where there is room
    for title, axis in axes.items():
        known = [(point, own) for point, own in zip(points, panels[title], strict=True) if own is not None]
        labels = [Label(point.memory, own.mean, point.label, darker(style[point.method][0])) for point, own in known]
        place_labels(axis, labels, _drawn(known))
    return figure


def _memory_axis(axis: Axes, memory: Sequence[float]) -> None:
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


def _drawn(known: Sequence[tuple[FrontPoint, Seeds]]) -> list[list[Point]]:
    """The lines of a panel: a bar per point, and one through the points of each method."""
    methods: dict[str, list[Point]] = {}
    for point, own in sorted(known, key=lambda pair: pair[0].memory):
        methods.setdefault(point.method, []).append((point.memory, own.mean))
    return [[(point.memory, own.low), (point.memory, own.high)] for point, own in known] + list(methods.values())
