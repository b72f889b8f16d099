"""Differences between two rows of a study, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import fmean, stdev
from typing import Any

from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.paper.studies import Study
from structured_ensembles.prediction.combination import Combine
from structured_ensembles.report.docs.records import Records, table

ONE_SEED = "one seed: no error known"


@dataclass(frozen=True)
class Difference:
    """A figure of one row minus that of another: one value for each seed that both have."""

    figure: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def error(self) -> float | None:
        """The standard error of the mean; unknown for one seed, or where a run diverged."""
        known = len(self.values) > 1 and all(map(isfinite, self.values))
        return stdev(self.values) / sqrt(len(self.values)) if known else None

    def __str__(self) -> str:
        return self.number + (" points" if metric_of(self.figure).percent else "")

    @property
    def number(self) -> str:
        """Its mean ± error without a unit; points where the figure is a percentage."""
        metric = metric_of(self.figure)
        unit = 100 if metric.percent else 1
        text = f"{unit * self.mean:+.{metric.decimals}f}".replace("-", "−")
        if self.error is not None:
            text += f" ± {unit * self.error:.{metric.decimals}f}"
        return text


def difference(records: Records, wanted: Study, pair: tuple[str, str], figure: str, rule: Combine) -> Difference | None:
    """Subtract the second row's figure from the first's; None if they have no seed in common."""
    first, second = (records.by_seed(runs_of_row(wanted, row), figure, rule) for row in pair)
    common = tuple(first[seed] - second[seed] for seed in sorted(first.keys() & second.keys()))
    return Difference(figure, common) if common else None


def runs_of_row(wanted: Study, row: str) -> tuple[Any, ...]:
    """Return the experiments behind a row, one per seed."""
    return next((runs for (own, _), (runs, _) in wanted.sources.items() if own == row), ())


def difference_table(records: Records, wanted: Study, pairs: Sequence[tuple[str, str]], figures: Sequence[str]) -> str:
    """Write a line for every pair of rows: the differences in all figures, by every combination rule of the study."""
    lines = [_line(records, wanted, pair, figures) for pair in pairs]
    if all(line[-1] == "0" for line in lines):
        return "Differences between rows: not run."
    rules = "; in brackets by the paper's rule" if len(wanted.rules) > 1 else ""
    header = ("difference", *(metric_of(figure).title.replace("(%)", "(points)") for figure in figures), "seeds")
    return f"Differences, paired over seeds, ± standard error{rules}:\n\n" + table(header, lines, range(1, len(header)))


def _line(records: Records, wanted: Study, pair: tuple[str, str], figures: Sequence[str]) -> tuple[str, ...]:
    cells, seeds = [], 0
    for figure in figures:
        found = [difference(records, wanted, pair, figure, rule) for rule in wanted.rules]
        known = [own for own in found if own is not None]
        cells.append(known[0].number + "".join(f" ({own.number})" for own in known[1:]) if known else "not run")
        seeds = max([seeds, *(len(own.values) for own in known)])
    return (f"{pair[0]} − {pair[1]}", *cells, ONE_SEED if seeds == 1 else str(seeds))
