"""When a structured ensemble pays: recorded ensembles against what one would take instead, with the memory of both."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from structured_ensembles.common.markdown import write_table
from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.studies import Study, StudyOptions
from structured_ensembles.paper.wide_studies import tuned_study
from structured_ensembles.report.docs.differences import list_runs_of_row, subtract_rows
from structured_ensembles.report.docs.records import NOT_RUN, Records

FIGURES = {
    "cls/accuracy": "accuracy (points)",
    "cal/nll": "NLL",
    "cal/ece15": "ECE, 15 bins (points)",
    "cal/nll_t": "NLL after temperature",
    "cal/ece15_t": "ECE after temperature (points)",
}
HEADER = ("CIFAR-10", "memory (networks)", *FIGURES.values(), "seeds")
HALVES, TUNED, ALONE = "random ×4, 40 epochs", "prune-and-tune ×4, 30 + 10 epochs", "single, 40 epochs"
FIVE = "structured, layer"


@dataclass(frozen=True)
class Comparison:
    """Two rows of a study: the first is compared with the second.

    text: names both in words.
    """

    text: str
    study: Study
    pair: tuple[str, str]


def list_comparisons() -> list[Comparison]:
    """List the comparisons that decide whether to cut members out of a network: wide networks, then a small one."""
    front = study("front", StudyOptions(datasets=("cifar10",), models=("resnet18",)))
    wide = tuned_study()
    small = study("table-accuracy", StudyOptions(datasets=("cifar10",), models=("resnet20",)))
    return [
        Comparison("ResNet18: four coupled halves − the network", front, ("structured ×4, 1, coupled", "single")),
        Comparison("wide network: two halves − the network", wide, ("random ×2, 40 epochs", ALONE)),
        Comparison("wide network: four halves − the network", wide, (HALVES, ALONE)),
        Comparison("trained wide network: four halves of it, tuned − the network", wide, (TUNED, ALONE)),
        Comparison("trained wide network: four halves of it, tuned − four from scratch", wide, (TUNED, HALVES)),
        Comparison("ResNet20: five halves − the network", small, (FIVE, "single")),
        Comparison("ResNet20: five halves − five full networks", small, (FIVE, "deep")),
        Comparison("ResNet20: five halves, learned − drawn by lot", small, (FIVE, "random")),
    ]


def choice_table(records: Records) -> str:
    """Write a line for each comparison: the memory of both rows, and differences by the mean of probabilities."""
    lines = []
    for comparison in list_comparisons():
        differences = [subtract_rows(records, comparison.study, comparison.pair, figure, "mean") for figure in FIGURES]
        cells = [NOT_RUN if difference is None else difference.number for difference in differences]
        seeds = max(0 if difference is None else len(difference.values) for difference in differences)
        lines.append((comparison.text, _memory(records, comparison), *cells, str(seeds)))
    return write_table(HEADER, lines, right=range(1, len(HEADER)))


def _memory(records: Records, comparison: Comparison) -> str:
    """Format the parameters of both rows, in networks: "2.0 against 1.0"."""
    overheads = [
        records.by_seed(list_runs_of_row(comparison.study, row), "size/overhead", "mean").values()
        for row in comparison.pair
    ]
    return " against ".join(f"{fmean(values):.1f}" for values in overheads) if all(overheads) else NOT_RUN
