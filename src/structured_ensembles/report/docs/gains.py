"""The README's table of what ensembles gain: a network, members cut out of it, and full networks, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from structured_ensembles.common.markdown import write_table
from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.layout import format_mean
from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.paper.studies import Study, StudyOptions
from structured_ensembles.paper.wide_studies import tuned_study
from structured_ensembles.report.docs.choice import ALONE, FIVE, HALVES
from structured_ensembles.report.docs.differences import list_runs_of_row
from structured_ensembles.report.docs.records import NOT_RUN, Records

FIGURES = {
    "cls/accuracy": "accuracy (%)",
    "cal/nll": "NLL",
    "cal/ece15": "ECE (%)",
    "cal/nll_t": "NLL, temperature",
    "cal/ece15_t": "ECE, temperature (%)",
}
HEADER = ("CIFAR-10", "memory", *FIGURES.values(), "seeds")


@dataclass(frozen=True)
class Ensemble:
    """Row of the table: an ensemble, or the network itself, as a row of a study. text: names it for newcomers."""

    text: str
    study: Study
    row: str


def list_ensembles() -> list[Ensemble]:
    """List the networks, each with the ensembles that compete with it."""
    front = study("front", StudyOptions(datasets=("cifar10",), models=("resnet18",)))
    wide = tuned_study()
    small = study("table-accuracy", StudyOptions(datasets=("cifar10",), models=("resnet20",)))
    return [
        Ensemble("**ResNet18**", front, "single"),
        Ensemble("four members in its memory", front, "structured ×4, 1, coupled"),
        Ensemble("four full networks", front, "deep ×4"),
        Ensemble("**ResNet20, 4× wide**", wide, ALONE),
        Ensemble("two halves in its memory", wide, "random ×2, 40 epochs"),
        Ensemble("four halves", wide, HALVES),
        Ensemble("**ResNet20**", small, "single"),
        Ensemble("five halves", small, FIVE),
        Ensemble("five full networks", small, "deep"),
    ]


def gains_table(records: Records) -> str:
    """Write a line for each network and ensemble: its memory in networks, and its figures, mean ± deviation."""
    lines = []
    for ensemble in list_ensembles():
        runs = list_runs_of_row(ensemble.study, ensemble.row)
        memory = records.by_seed(runs, "size/overhead", "mean").values()
        values = [list(records.by_seed(runs, figure, "mean").values()) for figure in FIGURES]
        cells = [
            format_mean(by_seed, metric_of(figure)) if by_seed else NOT_RUN
            for figure, by_seed in zip(FIGURES, values, strict=True)
        ]
        size = f"{fmean(memory):.1f}" if memory else NOT_RUN
        lines.append((ensemble.text, size, *cells, str(max(map(len, values)))))
    return write_table(HEADER, lines, right=range(1, len(HEADER)))
