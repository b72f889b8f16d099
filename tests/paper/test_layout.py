"""Tables of ours beside the paper's figures, in Markdown."""

import pytest

from structured_ensembles.paper import Cell, markdown_table, published, table_names

ROWS = ("single", "deep", "structured")
COLUMNS = ("cifar10/resnet20", "svhn/vgg11")
METRICS = dict.fromkeys(COLUMNS, "cls/accuracy")
PAPER = {
    ("single", "cifar10/resnet20"): Cell(0.8867, 0.0047),
    ("single", "svhn/vgg11"): Cell(0.9426, 0.0003, suspicious="a | repeat"),
    ("deep", "svhn/vgg11"): Cell(0.958, 0.0006, suspicious="another <doubt>"),
    ("structured", "svhn/vgg11"): Cell(0.9574, 0.0005, suspicious="a | repeat"),
}
OURS = {
    ("single", "cifar10/resnet20"): [0.88, 0.89, 0.90],  # deviation 0.01: squares of 0.01, 0, 0.01 over 2
    ("deep", "cifar10/resnet20"): [0.92],
    ("structured", "cifar10/resnet20"): [0.91, 0.93],  # as good as deep; deviation √2/100
    ("single", "svhn/vgg11"): [0.95],
}


def test_markdown_table_equals_a_hand_written_one() -> None:
    assert (
        markdown_table(ROWS, COLUMNS, METRICS, OURS, PAPER)
        == """\
| accuracy (%) | cifar10/resnet20 | svhn/vgg11 |
| --- | ---: | ---: |
| single | 89.00 ± 1.00 (88.67) | 95.00 (94.26¹) |
| deep | **92.00** | – (95.80²) |
| structured | **92.00 ± 1.41** | – (95.74¹) |

¹ suspicious: a | repeat

² suspicious: another <doubt>
"""
    )


def test_bold_needs_all_rows_a_direction_and_finite_figures() -> None:
    columns = ("cal/ece", "div/wc", "size/overhead")
    metrics = {column: column for column in columns}
    ours = {
        ("a", "cal/ece"): [0.02],
        ("b", "cal/ece"): [0.03],
        ("a", "div/wc"): [20.0],
        ("b", "div/wc"): [30.0],
        ("a", "size/overhead"): [2.5],
    }
    text = markdown_table(("a", "b"), columns, metrics, ours)
    assert text.splitlines()[0] == "|  | ECE (%) | WC diversity (%) | overhead (×) |"
    assert text.splitlines()[2:] == ["| a | **2.00** | 20.00 | 2.50 |", "| b | 3.00 | 30.00 | – |"]
    assert "**" not in markdown_table(("a",), ("cal/ece",), metrics, {("a", "cal/ece"): [0.1]})
    assert "**" not in markdown_table(
        ("a", "b"), ("cal/ece",), metrics, {("a", "cal/ece"): [0.1], ("b", "cal/ece"): [float("nan")]}
    )


def test_figures_that_look_the_same_are_both_bold() -> None:
    ours = {("a", "x"): [0.91234], ("b", "x"): [0.91228], ("c", "x"): [0.9122]}
    lines = markdown_table(("a", "b", "c"), ("x",), {"x": "cls/accuracy"}, ours).splitlines()
    assert lines[2:5] == ["| a | **91.23** |", "| b | **91.23** |", "| c | 91.22 |"]


def test_blank_cells_stay_empty() -> None:
    ours = {("single", "cifar10/resnet20"): [0.8], ("deep", "cifar10/resnet20"): [0.9], ("deep", "svhn/vgg11"): [0.95]}
    blank = [("structured", "cifar10/resnet20")]
    lines = markdown_table(ROWS, COLUMNS, METRICS, ours, blank=blank).splitlines()
    assert lines[2:] == ["| single | 80.00 | – |", "| deep | **90.00** | 95.00 |", "| structured |  | – |"]


def test_titles_and_pipes_are_escaped() -> None:
    text = markdown_table(("a|b",), ("x/cls/accuracy",), {"x/cls/accuracy": "cls/accuracy"}, {}, titles={"a|b": "A|B"})
    assert text.splitlines() == ["|  | x accuracy (%) |", "| --- | ---: |", "| A\\|B | – |"]


def test_more_than_nine_footnotes_have_distinct_marks() -> None:
    rows = [str(number) for number in range(12)]
    paper = {(row, "cal/ece"): Cell(0.01, suspicious=f"reason {row}") for row in rows}
    text = markdown_table(rows, ("cal/ece",), {"cal/ece": "cal/ece"}, {}, paper)
    assert "| 11 | – (1.00¹²) |" in text
    assert "¹² suspicious: reason 11" in text


@pytest.mark.parametrize("name", table_names())
def test_published_tables_render_without_our_figures(name: str) -> None:
    table = published(name)
    lines = markdown_table(table.rows, table.columns, table.metrics, {}, table.cells).splitlines()
    assert [line.split(" | ")[0] for line in lines[2 : 2 + len(table.rows)]] == [f"| {row}" for row in table.rows]
    assert all(line.count("– (") == len(table.columns) for line in lines[2 : 2 + len(table.rows)])
    reasons = {cell.suspicious for cell in table.cells.values() if cell.suspicious}
    assert sum("suspicious: " in line for line in lines) == len(reasons)
    if name == "continual-memory":
        assert any("(< 0.0010)" in line for line in lines)
    if name == "continual-memory-bits":
        assert any("(3,235,200)" in line for line in lines)


def test_invalid_arguments_are_errors() -> None:
    with pytest.raises(
        ValueError, match=r"ours must have figures of rows and columns of this table, not of \[\('deep', 'mnist'\)\]"
    ):
        markdown_table(ROWS, COLUMNS, METRICS, {("deep", "mnist"): [0.9]})
    with pytest.raises(ValueError, match="has none for svhn/vgg11"):
        markdown_table(ROWS, COLUMNS, {"cifar10/resnet20": "cls/accuracy"}, {})
    with pytest.raises(ValueError, match=r"metric must be one of cls/accuracy, .*not 'cls/top5'"):
        markdown_table(ROWS, COLUMNS[:1], {"cifar10/resnet20": "cls/top5"}, {})
