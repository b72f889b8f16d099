"""Figures of continual learning: accuracy after every task, who owns which layer, and what memory buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from structured_ensembles.continual.matrix import AccuracyMatrix
from structured_ensembles.continual.memory import Memory
from structured_ensembles.continual.owning import Capacity
from structured_ensembles.report.style import BLUE, GREY, ORANGE, PALE, SHADES


def accuracy_matrix(matrix: AccuracyMatrix, title: str = "") -> Figure:
    """R as a heat map: a row per task learned, a column per task tested, in per cent."""
    tasks = len(matrix)
    figure = Figure(figsize=(1.6 + 0.62 * tasks, 1.1 + 0.5 * tasks), layout="constrained")
    axis = figure.subplots()
    values = 100 * matrix.values.numpy()
    low = min(50.0, *(100 * value for row in matrix.rows for value in row))
    axis.imshow(values, cmap=SHADES, vmin=low, vmax=100, aspect="auto")
    for row, accuracies in enumerate(matrix.rows):
        for column, value in enumerate(accuracies):
            light = 100 * value < (low + 100) / 2
            axis.text(column, row, f"{100 * value:.1f}", ha="center", va="center", color="black" if light else "white")
    axis.set_xticks(range(tasks), [str(task) for task in range(tasks)])
    axis.set_yticks(range(tasks), [str(task) for task in range(tasks)])
    axis.set(xlabel="accuracy on task (%)", ylabel="after learning task")
    axis.set_title(title or f"accuracy {100 * matrix.accuracy:.2f} %, forgetting {100 * matrix.forgetting:.2f} %")
    axis.title.set_fontsize(10)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return figure


def capacity_used(capacity: Capacity) -> Figure:
    """The share of every layer's neurons that each task took, stacked; what is pale is free."""
    groups = list(capacity.sizes)
    figure = Figure(figsize=(7.2, 1.2 + 0.3 * len(groups)), layout="constrained")
    axis = figure.subplots()
    colours = SHADES.resampled(len(capacity.tasks) + 1)
    done = [0.0] * len(groups)
    for index, task in enumerate(capacity.tasks):
        shares = [100 * capacity.taken[name][index] / capacity.sizes[name] for name in groups]
        label = "forgotten" if task is None else f"task {task}"
        colour = GREY if task is None else colours(len(capacity.tasks) - index)
        axis.barh(range(len(groups)), shares, left=done, color=colour, edgecolor="white", label=label)
        done = [before + share for before, share in zip(done, shares, strict=True)]
    rest = [100 - share for share in done]
    axis.barh(range(len(groups)), rest, left=done, color="white", edgecolor=GREY, linewidth=0.5, label="free")
    names = [f"{_short(name)} ({capacity.sizes[name]})" for name in groups]
    axis.set_yticks(range(len(groups)), names)
    axis.invert_yaxis()
    axis.set(xlabel="neurons (%)", xlim=(0, 100))
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    return figure


def accuracy_against_memory(
    methods: Mapping[str, tuple[Sequence[float], Memory]], baseline: str = "naive", highlight: str = "structured"
) -> Figure:
    """Accuracy (mean and spread over seeds) against what a method stores besides one backbone and the heads.

    methods: the accuracies of each, and its memory. The axis has a place for methods that store nothing more.
    """
    figure = Figure(figsize=(6.2, 3.8), layout="constrained")
    axis = figure.subplots()
    for name, (accuracies, memory) in methods.items():
        extra = (memory.bits(heads=False) - 32 * memory.backbone) / 8
        mean = 100 * sum(accuracies) / len(accuracies)
        spread = [[mean - 100 * min(accuracies)], [100 * max(accuracies) - mean]]
        colour = BLUE if name == highlight else GREY if name in (baseline, "single") else ORANGE
        axis.errorbar(extra, mean, spread, fmt="o", color=colour, capsize=3, markersize=7)
        label = name.replace("_", " ")
        axis.annotate(label, (extra, mean), xytext=(8, 4), textcoords="offset points", fontsize=9)
    axis.set_xscale("symlog", linthresh=10)
    axis.set(xlabel="memory besides one backbone and the heads (bytes)", ylabel="accuracy (%)")
    axis.margins(x=0.18, y=0.1)
    axis.grid(axis="y", color=PALE)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def accuracy_by_prune(accuracies: Mapping[float, Sequence[float]]) -> Figure:
    """Accuracy (mean and range over seeds) against the share of neurons that a task leaves to others."""
    figure = Figure(figsize=(4.6, 3.4), layout="constrained")
    axis = figure.subplots()
    shares = sorted(accuracies)
    means = [100 * sum(accuracies[own]) / len(accuracies[own]) for own in shares]
    low = [mean - 100 * min(accuracies[own]) for mean, own in zip(means, shares, strict=True)]
    high = [100 * max(accuracies[own]) - mean for mean, own in zip(means, shares, strict=True)]
    axis.errorbar([100 * own for own in shares], means, [low, high], fmt="o-", color=BLUE, capsize=3)
    axis.set(xlabel="pruned neurons (%)", ylabel="accuracy (%)", xlim=(0, 100))
    axis.grid(axis="y", color=PALE)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _short(name: str) -> str:
    """Shorten the name of a layer, from a file; a dollar sign would begin a formula."""
    return name.replace("$", r"\$").removeprefix("backbone.")
