"""Printing of figures and messages."""

from collections.abc import Mapping

from structured_ensembles.common.tables import escape_control_characters, text_table

PERCENT = ("accuracy", "ece", "disagreement", "discarded", "auroc", "aurc", "fpr95", "kept", "coverage", "@")


def format_figures(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Format a table with one row per figure and one column per method."""
    names = list(dict.fromkeys(name for figures in columns.values() for name in figures))
    rows = [
        (escape_control_characters(name), *(format_figure(name, figures.get(name)) for figures in columns.values()))
        for name in names
    ]
    return text_table(("", *map(escape_control_characters, columns)), rows)


def format_figure(name: str, value: float | None) -> str:
    """Format a figure: a percentage, a count or a decimal number, by its name; a dash for None."""
    if value is None:
        return "–"
    if any(word in name for word in PERCENT):
        return f"{100 * value:.2f} %"
    counted = name.startswith("size/") and name != "size/overhead"
    return f"{value:,.0f}" if counted else f"{value:.4f}"


def printable_lines(text: str) -> str:
    """Escape a message of several lines, as `escape_control_characters` does one line."""
    return "\n".join(map(escape_control_characters, text.splitlines()))
