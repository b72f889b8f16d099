"""Charts of uncertainty: what discarding brings, entropies, and how often members differ."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

import numpy as np
from torch import Tensor

from structured_ensembles.evaluation.discarding import discarding_curve
from structured_ensembles.report.style import STYLE, Style, choose_styles
from structured_ensembles.report.web.axes import Axis, fit_axis, round_ticks
from structured_ensembles.report.web.grids import Cell, plot_grid
from structured_ensembles.report.web.plots import Chart, Guide, Mark, Series, fit_upward_axis, plot_lines, thin_marks

OUTCOMES: dict[str, Style] = {
    "right": STYLE["structured"],
    "wrong": STYLE["deep"],
    "corrupted": STYLE["batch-ensemble"],
}
LAST_DISCARDED = 90  # per cent: one mistake among the few last samples moves the accuracy by any amount


def chart_discarding(samples: Mapping[str, tuple[Tensor, Tensor]]) -> Chart | None:
    """Chart the accuracy of what is kept against the share discarded; entropy and correctness (samples,) by label."""
    if not samples:
        return None
    shown = choose_styles(samples)
    series = []
    for label, (entropy, correct) in samples.items():
        shares, accuracy = discarding_curve(entropy, correct)
        points = [
            (100 * share, 100 * right)
            for share, right in zip(shares.tolist(), accuracy.tolist(), strict=True)
            if 100 * share <= LAST_DISCARDED and np.isfinite(right)
        ]
        points = points[:: max(1, len(points) // 200)]
        marks = [Mark(x, y, f"{label}\nwithout the {x:.1f} % least certain: {y:.2f} % right") for x, y in points]
        series.append(Series(label, shown[label], thin_marks(marks, 40), markers=False))
    across = Axis("discarded (%)", 0, LAST_DISCARDED, round_ticks(0, LAST_DISCARDED))
    panel = plot_lines("accuracy of the rest (%)", series, across, fit_upward_axis("accuracy of the rest (%)", series))
    text = "The predictions of the highest entropy are discarded first; first seed."
    return Chart("discarding", "What discarding the least certain brings", text, (panel,), tuple(shown.items()))


def chart_entropies(entropies: Mapping[str, Tensor], threshold: float | None, label: str) -> Chart | None:
    """Chart densities of the entropy (samples,) in nats of several kinds of samples, over the same bins."""
    known = {
        name: finite.double().numpy() for name, values in entropies.items() if len(finite := values[values.isfinite()])
    }
    if not known:
        return None
    highest = max(1e-3, *(float(values.max()) for values in known.values()))
    edges = np.linspace(0, highest, 26)
    others = cycle(style for style in STYLE.values() if style not in OUTCOMES.values())
    series, legend = [], []
    for name, values in known.items():
        style = OUTCOMES.get(name) or next(others)
        style = (style[0], "")
        counts, _ = np.histogram(values, edges)
        marks = []
        for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
            density = count / len(values) / (right - left)
            tip = f"{name}: {count:,} of {len(values):,}\nentropy {left:.2f} to {right:.2f}"
            marks += [
                Mark(left, density, ""),
                Mark((left + right) / 2, density, tip if count else ""),
                Mark(right, density, ""),
            ]
        series.append(Series(name, style, marks, markers=False, filled=len(known) <= 3))
        legend.append((f"{name} ({len(values):,})", style))
    across = fit_axis("entropy of the prediction (nats)", [0, highest], low=0, high=max(highest, threshold or 0) * 1.02)
    up = fit_axis("density", [mark.y for one in series for mark in one.marks], low=0)
    guides = [] if threshold is None else [Guide((threshold, up.low), (threshold, up.high))]
    text = f"{label}, first seed." + (
        "" if threshold is None else " Dotted: predictions to the right of it are discarded."
    )
    text += " Corrupted: under strong Gaussian noise (severity 5)." if "corrupted" in known else ""
    panel = plot_lines("density", series, across, up, guides)
    return Chart("entropy", "Entropy of right and wrong predictions", text, (panel,), tuple(legend))


def chart_disagreement(matrix: Tensor, label: str) -> Chart | None:
    """Chart the share of samples that two members classify differently, (members, members)."""
    if len(matrix) < 2:
        return None
    values = (100 * matrix.double()).tolist()
    high = max(1e-9, *(value for row in values for value in row))
    rows = [
        [
            None
            if first == second
            else Cell(
                f"{value:.1f}", value / high, f"members {first} and {second} differ on {value:.2f} % of the samples"
            )
            for second, value in enumerate(row)
        ]
        for first, row in enumerate(values)
    ]
    panel = plot_grid(
        "classified differently (%)", rows, "member", "member", [str(member) for member in range(len(values))]
    )
    return Chart("disagreement", "How often two members differ", f"{label}, first seed.", (panel,))
