"""Printing of figures and messages."""

from collections.abc import Mapping

from structured_ensembles.common.tables import escape_control_characters, text_table

PERCENTAGES = frozenset((
    "accuracy", "member_accuracy", "ece", "ece15", "adaptive_ece", "classwise_ece", "disagreement", "coverage",
    "coverage_at_90", "coverage_at_5_risk", "auroc", "aurc", "fpr95", "kept", "kept_accuracy", "kept_right",
    "discarded", "filtered_accuracy",
))  # fmt: skip
# Families of shares, such as the accuracies cor/fog@3 and official/fog@3, and ood/entropy_fpr95
SHARES = ("adv", "cor", "official", "ood")


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
    family, *words = name.split("/")
    if family in SHARES or any(word.removesuffix("_t") in PERCENTAGES for word in words):
        return f"{100 * value:.2f} %"
    is_count = family == "size" and name != "size/overhead"
    return f"{value:,.0f}" if is_count else f"{value:.4f}"


def printable_lines(text: str) -> str:
    """Escape a message of several lines, as `escape_control_characters` does one line."""
    return "\n".join(map(escape_control_characters, text.splitlines()))
