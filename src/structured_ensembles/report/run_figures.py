"""Figures of trained ensembles: what they cost, what that buys, how sure they are, and how they got there.

Every function takes plain values and returns a figure; `as_svg` and `as_png` write it. Values that do not exist (None,
not a number, an empty sequence) are left out; where nothing is left, a ValueError says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from structured_ensembles.common.colours import GREY, SHADES
from structured_ensembles.report.front import FrontPoint, front
from structured_ensembles.report.style import (
    LINES,
    STYLE,
    legend_below,
    over_seeds,
    plot_seeds,
    require,
    seeds_note,
    styles,
    tidy,
    wrapped,
)

__all__ = [
    "FrontPoint",
    "corruption_curves",
    "disagreement",
    "discarding_curves",
    "entropy_histograms",
    "front",
    "learning_curves",
    "overhead_bars",
]

OUTCOMES = {"right": "#0072B2", "wrong": "#D55E00", "corrupted": "#CC79A7"}
OTHER_KINDS = [colour for colour, _ in STYLE.values() if colour not in OUTCOMES.values()]


def overhead_bars(overheads: Mapping[str, Sequence[float]]) -> Figure:
    """What each method stores, in networks: the mean over the seeds as a bar, their range where there are several."""
    seeds = {name: over_seeds(values) for name, values in overheads.items()}
    require(any(seeds.values()), "overheads", overheads)
    figure = Figure(figsize=(6.4, 0.9 + 0.34 * len(seeds)), layout="constrained")
    axis = figure.subplots()
    style = styles(seeds)
    for row, (name, own) in enumerate(seeds.items()):
        if own is None:
            axis.annotate(
                "not known", (0, row), (4, 0), textcoords="offset points", va="center", fontsize=8, color=GREY
            )
            continue
        ranges = [[own.mean - own.low], [own.high - own.mean]] if own.high > own.low else None
        axis.barh(row, own.mean, xerr=ranges, height=0.62, color=style[name][0], ecolor="black", capsize=2)
        text = f"{own.mean:.2f}" if own.mean >= 0.1 else f"{own.mean:.2g}"
        axis.annotate(text, (own.high, row), (5, 0), textcoords="offset points", va="center", fontsize=8)
    axis.axvline(1, color="black", linewidth=1, linestyle=":")
    place = ("data", "axes fraction")
    axis.annotate("one network", (1, 1), (0, 2), place, "offset points", ha="center", va="bottom", fontsize=8)
    axis.set_yticks(range(len(seeds)), [wrapped(name, 28) for name in seeds])
    axis.set_ylim(len(seeds) - 0.45, -0.55)  # the first method on top
    axis.set_xlim(0, 1.15 * max(1.0, *(own.high for own in seeds.values() if own is not None)))
    axis.set_xlabel("parameters, in networks" + _in_brackets(seeds_note(seeds.values())))
    axis.tick_params(axis="y", length=0)
    tidy(axis, "x")
    return figure


def entropy_histograms(entropies: Mapping[str, Tensor], threshold: float | None) -> Figure:
    """The predictive entropy (samples,) in nats of several kinds of samples, as densities over the same bins.

    entropies: "right", "wrong" and "corrupted" have their colours, other names get the next ones.
    """
    known = {name: own for name, values in entropies.items() if len(own := _finite(values))}
    require(known, "entropies", entropies)
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axis = figure.subplots()
    edges = np.linspace(0, max(1e-3, *(float(values.max()) for values in known.values())), 26)
    others = cycle(OTHER_KINDS)
    for index, (name, values) in enumerate(known.items()):
        colour, line = OUTCOMES.get(name) or next(others), LINES[index % len(LINES)]
        density, _ = np.histogram(values.numpy(), edges, density=True)
        if len(known) <= 3:  # of more, only the mixture would be seen
            axis.stairs(density, edges, fill=True, color=colour, alpha=0.18)
        label = wrapped(f"{name} ({len(values)})")
        axis.stairs(density, edges, color=colour, linestyle=line, linewidth=1.5, label=label)
    if threshold is not None:
        axis.axvline(threshold, color="black", linewidth=1, linestyle=(0, (1, 1)), label="discard above")
    axis.set(
        xlabel="entropy of the prediction (nats)", ylabel="density", xlim=(0, max(edges[-1], threshold or 0) * 1.02)
    )
    tidy(axis)
    legend_below(figure, axis)
    return figure


def discarding_curves(curves: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """The accuracy of what is kept against the share discarded, the least certain first.

    curves: by method, what `discarding_curve` returns. The limits are those of the first 90 %: of the few samples that
    are left in the end, one mistake moves the accuracy by any amount.
    """
    known = {name: own for name, curve in curves.items() if len((own := _curve(curve))[0])}
    require(known, "curves", curves)
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axis = figure.subplots()
    style = styles(known)
    for index, (name, (discarded, accuracy)) in enumerate(known.items()):
        colour, marker = style[name]
        where = (index / len(known) * 0.12, 0.12)  # a marker every so far along the line, each method's elsewhere
        axis.plot(discarded, accuracy, color=colour, marker=marker, markersize=5, markevery=where, label=wrapped(name))
    seen = [
        right for shares, rights in known.values() for share, right in zip(shares, rights, strict=True) if share <= 90
    ]
    low, high = min(seen, default=0.0), max(seen, default=100.0)
    room = max(0.5, 0.06 * (high - low))
    axis.set(xlabel="discarded (%)", ylabel="accuracy of the rest (%)", xlim=(0, 100), ylim=(low - room, high + room))
    tidy(axis)
    legend_below(figure, axis)
    return figure


def _curve(curve: tuple[Tensor, Tensor], most: int = 200) -> tuple[list[float], list[float]]:
    """In per cent, and no more points than a reader sees; the first and the last among them."""
    shares, accuracy = (values.detach().cpu().double() for values in curve)
    if shares.shape != accuracy.shape or shares.dim() != 1:
        raise ValueError(
            f"a curve is two tensors of one shape (n,), not {tuple(shares.shape)}, {tuple(accuracy.shape)}"
        )
    finite = shares.isfinite() & accuracy.isfinite()
    shares, accuracy = shares[finite], accuracy[finite]
    if len(shares) > most:
        kept = torch.linspace(0, len(shares) - 1, most).round().long()
        shares, accuracy = shares[kept], accuracy[kept]
    return (100 * shares).tolist(), (100 * accuracy).tolist()


def disagreement(matrix: Tensor, title: str = "") -> Figure:
    """The share of samples that two members classify differently, (members, members), in per cent."""
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"matrix must have the shape (members, members), not {tuple(matrix.shape)}")
    members = len(matrix)
    values = 100 * matrix.detach().cpu().double()
    high = max(1e-9, *_finite(values.flatten()).tolist(), 0.0)
    size = 1.3 + 0.46 * members
    figure = Figure(figsize=(max(size, 2.6), size), layout="constrained")
    axis = figure.subplots()
    axis.imshow(values.numpy(), cmap=SHADES, vmin=0, vmax=high)
    for row in range(members):
        for column in range(members):
            value = float(values[row, column])
            colour = "white" if value > high / 2 else "black"
            text = "–" if math.isnan(value) else f"{value:.1f}"
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    axis.set_xticks(range(members))
    axis.set_yticks(range(members))
    axis.set(xlabel="member", ylabel="member")
    axis.set_title(wrapped(title or "classified differently (%)", max(20, 7 * members)), fontsize=10)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return figure


def corruption_curves(curves: Mapping[str, Mapping[int, Sequence[float]]]) -> Figure:
    """The accuracy under corruptions of growing severity, from 0, which is clean; one share per seed for each."""
    known = {
        name: [(severity, own) for severity in sorted(curve) if (own := over_seeds(curve[severity], 100)) is not None]
        for name, curve in curves.items()
    }
    known = {name: points for name, points in known.items() if points}
    require(known, "curves", curves)
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axis = figure.subplots()
    for name, style in styles(known).items():
        plot_seeds(axis, name, style, known[name])
    found = [severity for points in known.values() for severity, _ in points]
    severities = range(min(found), max(found) + 1)
    axis.set_xticks(severities, ["clean" if severity == 0 else str(severity) for severity in severities])
    axis.set_xlim(severities[0] - 0.25, severities[-1] + 0.25)
    axis.set(xlabel="severity", ylabel="accuracy (%)")
    tidy(axis)
    legend_below(figure, axis, seeds_note(own for points in known.values() for _, own in points))
    return figure


def learning_curves(rows: Sequence[Mapping[str, float | int | None]]) -> Figure:
    """The training loss and the validation accuracy of every member, from the rows of history.csv."""
    panels = {"loss": ("training loss", 1), "validation_accuracy": ("validation accuracy (%)", 100)}
    members = sorted({int(row.get("member") or 0) for row in rows})
    found = {
        column: {member: own for member in members if (own := _over_epochs(rows, member, column, panels[column][1]))}
        for column in panels
    }
    found = {column: curves for column, curves in found.items() if curves}
    require(found, "rows", rows)
    figure = Figure(figsize=(1 + 4 * len(found), 3.2), layout="constrained")
    names = {member: f"member {member}" for member in members}
    style = styles(names.values())
    for axis, (column, curves) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for index, member in enumerate(members):
            colour, marker = style[names[member]]
            curve = curves.get(member, [])
            line = LINES[index % len(LINES)]
            shown = marker if len(curve) == 1 else ""  # a line of one point cannot be seen
            axis.plot(
                [x for x, _ in curve],
                [y for _, y in curve],
                line,
                color=colour,
                marker=shown,
                linewidth=1.5,
                label=names[member],
            )
        epochs = [epoch for curve in curves.values() for epoch, _ in curve]
        axis.set(xlabel="epoch", ylabel=panels[column][0], xlim=(min(epochs) - 0.5, max(epochs) + 0.5))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
        tidy(axis)
    legend_below(figure, figure.axes[0])
    return figure


def _over_epochs(
    rows: Sequence[Mapping[str, float | int | None]], member: int, column: str, unit: float
) -> list[tuple[float, float]]:
    found = []
    for row in rows:
        epoch, value = row.get("epoch"), row.get(column)
        if int(row.get("member") or 0) == member and epoch is not None and value is not None and math.isfinite(value):
            found.append((float(epoch), unit * value))
    return sorted(found)


def _finite(values: Tensor) -> Tensor:
    values = values.detach().cpu().double()
    return values[values.isfinite()]


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
