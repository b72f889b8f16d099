"""Figures and messages as people read them."""

from collections.abc import Mapping

from structured_ensembles.common.tables import printable, text_table

PERCENT = ("accuracy", "ece", "disagreement", "discarded", "auroc", "aurc", "fpr95", "kept", "coverage", "@")


def figures_table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """A table with one row per figure and one column per method."""
    names = list(dict.fromkeys(name for figures in columns.values() for name in figures))
    rows = [(printable(name), *(shown(name, own.get(name)) for own in columns.values())) for name in names]
    return text_table(("", *map(printable, columns)), rows)


def shown(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if any(word in name for word in PERCENT):
        return f"{100 * value:.2f} %"
    counted = name.startswith("size/") and name != "size/overhead"
    return f"{value:,.0f}" if counted else f"{value:.4f}"


def printable_lines(text: str) -> str:
    """As `printable`, of a message that may have several lines."""
    return "\n".join(map(printable, text.splitlines()))
