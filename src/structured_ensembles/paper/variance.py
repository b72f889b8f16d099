"""Two-way analysis of variance without repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean

from scipy.special import fdtrc


@dataclass(frozen=True)
class TwoWay:
    """Result of a two-way analysis of variance: do rows differ by more than chance explains?

    freedom: degrees of freedom of the rows and of the rest. f, p: of the rows.
    deviations: standard deviations due to rows, columns and the rest, from mean squares; 0 where an estimate of the
        variance is negative.
    """

    freedom: tuple[int, int]
    f: float
    p: float
    deviations: tuple[float, float, float]


def analyse_two_ways(table: Sequence[Sequence[float]]) -> TwoWay:
    """Analyse a table of one value for each row and column, at least two of both."""
    rows, columns = len(table), len(table[0]) if table else 0
    if rows < 2 or columns < 2 or any(len(row) != columns for row in table):
        raise ValueError(f"table must have at least 2 rows of at least 2 values, all alike, not {table!r:.100}")
    mean = fmean(value for row in table for value in row)
    row_means = [fmean(row) for row in table]
    column_means = [fmean(column) for column in zip(*table, strict=True)]
    freedom = (rows - 1, (rows - 1) * (columns - 1))
    of_rows = columns * sum((value - mean) ** 2 for value in row_means) / freedom[0]
    of_columns = rows * sum((value - mean) ** 2 for value in column_means) / (columns - 1)
    residuals = (
        value - row_means[i] - column_means[j] + mean for i, row in enumerate(table) for j, value in enumerate(row)
    )
    rest = sum(residual**2 for residual in residuals) / freedom[1]
    f = of_rows / rest if rest else inf if of_rows else 0.0  # of equal values, rows do not differ
    variances = ((of_rows - rest) / columns, (of_columns - rest) / rows, rest)
    first, second, third = (sqrt(max(0.0, variance)) for variance in variances)
    return TwoWay(freedom, f, float(fdtrc(*freedom, f)), (first, second, third))
