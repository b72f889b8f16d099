"""Tables of our figures beside the paper's, as Markdown: `ours ± deviation (paper)`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from structured_ensembles.common.markdown import escape_markdown, write_table
from structured_ensembles.paper.metrics import Metric, metric_of
from structured_ensembles.paper.published import Cell

Key = tuple[str, str]  # row, column
MISSING = "–"
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class TableData:
    """Table of figures per seed by (row, column), the paper's cells beside them, and the cells that stay empty.

    titles: of rows and columns that are not shown by name.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    metrics: Mapping[str, str]
    ours: Mapping[Key, Sequence[float]]
    paper: Mapping[Key, Cell]
    blank: Collection[Key] = ()
    titles: Mapping[str, str] = field(default_factory=dict)


def markdown_table(
    rows: Sequence[str],
    columns: Sequence[str],
    metrics: Mapping[str, str],
    ours: Mapping[Key, Sequence[float]],
    paper: Mapping[Key, Cell] | None = None,
    titles: Mapping[str, str] | None = None,
    blank: Collection[Key] = (),
    missing: str = MISSING,
    seeds: bool = False,
) -> str:
    """Write a Markdown table, with footnotes for the numbers of the paper that cannot be trusted.

    metrics: the metric of each column, which determines its unit and which value is best. The best of a column is bold
        if every row that is not blank there has a figure of ours.
    ours: by (row, column) one value per seed, in the unit of `evaluate()`; shown as mean ± sample deviation.
    paper: the published cells by (row, column), as `published(name).cells`.
    titles: of rows and columns that are not shown by name.
    blank: the cells that are not meant to have a figure, and stay empty; others without one show a dash.
    missing: the text of a cell that `ours` does not have; one that it has without a value shows a dash.
    seeds: add a column with the number of values behind each row.

    For a published table: `markdown_table(table.rows, table.columns, table.metrics, ours, table.cells)`.
    """
    _check(rows, columns, metrics, ours)
    titles = titles or {}
    column_metrics = {column: metric_of(metrics[column]) for column in columns}
    rivals = {column: [row for row in rows if (row, column) not in blank] for column in columns}
    best = {key for column in columns for key in find_best(rivals[column], column, column_metrics[column], ours)}
    notes: list[str] = []
    lines = []
    for row in rows:
        line = [escape_markdown(titles.get(row, row))]
        for column in columns:
            key, metric = (row, column), column_metrics[column]
            text = "" if key in blank else _format_ours(ours.get(key), metric, missing)
            published = _format_published((paper or {}).get(key), metric, notes)
            line.append((f"**{text}**" if key in best else text) + published)
        if seeds:
            counts = [len(ours.get((row, column), ())) for column in columns if (row, column) not in blank]
            line.append(_format_seeds(counts) if counts else "")
        lines.append(line)
    header = [*map(escape_markdown, header_of(columns, metrics, titles)), *["seeds"] * seeds]
    table = write_table(header, lines, right=range(1, len(header)))
    footnotes = [f"{_superscript(number)} suspicious: {reason}" for number, reason in enumerate(notes, start=1)]
    return "\n\n".join([table, *footnotes]) + "\n"


def write_table_data(data: TableData, missing: str = MISSING, seeds: bool = False) -> str:
    """Write the Markdown table of some data, see `markdown_table`, without a line end."""
    table = markdown_table(
        data.rows, data.columns, data.metrics, data.ours, data.paper, data.titles, data.blank, missing, seeds
    )
    return table.rstrip()


def _check(
    rows: Sequence[str], columns: Sequence[str], metrics: Mapping[str, str], ours: Mapping[Key, Sequence[float]]
) -> None:
    """Raise a ValueError for columns without a metric, and for figures outside of the table."""
    if unmeasured := [column for column in columns if column not in metrics]:
        raise ValueError(f"metrics must have the metric of every column, but has none for {', '.join(unmeasured)}")
    if strays := [key for key in ours if key[0] not in rows or key[1] not in columns]:
        raise ValueError(f"ours must have figures of rows and columns of this table, not of {strays}")


def header_of(columns: Sequence[str], metrics: Mapping[str, str], titles: Mapping[str, str]) -> tuple[str, ...]:
    """Return the header; its corner has the metric of the columns, if none names it and all have the same."""
    column_titles = []
    for column in columns:
        metric = metrics[column]
        default = column
        if column.endswith(metric):
            default = f"{column.removesuffix(metric).rstrip('/')} {metric_of(metric).title}".strip()
        column_titles.append(titles.get(column, default))
    is_unnamed = not any(column.endswith(metrics[column]) for column in columns)
    metric_titles = {metric_of(metrics[column]).title for column in columns}
    return (metric_titles.pop() if is_unnamed and len(metric_titles) == 1 else "", *column_titles)


def _format_ours(values: Sequence[float] | None, metric: Metric, missing: str) -> str:
    """Format our values as mean ± deviation over seeds."""
    if values is None:
        return missing
    if not values:
        return MISSING
    return format_mean(values, metric)


def format_mean(values: Sequence[float], metric: Metric) -> str:
    """Format one value or more as mean ± sample deviation, in the metric's unit."""
    mean = metric.shown(fmean(values))
    if len(values) == 1 or not all(map(math.isfinite, values)):  # `stdev` fails for diverged runs
        return mean
    return f"{mean} ± {metric.shown(stdev(values))}"


def find_best(rows: Sequence[str], column: str, metric: Metric, ours: Mapping[Key, Sequence[float]]) -> list[Key]:
    """Return the cells whose mean is best as shown; none if a row is missing or is not finite."""
    means = {(row, column): fmean(values) for row in rows if (values := ours.get((row, column)))}
    if metric.better is None or len(rows) < 2 or len(means) < len(rows) or not all(map(math.isfinite, means.values())):
        return []
    best = max(means.values()) if metric.better == "higher" else min(means.values())
    return [key for key, mean in means.items() if metric.shown(mean) == metric.shown(best)]


def _format_published(cell: Cell | None, metric: Metric, notes: list[str]) -> str:
    """Format the paper's figure in brackets, with the number of the note that doubts it, which is added to `notes`."""
    if cell is None:
        return ""
    mark = ""
    if cell.suspicious is not None:
        if cell.suspicious not in notes:
            notes.append(cell.suspicious)
        mark = _superscript(notes.index(cell.suspicious) + 1)
    return f" ({'< ' if cell.below else ''}{metric.shown(cell.value)}{mark})"


def _format_seeds(counts: Sequence[int]) -> str:
    """Format the number of seeds behind a row, or their range if its figures differ in that."""
    known = [count for count in counts if count] or [0]
    return str(known[0]) if len(set(known)) == 1 else f"{min(known)}–{max(known)}"


def _superscript(number: int) -> str:
    return str(number).translate(SUPERSCRIPTS)
