"""Differences between two rows of a study, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from structured_ensembles.ensemble import Combine
from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.paper.studies import Study
from structured_ensembles.report.docs.records import Records

ONE_SEED = "one seed: no error known"


@dataclass(frozen=True)
class Difference:
    """What one row has more than another in a figure, one value per seed that both have."""

    figure: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def error(self) -> float | None:
        """The standard error of the mean; unknown for one seed."""
        return stdev(self.values) / sqrt(len(self.values)) if len(self.values) > 1 else None

    def __str__(self) -> str:
        metric = metric_of(self.figure)
        unit = 100 if metric.percent else 1
        text = f"{unit * self.mean:+.{metric.decimals}f}".replace("-", "−")
        if self.error is not None:
            text += f" ± {unit * self.error:.{metric.decimals}f}"
        return text + (" points" if metric.percent else "")


def difference(records: Records, wanted: Study, pair: tuple[str, str], figure: str, rule: Combine) -> Difference | None:
    """Subtract the second row's figure from the first's; None if they have no seed in common."""
    first, second = (records.by_seed(runs_of_row(wanted, row), figure, rule) for row in pair)
    common = tuple(first[seed] - second[seed] for seed in sorted(first.keys() & second.keys()))
    return Difference(figure, common) if common else None


def runs_of_row(wanted: Study, row: str) -> tuple[Any, ...]:
    """Return the experiments behind a row, one per seed."""
    return next((runs for (own, _), (runs, _) in wanted.sources.items() if own == row), ())


def difference_list(records: Records, wanted: Study, pairs: Sequence[tuple[str, str]], figures: Sequence[str]) -> str:
    """Write a line for every pair of rows: the differences in all figures, by every combination rule of the study."""
    lines = {f"{first} − {second}": _line(records, wanted, (first, second), figures) for first, second in pairs}
    known = [f"- {pair}: {line}" for pair, line in lines.items() if line]
    missing = [pair for pair, line in lines.items() if not line]
    known += [f"- not run: {'; '.join(missing)}"] if missing and known else []
    title = "Differences, paired over seeds, ± standard error:"
    return f"{title}\n\n" + "\n".join(known) if known else "Differences between rows: not run."


def _line(records: Records, wanted: Study, pair: tuple[str, str], figures: Sequence[str]) -> str:
    """Write the differences of two rows; nothing if they have no seed in common."""
    shown, seeds = [], 0
    for figure in figures:
        found = [difference(records, wanted, pair, figure, rule) for rule in wanted.rules]
        known = [own for own in found if own is not None]
        if not known:
            continue
        seeds = len(known[0].values)
        title = metric_of(figure).title.removesuffix(" (%)")
        others = "".join(f" (by the paper's rule {own})" for own in known[1:])
        shown.append(f"{title} {known[0]}{others}")
    if not shown:
        return ""
    return f"{', '.join(shown)}; {ONE_SEED if seeds == 1 else f'{seeds} seeds'}"
