"""What all figures share: colours that colour-blind readers can tell apart, one style per method, legends, frames."""

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

# Okabe and Ito's colours; Paul Tol's wine and indigo stand in for their yellow, a line of which is lost on white.
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
}
OTHER_MARKERS = "ph*d8H1"  # for names that are no method; none of them is above
LINES = ("-", "--", "-.", ":")


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A colour and a marker for each name, those of a method for its name or one that begins so, as "deep ensemble".

    If several names begin so, they share its colour, and the first of them has its marker. Names of no method get the
    colours that are used least.
    """
    found: dict[str, Style] = {}
    names = list(dict.fromkeys(names))
    spare = cycle(OTHER_MARKERS)
    for name in sorted(names, key=lambda name: name not in STYLE):  # a method's own name comes first
        own = STYLE.get(_method(name))
        if own is not None:
            found[name] = own if own not in found.values() else (own[0], next(spare))
    for name in (name for name in names if name not in found):
        used = [colour for colour, _ in found.values()]
        found[name] = (min((colour for colour, _ in STYLE.values()), key=used.count), next(spare))
    return {name: found[name] for name in names}


def _method(name: str) -> str:
    words = name.lower().replace("_", "-").replace(" ", "-")
    return next((method for method in STYLE if words == method or words.startswith((f"{method}-", f"{method},"))), "")


class Seeds(NamedTuple):
    """The values of several seeds: their mean, the least, the greatest, and how many there were."""

    mean: float
    low: float
    high: float
    number: int


def over_seeds(values: Iterable[float | None], unit: float = 1.0) -> Seeds | None:
    """Of the values that exist, times `unit`; None if there is none."""
    known = [unit * value for value in values if value is not None and math.isfinite(value)]
    return Seeds(fmean(known), min(known), max(known), len(known)) if known else None


def plot_seeds(axis: Axes, name: str, style: Style, points: Sequence[tuple[float, Seeds]]) -> None:
    """Draw a line through the means at the given x, with bars over the range where there are several seeds.

    Full for a method, broken for its variants, which share its colour.
    """
    colour, marker = style
    line = LINES[1 + OTHER_MARKERS.index(marker) % (len(LINES) - 1)] if marker in OTHER_MARKERS else LINES[0]
    places, seeds = [x for x, _ in points], [own for _, own in points]
    ranges = [[own.mean - own.low for own in seeds], [own.high - own.mean for own in seeds]]
    axis.errorbar(
        places,
        [own.mean for own in seeds],
        ranges if any(own.number > 1 for own in seeds) else None,
        color=colour,
        marker=marker,
        linestyle=line,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.5,
        linewidth=1.3,
        elinewidth=1,
        capsize=2,
        label=wrapped(name),
    )


def seeds_note(seeds: Iterable[Seeds | None]) -> str:
    return "mean and range over seeds" if any(own is not None and own.number > 1 for own in seeds) else ""


def legend_below(figure: Figure, axis: Axes, title: str = "") -> None:
    """What the axis shows, named once below the whole figure, which grows by that much."""
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


def darker(colour: str) -> str:
    """The same colour for a text, which is thinner than a marker."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return mpl.colors.to_hex((0.7 * red, 0.7 * green, 0.7 * blue))


def tidy(axis: Axes, grid: Literal["x", "y", "both"] = "y") -> None:
    """No frame but the two axes, and a faint grid."""
    axis.grid(axis=grid, color=PALE)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def wrapped(name: str, width: int = 36) -> str:
    """A long name on several lines."""
    return fill(name, width)


def require(there: object, argument: str, given: object) -> None:
    """Raise a ValueError if nothing is there to draw."""
    if not there:
        shown = str(given)
        raise ValueError(f"{argument} holds no value to draw: {shown[:80]}{'…' if len(shown) > 80 else ''}")
