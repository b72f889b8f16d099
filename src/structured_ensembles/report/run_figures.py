"""Charts of trained ensembles: memory, entropy, discarding, disagreement, corruptions and learning curves.

Every function takes plain values and returns a figure; `as_svg` writes it. Missing values (None, NaN, an
empty sequence) are left out; where nothing is left, a ValueError says so.
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
from structured_ensembles.report.style import (
    LINES,
    STYLE,
    add_legend_below,
    choose_styles,
    describe_bars,
    plot_seeds,
    require,
    summarise_seeds,
    tidy_axis,
    wrap_name,
)

OUTCOMES = {"right": "#0072B2", "wrong": "#D55E00", "corrupted": "#CC79A7"}
OTHER_COLOURS = [colour for colour, _ in STYLE.values() if colour not in OUTCOMES.values()]
MAX_POINTS = 200  # of a drawn curve


def draw_overheads(overheads: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the memory of each method in networks: the mean over seeds as a bar, with their range."""
    seeds = {name: summarise_seeds(values) for name, values in overheads.items()}
    require(any(seeds.values()), "overheads", overheads)
    figure = Figure(figsize=(6.4, 0.9 + 0.34 * len(seeds)), layout="constrained")
    axis = figure.subplots()
    style = choose_styles(seeds)
    for row, (name, overhead) in enumerate(seeds.items()):
        if overhead is None:
            axis.annotate(
                "not known", (0, row), (4, 0), textcoords="offset points", va="center", fontsize=8, color=GREY
            )
            continue
        ranges = (
            [[overhead.mean - overhead.low], [overhead.high - overhead.mean]] if overhead.high > overhead.low else None
        )
        axis.barh(row, overhead.mean, xerr=ranges, height=0.62, color=style[name][0], ecolor="black", capsize=2)
        text = f"{overhead.mean:.2f}" if overhead.mean >= 0.1 else f"{overhead.mean:.2g}"
        axis.annotate(text, (overhead.high, row), (5, 0), textcoords="offset points", va="center", fontsize=8)
    axis.axvline(1, color="black", linewidth=1, linestyle=":")
    coordinates = ("data", "axes fraction")
    axis.annotate("one network", (1, 1), (0, 2), coordinates, "offset points", ha="center", va="bottom", fontsize=8)
    axis.set_yticks(range(len(seeds)), [wrap_name(name, 28) for name in seeds])
    axis.set_ylim(len(seeds) - 0.45, -0.55)  # the first method on top
    axis.set_xlim(0, 1.15 * max(1.0, *(overhead.high for overhead in seeds.values() if overhead is not None)))
    note = describe_bars(seeds.values())
    axis.set_xlabel("parameters, in networks" + (f" ({note})" if note else ""))
    axis.tick_params(axis="y", length=0)
    tidy_axis(axis, "x")
    return figure


def draw_entropy_histograms(entropies: Mapping[str, Tensor], threshold: float | None) -> Figure:
    """Draw the entropy (samples,) in nats of several kinds of samples, as densities over the same bins.

    entropies: "right", "wrong" and "corrupted" have their colours, other names get the next ones.
    """
    known = {name: finite for name, values in entropies.items() if len(finite := _finite(values))}
    require(known, "entropies", entropies)
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axis = figure.subplots()
    edges = np.linspace(0, max(1e-3, *(float(values.max()) for values in known.values())), 26)
    others = cycle(OTHER_COLOURS)
    for index, (name, values) in enumerate(known.items()):
        colour, line = OUTCOMES.get(name) or next(others), LINES[index % len(LINES)]
        density, _ = np.histogram(values.numpy(), edges, density=True)
        if len(known) <= 3:  # more would only show a mixture
            axis.stairs(density, edges, fill=True, color=colour, alpha=0.18)
        label = wrap_name(f"{name} ({len(values)})")
        axis.stairs(density, edges, color=colour, linestyle=line, linewidth=1.5, label=label)
    if threshold is not None:
        axis.axvline(threshold, color="black", linewidth=1, linestyle=(0, (1, 1)), label="discard above")
    axis.set(
        xlabel="entropy of the prediction (nats)", ylabel="density", xlim=(0, max(edges[-1], threshold or 0) * 1.02)
    )
    tidy_axis(axis)
    add_legend_below(figure, axis)
    return figure


def draw_discarding_curves(curves: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Draw the accuracy of the kept samples against the share discarded, the least certain first.

    curves: the result of `discarding_curve` by method. The limits are those of the first 90 %, as one mistake among the
    few last samples moves the accuracy by any amount.
    """
    known = {name: percentages for name, curve in curves.items() if len((percentages := _curve(curve))[0])}
    require(known, "curves", curves)
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axis = figure.subplots()
    style = choose_styles(known)
    for index, (name, (discarded, accuracy)) in enumerate(known.items()):
        colour, marker = style[name]
        marker_spacing = (
            index / len(known) * 0.12,
            0.12,
        )  # markers at equal distances along the line, shifted per method
        axis.plot(
            discarded,
            accuracy,
            color=colour,
            marker=marker,
            markersize=5,
            markevery=marker_spacing,
            label=wrap_name(name),
        )
    accuracies = [
        right for shares, rights in known.values() for share, right in zip(shares, rights, strict=True) if share <= 90
    ]
    low, high = min(accuracies, default=0.0), max(accuracies, default=100.0)
    room = max(0.5, 0.06 * (high - low))
    axis.set(xlabel="discarded (%)", ylabel="accuracy of the rest (%)", xlim=(0, 100), ylim=(low - room, high + room))
    tidy_axis(axis)
    add_legend_below(figure, axis)
    return figure


def _curve(curve: tuple[Tensor, Tensor]) -> tuple[list[float], list[float]]:
    """Convert a curve to per cent, thinned to `MAX_POINTS` with the first and the last among them."""
    shares, accuracy = (values.detach().cpu().double() for values in curve)
    if shares.shape != accuracy.shape or shares.dim() != 1:
        raise ValueError(
            f"a curve must be two tensors of one shape (n,), not {tuple(shares.shape)}, {tuple(accuracy.shape)}"
        )
    finite = shares.isfinite() & accuracy.isfinite()
    shares, accuracy = shares[finite], accuracy[finite]
    if len(shares) > MAX_POINTS:
        kept = torch.linspace(0, len(shares) - 1, MAX_POINTS).round().long()
        shares, accuracy = shares[kept], accuracy[kept]
    return (100 * shares).tolist(), (100 * accuracy).tolist()


def draw_disagreement(matrix: Tensor, title: str = "") -> Figure:
    """Draw the share of samples that two members classify differently, (members, members), in per cent."""
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
    axis.set_title(wrap_name(title or "classified differently (%)", max(20, 7 * members)), fontsize=10)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return figure


def draw_corruption_curves(curves: Mapping[str, Mapping[int, Sequence[float]]]) -> Figure:
    """Draw the accuracy under corruptions by severity, where 0 is clean; one share per seed for each."""
    known = {
        name: [
            (severity, seeds)
            for severity in sorted(curve)
            if (seeds := summarise_seeds(curve[severity], 100)) is not None
        ]
        for name, curve in curves.items()
    }
    known = {name: points for name, points in known.items() if points}
    require(known, "curves", curves)
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axis = figure.subplots()
    for name, style in choose_styles(known).items():
        plot_seeds(axis, name, style, known[name])
    known_severities = [severity for points in known.values() for severity, _ in points]
    severities = range(min(known_severities), max(known_severities) + 1)
    axis.set_xticks(severities, ["clean" if severity == 0 else str(severity) for severity in severities])
    axis.set_xlim(severities[0] - 0.25, severities[-1] + 0.25)
    axis.set(xlabel="severity", ylabel="accuracy (%)")
    tidy_axis(axis)
    add_legend_below(figure, axis, describe_bars(seeds for points in known.values() for _, seeds in points))
    return figure


def draw_learning_curves(rows: Sequence[Mapping[str, float | int | None]]) -> Figure:
    """Draw training loss and validation accuracy of every member, from the rows of history.csv."""
    panels = {"loss": ("training loss", 1), "validation_accuracy": ("validation accuracy (%)", 100)}
    members = sorted({int(row.get("member") or 0) for row in rows})
    curves_by_column = {
        column: {
            member: points for member in members if (points := _over_epochs(rows, member, column, panels[column][1]))
        }
        for column in panels
    }
    curves_by_column = {column: curves for column, curves in curves_by_column.items() if curves}
    require(curves_by_column, "rows", rows)
    figure = Figure(figsize=(1 + 4 * len(curves_by_column), 3.2), layout="constrained")
    names = {member: f"member {member}" for member in members}
    style = choose_styles(names.values())
    for axis, (column, curves) in zip(
        figure.subplots(1, len(curves_by_column), squeeze=False)[0], curves_by_column.items(), strict=True
    ):
        for index, member in enumerate(members):
            colour, marker = style[names[member]]
            curve = curves.get(member, [])
            line = LINES[index % len(LINES)]
            shown_marker = marker if len(curve) == 1 else ""  # a line of one point is invisible
            axis.plot(
                [x for x, _ in curve],
                [y for _, y in curve],
                line,
                color=colour,
                marker=shown_marker,
                linewidth=1.5,
                label=names[member],
            )
        epochs = [epoch for curve in curves.values() for epoch, _ in curve]
        axis.set(xlabel="epoch", ylabel=panels[column][0], xlim=(min(epochs) - 0.5, max(epochs) + 0.5))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
        tidy_axis(axis)
    add_legend_below(figure, figure.axes[0])
    return figure


def _over_epochs(
    rows: Sequence[Mapping[str, float | int | None]], member: int, column: str, unit: float
) -> list[tuple[float, float]]:
    """Return the (epoch, value) pairs of a member's column."""
    points = []
    for row in rows:
        epoch, value = row.get("epoch"), row.get(column)
        if int(row.get("member") or 0) == member and epoch is not None and value is not None and math.isfinite(value):
            points.append((float(epoch), unit * value))
    return sorted(points)


def _finite(values: Tensor) -> Tensor:
    """Return the finite values, float64 on the CPU."""
    values = values.detach().cpu().double()
    return values[values.isfinite()]
