"""HTML tables that page.js sorts and filters, and that become cards where a screen is narrow."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from markupsafe import Markup

from structured_ensembles.paper.layout import MISSING, Key, TableData, find_best, header_of
from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.report.web.svg import element

MOST_COLUMNS = 12  # beside the names of rows; more are split over several tables
FEWEST_TO_FILTER = 4  # rows
LARGEST_NUMBER = 1e15  # others, and NaN, are shown as they are: a file may say anything


@dataclass(frozen=True)
class Cell:
    """Cell of a table. value: what it is sorted by; a text by itself. best: shown bold. note, paper: smaller, below."""

    text: str
    value: float | str | None = None
    best: bool = False
    note: str = ""
    paper: str = ""
    doubted: bool = False  # the paper's number cannot be trusted, and is struck through


@dataclass(frozen=True)
class Table:
    """Table of a page; the first column has the names of rows. highlighted: rows that the page is about."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    highlighted: Collection[str] = field(default=())


def html_table(table: Table) -> Markup:
    """Write a table; its width on screen decides when it becomes cards."""
    # Columns of words are read from the left; numbers are compared at their right ends.
    words = [
        all(isinstance(row[column].value, str | None) for row in table.rows) for column in range(len(table.header))
    ]
    head = Markup("").join(
        element(
            "th", element("button", title or "name", type="button"), scope="col", class_="word" if is_word else None
        )
        for title, is_word in zip(table.header, words, strict=True)
    )
    lines = []
    for row in table.rows:
        cells = [element("th", row[0].text, scope="row", data_value=row[0].text)]
        cells += [
            _cell(cell, title, is_word)
            for cell, title, is_word in zip(row[1:], table.header[1:], words[1:], strict=True)
        ]
        lines.append(element("tr", *cells, class_="about" if row[0].text in table.highlighted else None))
    columns = len(table.header)
    width = "few" if columns <= 5 else "some" if columns <= 9 else "many"
    filtered = "" if len(table.rows) >= FEWEST_TO_FILTER else None
    shown = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", *lines),
        class_=f"data {width}",
        data_filter=filtered,
    )
    notes = Markup("").join(element("p", note, class_="note") for note in table.notes)
    return element("div", shown, class_="wide") + notes


def _cell(cell: Cell, title: str, is_word: bool) -> Markup:
    shown = [element("strong", cell.text) if cell.best else cell.text]
    shown += [element("span", cell.note, class_="small")] if cell.note else []
    shown += [element("span", cell.paper, class_="small doubted" if cell.doubted else "small")] if cell.paper else []
    value = cell.text if cell.value is None else cell.value
    if isinstance(value, float):
        value = repr(value) if not math.isnan(value) else ""
    return element(
        "td",
        element("span", *shown, class_="cell"),
        class_="word" if is_word else None,
        data_label=title,
        data_value="" if value == MISSING else value,
    )


def split_columns(data: TableData, groups: Sequence[tuple[str, Collection[str]]] = ()) -> list[TableData]:
    """Split a table by groups of columns, (title, columns), then into tables of at most MOST_COLUMNS."""
    chosen = [(title, [column for column in data.columns if column in columns]) for title, columns in groups]
    rest = [column for column in data.columns if not any(column in columns for _, columns in chosen)]
    result = []
    for title, columns in [*chosen, ("", rest)]:
        pieces = math.ceil(len(columns) / MOST_COLUMNS)
        size = math.ceil(len(columns) / pieces) if pieces else 1
        result += [_of_columns(data, title, columns[first : first + size]) for first in range(0, len(columns), size)]
    return result


def _of_columns(data: TableData, title: str, columns: Sequence[str]) -> TableData:
    """Return a table of some columns, without rows that have nothing there."""
    rows = [
        row
        for row in data.rows
        if any((row, column) in source for source in (data.ours, data.paper) for column in columns)
    ] or list(data.rows)
    joined = ": ".join(text for text in (data.title, title) if text)
    ours = {(row, column): values for (row, column), values in data.ours.items() if column in columns and row in rows}
    return replace(data, title=joined, rows=rows, columns=columns, ours=ours)


def table_of_figures(data: TableData, highlighted: Collection[str] = ()) -> Table:
    """Format figures: the mean over seeds, with deviation and the paper's figure below; the best of a column bold."""
    header = header_of(data.columns, data.metrics, data.titles)
    best = {
        key
        for column in data.columns
        for key in find_best(
            [row for row in data.rows if (row, column) not in data.blank],
            column,
            metric_of(data.metrics[column]),
            data.ours,
        )
    }
    notes: list[str] = []
    rows = []
    for row in data.rows:
        cells = [Cell(data.titles.get(row, row))]
        cells += [_figure_cell(data, (row, column), (row, column) in best, notes) for column in data.columns]
        rows.append(cells)
    shown = [f"{number}: suspicious: {reason}" for number, reason in enumerate(notes, start=1)]
    return Table(data.title, header, rows, shown, highlighted)


def _figure_cell(data: TableData, key: Key, is_best: bool, notes: list[str]) -> Cell:
    """Format our figure, with the deviation over seeds and the published figure below it."""
    metric = metric_of(data.metrics[key[1]])
    values = data.ours.get(key)
    text, value, deviation = ("" if key in data.blank else MISSING), None, ""
    if values:
        value = fmean(values)
        text = metric.shown(value)
        if len(values) > 1 and all(map(math.isfinite, values)):
            deviation = f"± {metric.shown(stdev(values))}"
    published, mark = data.paper.get(key), ""
    if published is None:
        return Cell(text, value, is_best, deviation)
    if published.suspicious is not None:
        if published.suspicious not in notes:
            notes.append(published.suspicious)
        mark = f" [{notes.index(published.suspicious) + 1}]"
    paper = f"(paper {'< ' if published.below else ''}{metric.shown(published.value)}{mark})"
    return Cell(text, value, is_best, deviation, paper, bool(mark))


def plain_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[object]], notes: Sequence[str] = ()
) -> Table:
    """Make a table of texts and numbers; None shows a dash."""
    return Table(title, header, [[_plain_cell(value) for value in row] for row in rows], notes)


def _plain_cell(value: object) -> Cell:
    if value is None:
        return Cell(MISSING)
    if isinstance(value, float | int) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER:
        return Cell(f"{value:,.0f}" if isinstance(value, float) and abs(value) >= 10 else f"{value:,}", float(value))
    return Cell(str(value))
