"""Printed figures: percentages, counts and decimal numbers, by the whole name of a figure."""

import pytest

from structured_ensembles.cli.printing import format_figure


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("cls/accuracy", "25.00 %"),
        ("first/3/accuracy", "25.00 %"),
        ("cal/ece15_t", "25.00 %"),
        ("cal/ece/logits", "25.00 %"),
        ("unc/coverage_at_5_risk", "25.00 %"),
        ("reg/coverage_at_90", "25.00 %"),
        ("adv/fgsm@0.02", "25.00 %"),
        ("cor/mean@3/filtered_accuracy", "25.00 %"),
        ("official/mean@3", "25.00 %"),
        ("official/fog@3/logits", "25.00 %"),
        ("ood/entropy_auroc", "25.00 %"),
        ("ood/mutual_information_fpr95_foreign", "25.00 %"),
        ("cal/nll_t", "0.2500"),
        ("size/overhead", "0.2500"),
        ("size/parameters", "0"),
        ("own/pieces", "0.2500"),  # has the letters of ece, and is no calibration error
        ("own/forsaken@night", "0.2500"),
    ],
)
def test_the_format_follows_from_the_name_not_from_letters_in_it(name: str, shown: str) -> None:
    assert format_figure(name, 0.25) == shown


def test_counts_have_separators_and_unknown_values_a_dash() -> None:
    assert format_figure("size/parameters", 1234567.0) == "1,234,567"
    assert format_figure("cls/accuracy", None) == "–"
