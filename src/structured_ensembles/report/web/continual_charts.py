"""Charts of continual runs: the accuracy matrix, the capacity map, accuracy against memory and against pruning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from structured_ensembles.common.plurals import counted
from structured_ensembles.continual.matrix import AccuracyMatrix
from structured_ensembles.continual.memory import Memory
from structured_ensembles.continual.owning import Capacity
from structured_ensembles.report.style import STYLE, choose_styles, summarise_seeds
from structured_ensembles.report.web.axes import Axis, describe_number, fit_axis, round_ticks
from structured_ensembles.report.web.grids import Bar, Cell, plot_bars, plot_grid
from structured_ensembles.report.web.plots import Chart, Mark, Series, fit_upward_axis, plot_lines


def chart_matrix(matrix: AccuracyMatrix, label: str) -> Chart:
    """Chart the accuracy on every task after learning each."""
    values = [100 * value for row in matrix.rows for value in row]
    low = min(50.0, *values)
    rows = [
        [
            Cell(
                f"{100 * value:.1f}",
                (100 * value - low) / (100 - low),
                f"task {matrix.tasks[task]} after learning task {matrix.tasks[learned]}: {100 * value:.2f} %"
                + (
                    f"\n{100 * (value - matrix.rows[task][task]):+.2f} points since it was learned"
                    if learned > task
                    else ""
                ),
            )
            for task, value in enumerate(row)
        ]
        for learned, row in enumerate(matrix.rows)
    ]
    names = [str(task) for task in matrix.tasks]
    panel = plot_grid("", rows, "accuracy on task (%)", "after learning task", names)
    text = f"Accuracy {100 * matrix.accuracy:.2f} %, forgetting {100 * matrix.forgetting:.2f} %; first seed."
    return Chart("matrix", f"Accuracy matrix: {label}", text, (panel,))


def chart_capacity(capacity: Capacity, label: str) -> Chart:
    """Chart the share of every layer's neurons that each task took."""
    rows = []
    for name, size in capacity.sizes.items():
        bars, start = [], 0.0
        for index, task in enumerate(capacity.tasks):
            count = capacity.taken[name][index]
            owner = "a forgotten task" if task is None else f"task {task}"
            share = 100 * count / size
            if count:
                shade = 0.25 if task is None else 1 - 0.8 * index / max(1, len(capacity.tasks) - 1)
                tip = f"{owner} took {count} of {counted(size, 'neuron')} of {name} ({share:.1f} %)"
                bars.append(Bar(start, start + share, tip, shade=shade))
            start += share
        if capacity.free[name]:
            bars.append(Bar(start, 100.0, f"{capacity.free[name]} of {counted(size, 'neuron')} of {name} are free"))
        rows.append((f"{name.removeprefix('backbone.')} ({size})", bars))
    across = Axis("neurons (%)", 0, 100, round_ticks(0, 100))
    total, free = sum(capacity.sizes.values()), sum(capacity.free.values())
    text = (
        f"A layer per bar, its neurons in brackets; the first task on the left and strongest, free neurons empty. "
        f"{free:,} of {total:,} neurons ({100 * free / total:.1f} %) are free; first seed."
    )
    return Chart("capacity", f"Capacity map: {label}", text, (plot_bars("", rows, across),))


def chart_memory(methods: Mapping[str, tuple[Sequence[float], Memory]]) -> Chart | None:
    """Chart accuracy against what a method stores besides one backbone and the heads; a value per seed."""
    if len(methods) < 2:
        return None
    shown = choose_styles(methods)
    names = [label.partition(",")[0] for label in methods]
    series = []
    for label, (accuracies, memory) in methods.items():
        seeds = summarise_seeds(accuracies, 100)
        if seeds is not None:
            extra = memory.task_bytes
            tip = f"{label}\naccuracy {seeds.mean:.2f} %\n{describe_number(extra)} bytes more than one backbone"
            name = label.partition(",")[0]
            mark = Mark(extra, seeds.mean, tip, name if names.count(name) == 1 else label, seeds.low, seeds.high)
            series.append(Series(label, shown[label], [mark]))
    marks = [mark for one in series for mark in one.marks]
    across = fit_axis("bytes besides one backbone and the heads", [mark.x for mark in marks], kind="symlog")
    text = "What each method stores for its tasks." + (
        " Bars: range over seeds." if any(len(accuracies) > 1 for accuracies, _ in methods.values()) else ""
    )
    panel = plot_lines("accuracy (%)", series, across, fit_upward_axis("accuracy (%)", series))
    return Chart("memory", "Accuracy against memory", text, (panel,), tuple(shown.items()))


def chart_prune(accuracies: Mapping[float, Sequence[float]]) -> Chart | None:
    """Chart accuracy against the share of neurons that a task leaves to others."""
    if len(accuracies) < 2:
        return None
    marks = []
    for share in sorted(accuracies):
        seeds = summarise_seeds(accuracies[share], 100)
        if seeds is not None:
            tip = f"{100 * share:g} % pruned\naccuracy {seeds.mean:.2f} %"
            marks.append(Mark(100 * share, seeds.mean, tip, "", seeds.low, seeds.high))
    series = [Series("structured", STYLE["structured"], marks)]
    across = Axis("pruned neurons (%)", 0, 100, round_ticks(0, 100))
    panel = plot_lines("accuracy (%)", series, across, fit_upward_axis("accuracy (%)", series))
    return Chart(
        "prune",
        "Accuracy against pruning",
        "The share of free neurons that a task leaves to others."
        + (" Bars: range over seeds." if any(len(values) > 1 for values in accuracies.values()) else ""),
        (panel,),
    )
