"""Figures as SVG text, to be put into a page; colours that colour-blind readers can tell apart."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor

from structured_ensembles.selection import Subnet

BLUE, ORANGE, GREY, PALE = "#0b5cad", "#d95f02", "#6b7280", "#e8edf3"


def kept_neurons(subnets: Sequence[Subnet]) -> Figure:
    """What every member keeps of every group: a row per member, a panel per group, dark where a channel is kept."""
    groups = [(name, size) for name, size, _ in subnets[0].groups]
    figure = Figure(figsize=(11, 0.6 + 0.22 * len(subnets)), layout="constrained")
    axes = figure.subplots(1, len(groups), width_ratios=[size for _, size in groups], sharey=True, squeeze=False)[0]
    for axis, (name, size) in zip(axes, groups, strict=True):
        picture = torch.zeros(len(subnets), size)
        for member, subnet in enumerate(subnets):
            picture[member, list(subnet.kept[name])] = 1
        axis.imshow(
            picture.numpy(),
            aspect="auto",
            cmap=mpl.colors.ListedColormap([PALE, BLUE]),
            vmin=0,
            vmax=1,
            interpolation="none",
        )
        axis.set_title(_short(name), fontsize=9)
        axis.set_xticks([])
        axis.set_yticks(range(len(subnets)), [f"member {member}" for member in range(len(subnets))], fontsize=8)
        axis.set_yticks([row - 0.5 for row in range(1, len(subnets))], minor=True)
        axis.grid(which="minor", axis="y", color="white", linewidth=2)
        axis.tick_params(which="both", length=0)
        axis.spines[:].set_visible(False)
    return figure


def reliability(curves: Sequence[tuple[str, Tensor, Tensor]], bins: int = 10) -> Figure:
    """Accuracy against confidence, in bins of at least five samples: (name, probabilities, targets) per curve."""
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":", label="perfect")
    for (name, probabilities, targets), colour, marker in zip(curves, (GREY, ORANGE, BLUE), "so^", strict=False):
        confidence, labels = probabilities.max(-1)
        index = (confidence * bins).ceil().clamp(1, bins).long() - 1
        used = [own for own in range(bins) if int((index == own).sum()) >= 5]  # fewer say nothing
        points = [
            (float(confidence[index == own].mean()), float((labels == targets)[index == own].double().mean()))
            for own in used
        ]
        axis.plot(*zip(*points, strict=True), marker=marker, color=colour, label=name, markersize=5)
    axis.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02))
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def entropy_histogram(entropy: Tensor, correct: Tensor, threshold: float | None) -> Figure:
    """Predictive entropy of right and wrong predictions, shapes (samples,), with the threshold for discarding."""
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    axis = figure.subplots()
    edges = torch.linspace(0, max(float(entropy.max()), 1e-3), 25).tolist()
    for mask, name, colour in ((correct, "right", BLUE), (~correct, "wrong", ORANGE)):
        if bool(mask.any()):
            axis.hist(
                entropy[mask].numpy(),
                edges,
                density=True,
                color=colour,
                alpha=0.75,
                label=f"{name} ({int(mask.sum())})",
            )
    if threshold is not None:
        axis.axvline(threshold, color="black", linewidth=1, linestyle="--", label="discard above")
    axis.set(xlabel="entropy of the prediction (nats)", ylabel="density")
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def as_svg(figure: Figure) -> str:
    """The figure as an SVG element; the same figure gives the same text."""
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "structured-ensembles", "svg.fonttype": "path"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


def _short(name: str) -> str:
    return name.removeprefix("layer").replace(".conv1", "")
