"""Shared style of charts: colours that colour-blind readers can distinguish, a style per method, legends, frames."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from statistics import fmean
from textwrap import fill
from typing import Literal, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from structured_ensembles.common.colours import GREY, PALE

Style = tuple[str, str]  # colour, marker

# Okabe and Ito's colours, with Paul Tol's wine and indigo, and a violet, for their yellow, which is invisible on white.
STYLE: dict[str, Style] = {
    "single": ("#000000", "s"),
    "deep": ("#D55E00", "^"),
    "narrow": ("#E69F00", "v"),
    "snapshot": ("#009E73", "D"),
    "batch-ensemble": ("#CC79A7", "P"),
    "mc-dropout": ("#56B4E9", "X"),
    "structured": ("#0072B2", "o"),
    "random": ("#882255", "<"),
    "magnitude": ("#332288", ">"),
    "prune-and-tune": ("#964BFF", "8"),
    "taught": ("#664422", "*"),
}
OTHER_MARKERS = "phdH12"  # for other names; none of them is above
LINES = ("-", "--", "-.", ":")


def choose_styles(names: Iterable[str]) -> dict[str, Style]:
    """Choose a colour and a marker for each name: a method's, if the name is or begins with it, as "deep ensemble".

    Several names of one method share its colour, and the first of them has its marker. Other names get the least used
    colours.
    """
    chosen: dict[str, Style] = {}
    names = list(dict.fromkeys(names))
    spare = cycle(OTHER_MARKERS)
    for name in sorted(names, key=lambda name: name not in STYLE):  # a method's own name comes first
        method_style = STYLE.get(_method(name))
        if method_style is not None:
            chosen[name] = method_style if method_style not in chosen.values() else (method_style[0], next(spare))
    for name in (name for name in names if name not in chosen):
        used = [colour for colour, _ in chosen.values()]
        chosen[name] = (min((colour for colour, _ in STYLE.values()), key=used.count), next(spare))
    return {name: chosen[name] for name in names}


def _method(name: str) -> str:
    words = name.lower().replace("_", "-").replace(" ", "-")
    return next((method for method in STYLE if words == method or words.startswith((f"{method}-", f"{method},"))), "")


class Seeds(NamedTuple):
    """Mean, minimum, maximum and number of the values of several seeds."""

    mean: float
    low: float
    high: float
    number: int


def summarise_seeds(values: Iterable[float | None], unit: float = 1.0) -> Seeds | None:
    """Summarise the finite values, times `unit`; return None if there are none."""
    known = [unit * value for value in values if value is not None and math.isfinite(value)]
    return Seeds(fmean(known), min(known), max(known), len(known)) if known else None


def choose_line(style: Style) -> str:
    """Choose the line of a style: solid for a method, dashed for its variants, which share its colour."""
    marker = style[1]
    return LINES[1 + OTHER_MARKERS.index(marker) % (len(LINES) - 1)] if marker and marker in OTHER_MARKERS else LINES[0]


def plot_seeds(axis: Axes, name: str, style: Style, points: Sequence[tuple[float, Seeds]]) -> None:
    """Draw a line through the means at each x, with bars over the range where there are several seeds."""
    colour, marker = style
    xs, summaries = [x for x, _ in points], [seeds for _, seeds in points]
    ranges = [[seeds.mean - seeds.low for seeds in summaries], [seeds.high - seeds.mean for seeds in summaries]]
    axis.errorbar(
        xs,
        [seeds.mean for seeds in summaries],
        ranges if any(seeds.number > 1 for seeds in summaries) else None,
        color=colour,
        marker=marker,
        linestyle=choose_line(style),
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.5,
        linewidth=1.3,
        elinewidth=1,
        capsize=2,
        label=wrap_name(name),
    )


def describe_bars(summaries: Iterable[Seeds | None]) -> str:
    """Return the note on bars, if any value has several seeds."""
    several = any(seeds is not None and seeds.number > 1 for seeds in summaries)
    return "mean and range over seeds" if several else ""


def add_legend_below(figure: Figure, axis: Axes, title: str = "") -> None:
    """Add the legend of an axis below the figure, which grows by its height."""
    handles, labels = axis.get_legend_handles_labels()
    longest = max((len(line) for label in labels for line in label.splitlines()), default=0)
    width, height = figure.get_size_inches()
    room = max(1, int(72 * width / (40 + 4.9 * longest)))  # points: the handle, a letter
    columns = math.ceil(len(labels) / math.ceil(len(labels) / room))  # rows of about the same length
    rows = [labels[first : first + columns] for first in range(0, len(labels), columns)]
    lines = sum(max(1 + label.count("\n") for label in row) for row in rows) + bool(title)
    figure.set_size_inches(width, height + 0.17 * lines)
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False, title=title or None
    )
    legend.get_title().set(fontsize=8, color=GREY)


def darken(colour: str) -> str:
    """Return a darker colour for text, which is thinner than a marker."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return mpl.colors.to_hex((0.7 * red, 0.7 * green, 0.7 * blue))


def tidy_axis(axis: Axes, grid: Literal["x", "y", "both"] = "y") -> None:
    """Remove the top and right frame and add a faint grid."""
    axis.grid(axis=grid, color=PALE)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def wrap_name(name: str, width: int = 36) -> str:
    """Wrap a long name over several lines."""
    return fill(name, width)


def require(drawable: object, argument: str, value: object) -> None:
    """Raise a ValueError if there is nothing to draw."""
    if not drawable:
        text = str(value)
        raise ValueError(f"{argument} must hold a value to draw, not {text[:80]}{'…' if len(text) > 80 else ''}")
