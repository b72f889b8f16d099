"""Charts that compare continual learners: accuracy against memory, and against the share of pruned neurons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from structured_ensembles.common.colours import BLUE, GREY, ORANGE, PALE
from structured_ensembles.continual.memory import Memory


def draw_accuracy_against_memory(methods: Mapping[str, tuple[Sequence[float], Memory]]) -> Figure:
    """Draw accuracy (mean and range over seeds) against memory besides one backbone and the heads.

    methods: the accuracies of each, and its memory. The axis includes zero, for methods that store nothing more.
    """
    figure = Figure(figsize=(6.2, 3.8), layout="constrained")
    axis = figure.subplots()
    for name, (accuracies, memory) in methods.items():
        extra = memory.task_bytes
        mean = 100 * sum(accuracies) / len(accuracies)
        spread = [[mean - 100 * min(accuracies)], [100 * max(accuracies) - mean]]
        colour = BLUE if name == "structured" else GREY if name in ("naive", "single") else ORANGE
        axis.errorbar(extra, mean, spread, fmt="o", color=colour, capsize=3, markersize=7)
        label = name.replace("_", " ")
        axis.annotate(label, (extra, mean), xytext=(8, 4), textcoords="offset points", fontsize=9)
    axis.set_xscale("symlog", linthresh=10)
    axis.set(xlabel="memory besides one backbone and the heads (bytes)", ylabel="accuracy (%)")
    axis.margins(x=0.18, y=0.1)
    axis.grid(axis="y", color=PALE)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def draw_accuracy_by_prune(accuracies: Mapping[float, Sequence[float]]) -> Figure:
    """Draw accuracy (mean and range over seeds) against the share of neurons that a task leaves to others."""
    figure = Figure(figsize=(4.6, 3.4), layout="constrained")
    axis = figure.subplots()
    shares = sorted(accuracies)
    means = [100 * sum(accuracies[share]) / len(accuracies[share]) for share in shares]
    low = [mean - 100 * min(accuracies[share]) for mean, share in zip(means, shares, strict=True)]
    high = [100 * max(accuracies[share]) - mean for mean, share in zip(means, shares, strict=True)]
    axis.errorbar([100 * share for share in shares], means, [low, high], fmt="o-", color=BLUE, capsize=3)
    axis.set(xlabel="pruned neurons (%)", ylabel="accuracy (%)", xlim=(0, 100))
    axis.grid(axis="y", color=PALE)
    axis.spines[["top", "right"]].set_visible(False)
    return figure
