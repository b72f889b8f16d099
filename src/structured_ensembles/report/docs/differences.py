"""Paired differences between two rows of a study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import fmean, stdev
from typing import Any

from structured_ensembles.common.markdown import write_table
from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.paper.studies import Study
from structured_ensembles.prediction.combination import Combine
from structured_ensembles.report.docs.records import NOT_RUN, Records

ONE_SEED = "one seed: no error known"


@dataclass(frozen=True)
class Difference:
    """Difference of a figure between two rows: one value for each seed that both have."""

    figure: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Return the mean over the seeds."""
        return fmean(self.values)

    @property
    def error(self) -> float | None:
        """Return the standard error of the mean; None for one seed, or if a run diverged."""
        known = len(self.values) > 1 and all(map(isfinite, self.values))
        return stdev(self.values) / sqrt(len(self.values)) if known else None

    def __str__(self) -> str:
        return self.number + (" points" if metric_of(self.figure).percent else "")

    @property
    def number(self) -> str:
        """Format mean ± error without a unit; in points if the figure is a percentage."""
        metric = metric_of(self.figure)
        unit = 100 if metric.percent else 1
        text = f"{unit * self.mean:+.{metric.decimals}f}".replace("-", "−")
        if self.error is not None:
            text += f" ± {unit * self.error:.{metric.decimals}f}"
        return text


def subtract_rows(
    records: Records, wanted: Study, pair: tuple[str, str], figure: str, rule: Combine
) -> Difference | None:
    """Subtract the second row's figure from the first's; None if they have no seed in common."""
    first, second = (records.by_seed(list_runs_of_row(wanted, row), figure, rule, wanted.split) for row in pair)
    common = tuple(first[seed] - second[seed] for seed in sorted(first.keys() & second.keys()))
    return Difference(figure, common) if common else None


def list_runs_of_row(wanted: Study, row: str) -> tuple[Any, ...]:
    """Return the experiments behind a row, one per seed."""
    return next((runs for (label, _), (runs, _) in wanted.sources.items() if label == row), ())


def difference_table(records: Records, wanted: Study, pairs: Sequence[tuple[str, str]], figures: Sequence[str]) -> str:
    """Write a table with a line per pair of rows: differences in all figures, by every combination rule."""
    lines = [_line(records, wanted, pair, figures) for pair in pairs]
    if all(line[-1] == "0" for line in lines):
        return f"Differences between rows: {NOT_RUN}."
    rules = "; in brackets by the paper's rule" if len(wanted.rules) > 1 else ""
    header = ("difference", *(metric_of(figure).title.replace("(%)", "(points)") for figure in figures), "seeds")
    return f"Differences, paired over seeds, ± standard error{rules}:\n\n" + write_table(
        header, lines, range(1, len(header))
    )


def _line(records: Records, wanted: Study, pair: tuple[str, str], figures: Sequence[str]) -> tuple[str, ...]:
    """Format the line of a pair of rows."""
    cells, seeds = [], 0
    for figure in figures:
        differences = [subtract_rows(records, wanted, pair, figure, rule) for rule in wanted.rules]
        known = [by_rule for by_rule in differences if by_rule is not None]
        cells.append(known[0].number + "".join(f" ({by_rule.number})" for by_rule in known[1:]) if known else NOT_RUN)
        seeds = max([seeds, *(len(by_rule.values) for by_rule in known)])
    return (f"{pair[0]} − {pair[1]}", *cells, ONE_SEED if seeds == 1 else str(seeds))
