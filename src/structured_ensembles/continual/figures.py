"""Charts of one continual learner: accuracy after every task, and the neurons that each task owns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from structured_ensembles.common.colours import GREY, SHADES
from structured_ensembles.continual.owning import Capacity


def draw_accuracy_matrix(rows: Sequence[Sequence[float]], numbers: Sequence[int], title: str) -> Figure:
    """Draw R as a heat map: a row per task learned, a column per task tested, in per cent.

    rows: of a lower triangle: row i has the accuracies on the first i + 1 tasks after learning the last of these.
    numbers: of the tasks.
    """
    tasks = len(rows)
    figure = Figure(figsize=(1.6 + 0.62 * tasks, 1.1 + 0.5 * tasks), layout="constrained")
    axis = figure.subplots()
    values = [[100 * value for value in row] + [math.nan] * (tasks - len(row)) for row in rows]
    low = min(50.0, *(value for row in values for value in row if not math.isnan(value)))
    axis.imshow(values, cmap=SHADES, vmin=low, vmax=100, aspect="auto")
    for row, accuracies in enumerate(rows):
        for column, value in enumerate(accuracies):
            light = 100 * value < (low + 100) / 2
            axis.text(column, row, f"{100 * value:.1f}", ha="center", va="center", color="black" if light else "white")
    axis.set_xticks(range(tasks), [str(number) for number in numbers])
    axis.set_yticks(range(tasks), [str(number) for number in numbers])
    axis.set(xlabel="accuracy on task (%)", ylabel="after learning task")
    axis.set_title(title)
    axis.title.set_fontsize(10)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return figure


def draw_capacity(capacity: Capacity) -> Figure:
    """Draw the share of every layer's neurons that each task took, as stacked bars; free neurons are white."""
    groups = list(capacity.sizes)
    figure = Figure(figsize=(7.2, 1.2 + 0.3 * len(groups)), layout="constrained")
    axis = figure.subplots()
    colours = SHADES.resampled(len(capacity.tasks) + 1)
    left = [0.0] * len(groups)
    for index, task in enumerate(capacity.tasks):
        shares = [100 * capacity.taken[name][index] / capacity.sizes[name] for name in groups]
        label = "forgotten" if task is None else f"task {task}"
        colour = GREY if task is None else colours(len(capacity.tasks) - index)
        axis.barh(range(len(groups)), shares, left=left, color=colour, edgecolor="white", label=label)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    free_shares = [100 - share for share in left]
    axis.barh(range(len(groups)), free_shares, left=left, color="white", edgecolor=GREY, linewidth=0.5, label="free")
    names = [f"{_short(name)} ({capacity.sizes[name]})" for name in groups]
    axis.set_yticks(range(len(groups)), names)
    axis.invert_yaxis()
    axis.set(xlabel="neurons (%)", xlim=(0, 100))
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _short(name: str) -> str:
    """Shorten the name of a layer for matplotlib, to which a dollar sign would begin a formula."""
    return name.replace("$", r"\$").removeprefix("backbone.")
