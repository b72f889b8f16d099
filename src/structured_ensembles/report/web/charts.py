"""Charts of trained ensembles: reliability, the front, sets, kept neurons, learning curves, and more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from structured_ensembles.common.plurals import counted
from structured_ensembles.report.front import FrontPoint
from structured_ensembles.report.reliability import Bin
from structured_ensembles.report.style import Seeds, choose_styles, summarise_seeds
from structured_ensembles.report.web.axes import Axis, fit_axis, round_ticks
from structured_ensembles.report.web.grids import Bar, plot_bars, plot_strips
from structured_ensembles.report.web.plots import Chart, Guide, Mark, Series, fit_upward_axis, plot_lines, thin_marks
from structured_ensembles.report.web.sample_details import SampleDetails
from structured_ensembles.selection import Subnet

MANY_GROUPS = 24  # of a network; the rest of the map is folded
Row = Mapping[str, float | int | None]


def chart_reliability(details: Mapping[str, SampleDetails]) -> Chart | None:
    """Chart accuracy against confidence by label, before temperature and, where there is one, after it."""
    panels, shown = [], choose_styles(details)
    moments: tuple[tuple[str, Callable[[SampleDetails], tuple[Bin, ...] | None]], ...] = (
        ("before temperature", lambda one: one.before),
        ("after temperature", lambda one: one.after),
    )
    for title, bins_of in moments:
        bins_by_label = {label: bins for label, one in details.items() if (bins := bins_of(one))}
        if not bins_by_label:
            continue
        series = [
            Series(
                label,
                shown[label],
                [
                    Mark(
                        100 * one.confidence,
                        100 * one.accuracy,
                        f"{label}, {title}\n{counted(one.samples, 'sample')}: confidence {100 * one.confidence:.1f} %, "
                        f"accuracy {100 * one.accuracy:.1f} %",
                    )
                    for one in bins
                ],
            )
            for label, bins in bins_by_label.items()
        ]
        low = 20 * int(min(mark.x for one in series for mark in one.marks) // 20)
        low = min(low, 20 * int(min(mark.y for one in series for mark in one.marks) // 20))
        ends = Axis("confidence (%)", low - 2, 102, round_ticks(low, 100))
        up = Axis("accuracy (%)", low - 2, 102, round_ticks(low, 100))
        panels.append(
            plot_lines(f"accuracy (%), {title}", series, ends, up, [Guide((float(low), float(low)), (100.0, 100.0))])
        )
    if not panels:
        return None
    caption = "Dotted: confidence equals accuracy. Ten bins of confidence, those of at least five samples; first seed."
    return Chart("reliability", "Is it as sure as it is right?", caption, tuple(panels), tuple(shown.items()))


def chart_coverage(details: Mapping[str, SampleDetails]) -> Chart | None:
    """Chart the coverage of conformal sets against their mean size, by label."""
    known = {label: one.coverages for label, one in details.items() if len(one.coverages) > 1}
    if not known:
        return None
    shown = choose_styles(known)
    series = [
        Series(
            label,
            shown[label],
            [
                Mark(
                    one.size,
                    100 * one.observed,
                    f"{label}\npromised {100 * one.promised:g} %: covers {100 * one.observed:.1f} %\n"
                    f"{one.size:.2f} classes on average",
                )
                for one in coverages
            ],
        )
        for label, coverages in known.items()
    ]
    marks = [mark for one in series for mark in one.marks]
    across = fit_axis("classes in a set, on average", [mark.x for mark in marks])
    up = fit_axis("coverage (%)", [mark.y for mark in marks], high=100.5)
    caption = "Conformal sets that promise 50 % and more, fitted to the validation split; first seed."
    panel = plot_lines("coverage (%)", series, across, up)
    return Chart("coverage", "How many classes a promise costs", caption, (panel,), tuple(shown.items()))


def chart_front(points: Sequence[FrontPoint], memory: str) -> Chart | None:
    """Chart accuracy, NLL and ECE against memory in networks; the points of a method joined from small to large."""
    if not points:
        return None
    shown = choose_styles(point.method for point in points)
    across = fit_axis(f"{memory}, in networks", [1.0, *(point.memory for point in points)], kind="log")
    quantities: dict[str, Callable[[FrontPoint], Seeds | None]] = {
        "accuracy (%)": lambda point: summarise_seeds(point.accuracy, 100),
        "NLL (nats)": lambda point: summarise_seeds(point.nll),
        "ECE (%)": lambda point: summarise_seeds(point.ece, 100),
    }
    panels = []
    for title, summarise in quantities.items():
        series = []
        for method, style in shown.items():
            of_method = sorted((point for point in points if point.method == method), key=lambda point: point.memory)
            marks = [
                replace(_front_mark(point, seeds, title), label=point.label if len(of_method) > 1 else "")
                for point in of_method
                if (seeds := summarise(point)) is not None
            ]
            if marks:
                series.append(Series(method, style, marks))
        if series:
            up = fit_upward_axis(title, series)
            panels.append(plot_lines(title, series, across, up, [Guide((1.0, up.low), (1.0, up.high))]))
    text = "The first 1, 2, … members of every ensemble; dotted: the memory of one network."
    if any(len(values) > 1 for point in points for values in (point.accuracy, point.nll, point.ece)):
        text += " Bars: range over seeds."
    words = {"parameters": "Quality against parameters", "file": "Quality against the size of the file"}
    title = words.get(memory, f"Quality against {memory}")
    return Chart(f"front-{memory}", title, text, tuple(panels), tuple(shown.items()))


def _front_mark(point: FrontPoint, seeds: Seeds, title: str) -> Mark:
    over = f", {seeds.low:.3g} to {seeds.high:.3g} over {seeds.number} seeds" if seeds.number > 1 else ""
    quantity, _, unit = title.partition(" (")
    value = f"{quantity} {seeds.mean:.4g} {unit.rstrip(')')}{over}"
    tip = f"{point.method}, {point.label}\n{value}\n{point.memory:.2f} networks"
    return Mark(point.memory, seeds.mean, tip, "", seeds.low, seeds.high)


def chart_kept(subnets: Sequence[Subnet], label: str) -> list[Chart]:
    """Chart the channels that every member keeps, a panel per group; the groups of a deep network in several charts."""
    if not subnets:
        return []
    panels = []
    for name, size, _ in subnets[0].groups:
        rows = []
        for member, subnet in enumerate(subnets):
            kept = subnet.kept[name]
            listed = ", ".join(map(str, kept[:24])) + (" …" if len(kept) > 24 else "")
            rows.append((kept, f"member {member} keeps {len(kept)} of {counted(size, 'channel')} of {name}\n{listed}"))
        panels.append(plot_strips(f"{name} ({size})", rows, size))
    overlaps = [first.overlap(second) for index, first in enumerate(subnets) for second in subnets[index + 1 :]]
    text = f"{label}: a strip per member, from member 0 on top; blue: kept. In brackets: the channels of the layer."
    if overlaps:
        text += f" Two members share {100 * sum(overlaps) / len(overlaps):.0f} % of what they keep, on average."
    charts = []
    for first in range(0, len(panels), MANY_GROUPS):
        chosen = tuple(panels[first : first + MANY_GROUPS])
        title = "What each member keeps" + (
            f", layers {first + 1} to {first + len(chosen)}" if len(panels) > MANY_GROUPS else ""
        )
        charts.append(Chart("kept", title, text, chosen, broad=True))
    return charts


def chart_learning(rows: Sequence[Row], label: str) -> Chart | None:
    """Chart training loss, validation loss and validation accuracy of every member, from the rows of history.csv."""
    quantities = {
        "loss": ("training loss", 1.0, ""),
        "validation_loss": ("validation loss", 1.0, ""),
        "validation_accuracy": ("validation accuracy (%)", 100.0, " %"),
    }
    members = sorted({int(row.get("member") or 0) for row in rows})
    shown = choose_styles(f"member {member}" for member in members)
    panels = []
    for column, (title, factor, unit) in quantities.items():
        series = []
        for member in members:
            name = f"member {member}"
            points = sorted(
                (int(row["epoch"] or 0), factor * value)
                for row in rows
                if int(row.get("member") or 0) == member
                and (value := row.get(column)) is not None
                and np.isfinite(value)
            )
            marks = [
                Mark(epoch, value, f"{name}, epoch {epoch}\n{title.removesuffix(' (%)')} {value:.4g}{unit}")
                for epoch, value in points
            ]
            if marks:
                series.append(Series(name, shown[name], thin_marks(marks), markers=False))
        epochs = {mark.x for one in series for mark in one.marks}
        if len(epochs) > 1:
            across = fit_axis("epoch", list(epochs), low=0, high=max(epochs), whole=True)
            panels.append(plot_lines(title, series, across, fit_upward_axis(title, series)))
    if not panels:
        return None
    text = f"{label}: a line per member, first seed."
    return Chart("learning", f"Learning curves: {label}", text, tuple(panels), tuple(shown.items()))


def chart_corruptions(curves: Mapping[str, Mapping[int, Sequence[float]]], origin: str) -> Chart | None:
    """Chart accuracy under corruptions by severity, where 0 is clean; a share per seed for each."""
    known = {label: curve for label, curve in curves.items() if len(curve) > 1}
    if not known:
        return None
    shown = choose_styles(known)
    series = []
    for label, curve in known.items():
        marks = []
        for severity in sorted(curve):
            seeds = summarise_seeds(curve[severity], 100)
            if seeds is not None:
                where = "clean" if severity == 0 else f"severity {severity}"
                marks.append(
                    Mark(
                        severity,
                        seeds.mean,
                        f"{label}, {where}\naccuracy {seeds.mean:.2f} %",
                        "",
                        seeds.low,
                        seeds.high,
                    )
                )
        series.append(Series(label, shown[label], marks))
    severities = sorted({severity for curve in known.values() for severity in curve})
    ticks = tuple((float(severity), "clean" if severity == 0 else str(severity)) for severity in severities)
    across = Axis("severity", severities[0] - 0.3, severities[-1] + 0.3, ticks)
    panel = plot_lines("accuracy (%)", series, across, fit_upward_axis("accuracy (%)", series))
    text = f"Mean over the 15 standard corruptions. {origin}"
    return Chart("corruptions", "Accuracy under corruptions", text, (panel,), tuple(shown.items()))


def chart_overheads(overheads: Mapping[str, Sequence[float]]) -> Chart | None:
    """Chart the memory of each method in networks, mean over seeds."""
    known = {label: seeds for label, values in overheads.items() if (seeds := summarise_seeds(values)) is not None}
    if not known:
        return None
    shown = choose_styles(known)
    rows = [
        (f"{label}: {seeds.mean:.2f}", [Bar(0, seeds.mean, f"{label}\n{seeds.mean:.3g} networks", shown[label])])
        for label, seeds in known.items()
    ]
    highest = max(1.0, *(seeds.mean for seeds in known.values()))
    across = fit_axis("parameters, in networks", [0, highest], low=0, high=1.02 * highest)
    panel = plot_bars("", rows, across, [1.0])
    text = "Parameters of the whole ensemble over those of one network; dotted: one network."
    return Chart("overhead", "Memory", text, (panel,))
