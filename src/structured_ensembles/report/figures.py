"""Charts of kept neurons and of reliability; and any chart as SVG text."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor

from structured_ensembles.common.colours import BLUE, GREY, PALE
from structured_ensembles.report.reliability import bin_confidence
from structured_ensembles.report.style import add_legend_below, choose_styles, require, tidy_axis, wrap_name
from structured_ensembles.selection import Subnet


def draw_kept_neurons(subnets: Sequence[Subnet]) -> Figure:
    """Draw the kept channels: a row per member, a panel per group, dark where a channel is kept."""
    groups = [(name, size) for name, size, _ in subnets[0].groups]
    total = sum(size for _, size in groups)
    figure = Figure(figsize=(11, 0.6 + 0.22 * len(subnets)), layout="constrained")
    axes = figure.subplots(1, len(groups), width_ratios=[size for _, size in groups], sharey=True, squeeze=False)[0]
    for axis, (name, size) in zip(axes, groups, strict=True):
        is_kept = torch.zeros(len(subnets), size)
        for member, subnet in enumerate(subnets):
            is_kept[member, list(subnet.kept[name])] = 1
        axis.imshow(
            is_kept.numpy(),
            aspect="auto",
            cmap=mpl.colors.ListedColormap([PALE, BLUE]),
            vmin=0,
            vmax=1,
            interpolation="none",
        )
        is_narrow = 10 * size / total < 0.09 * len(_short(name))  # in inches: the name would overlap the next one
        title_style = {"rotation": 35, "ha": "left"} if is_narrow else {}
        axis.set_title(_short(name), fontsize=9, **title_style)
        axis.set_xticks([])
        axis.set_yticks(range(len(subnets)), [f"member {member}" for member in range(len(subnets))], fontsize=8)
        axis.set_yticks([row - 0.5 for row in range(1, len(subnets))], minor=True)
        axis.grid(which="minor", axis="y", color="white", linewidth=2)
        axis.tick_params(which="both", length=0)
        axis.spines[:].set_visible(False)
    return figure


def draw_reliability_of_confidence(curves: Sequence[tuple[str, Tensor, Tensor]], bins: int = 10) -> Figure:
    """Draw accuracy against confidence, in bins of at least five samples.

    curves: (name, confidence (samples,), correct (samples,)). A name that is, or begins with, a method has its style.
    """
    require(curves, "curves", curves)
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":", label="perfect")
    style = choose_styles(name for name, _, _ in curves)
    for name, confidence, correct in curves:
        points = [(one.confidence, one.accuracy) for one in bin_confidence(confidence, correct, bins)]
        colour, marker = style[name]
        across, up = zip(*points, strict=True) if points else ((), ())
        label = wrap_name(name if points else f"{name} (too few samples)")
        axis.plot(across, up, marker=marker, color=colour, label=label, markersize=5)
    axis.set(xlabel="confidence", ylabel="accuracy", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    tidy_axis(axis)
    add_legend_below(figure, axis)
    return figure


def as_svg(figure: Figure) -> str:
    """Return the figure as an SVG element; the same figure gives the same text."""
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "structured-ensembles", "svg.fonttype": "path"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


def _short(name: str) -> str:
    """Shorten the name of a layer, `layer1.0.conv1` to `1.0`; to matplotlib, a dollar sign would begin a formula."""
    short = re.sub(r"^layer(?=\d)", "", name.removeprefix("backbone.")).removesuffix(".conv1")
    return short.replace("$", r"\$")
