"""Tables of pages: bold is the best of a column, many columns are split, a row is sorted by its full value."""

import re

from structured_ensembles.paper.layout import TableData
from structured_ensembles.paper.published import Cell as Published
from structured_ensembles.report.web.tables import MOST_COLUMNS, html_table, split_columns, table_of_figures


def data_of(**figures: list[list[float]]) -> TableData:
    """Make a table of metrics, each with the values per seed of rows a, b, …."""
    columns = [name.replace("__", "/") for name in figures]
    ours = {
        ("abc"[row], column): values
        for column, by_row in zip(columns, figures.values(), strict=True)
        for row, values in enumerate(by_row)
        if values
    }
    rows = list("abc"[: max(map(len, figures.values()))])
    return TableData("", rows, columns, dict(zip(columns, columns, strict=True)), ours, {})


def test_bold_is_the_best_of_a_column_and_shaded_is_the_subject() -> None:
    data = data_of(cls__accuracy=[[0.9, 0.92], [0.95]], cal__nll=[[0.2], [0.3]], div__cc=[[1.0], [2.0]])
    shown = str(html_table(table_of_figures(data, {"a"})))
    assert re.findall(r"<strong>([^<]*)</strong>", shown) == [
        "0.2000",
        "95.00",
    ]  # accuracy higher, NLL lower, CC neither
    assert re.findall(r'<tr class="about"><th scope="row" data-value="(.)"', shown) == ["a"]
    assert "± 1.41</span>" in shown
    assert 'data-value="0.91"' in shown


def test_no_value_is_best_where_one_is_missing() -> None:
    shown = str(html_table(table_of_figures(data_of(cls__accuracy=[[0.9], [], [0.8]]))))
    assert "<strong>" not in shown
    assert re.findall(r'<span class="cell">(.*?)</span>', shown) == ["90.00", "–", "80.00"]
    assert 'data-value=""' in shown  # sorted last


def test_published_figures_stand_below_and_doubtful_ones_have_a_note() -> None:
    data = data_of(cls__accuracy=[[0.9]])
    published = {("a", "cls/accuracy"): Published(0.99, suspicious="it cannot be")}
    shown = str(html_table(table_of_figures(TableData(**{**vars(data), "paper": published}))))
    assert "(paper 99.00 [1])" in shown
    assert "suspicious: it cannot be" in shown
    assert '<span class="small doubted">(paper 99.00 [1])</span>' in shown
    trusted = {("a", "cls/accuracy"): Published(0.99, below=True)}
    shown = str(html_table(table_of_figures(TableData(**{**vars(data), "paper": trusted}))))
    assert '<span class="small">(paper &lt; 99.00)</span>' in shown


def test_blank_cells_stay_empty_and_others_show_a_dash() -> None:
    data = TableData(**{**vars(data_of(cls__accuracy=[[0.9], [], [0.8]])), "blank": [("b", "cls/accuracy")]})
    shown = str(html_table(table_of_figures(data)))
    assert re.findall(r'<span class="cell">(.*?)</span>', shown) == ["<strong>90.00</strong>", "", "80.00"]


def test_wide_tables_are_split_without_losing_a_column() -> None:
    columns = [f"set {number}/cls/accuracy" for number in range(30)]
    metrics = dict.fromkeys(columns, "cls/accuracy")
    data = TableData("t", ["a"], columns, metrics, {("a", column): [0.5] for column in columns}, {})
    pieces = split_columns(data, [("first", columns[:2])])
    assert [column for piece in pieces for column in piece.columns] == columns
    assert max(len(piece.columns) for piece in pieces) <= MOST_COLUMNS
    assert pieces[0].title == "t: first"
    assert "set 0 accuracy (%)" in str(html_table(table_of_figures(pieces[0])))
