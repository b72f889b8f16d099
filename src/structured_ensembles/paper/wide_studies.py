"""Studies of wide networks, which the paper does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from structured_ensembles.paper.front import COLUMNS
from structured_ensembles.paper.published import Cell
from structured_ensembles.paper.sections import tuned_members, wide_front, wide_resnets
from structured_ensembles.paper.studies import SEEDS, Study
from structured_ensembles.runs.evaluations import RULES
from structured_ensembles.runs.experiment import Experiment

# Accuracy, NLL and ECE after 200 epochs, from the README files of google/uncertainty-baselines, baselines/cifar.
UNCERTAINTY_BASELINES = {
    "cifar10": {"single": (0.960, 0.159, 0.023), "MIMO": (0.964, 0.123, 0.010), "deep ×4": (0.966, 0.114, 0.010)},
    "cifar100": {"single": (0.798, 0.875, 0.086), "MIMO": (0.820, 0.690, 0.022), "deep ×4": (0.827, 0.666, 0.021)},
}
PUBLISHED_COLUMNS = ("cls/accuracy", "cal/nll", "cal/ece15")


def wide_front_study() -> Study:
    """Return the study of the front's centre with a ResNet20 four times as wide."""
    return _study("front-wide-resnet20", "Quality against memory, a ResNet20 four times as wide", wide_front(SEEDS))


def tuned_study() -> Study:
    """Return the study of members that are tuned out of a trained network, against members trained from scratch."""
    title = "Members of a trained network, a ResNet20 four times as wide"
    return _study("tuned-wide-resnet20", title, tuned_members(SEEDS), _tuned_row)


def wide_resnet_study(dataset: str) -> Study:
    """Return the study of WRN-28-10 on one data set, beside figures published by others."""
    runs = [run for run in wide_resnets(SEEDS) if run.dataset == dataset]
    ours = _study(f"wrn28-10-{dataset}", f"WRN-28-10, {dataset}", runs)
    cells = {
        (row, column): Cell(value)
        for row, values in UNCERTAINTY_BASELINES[dataset].items()
        for column, value in zip(PUBLISHED_COLUMNS, values, strict=True)
    }
    rows = (*ours.rows, *(row for row in UNCERTAINTY_BASELINES[dataset] if row not in ours.rows))
    return replace(ours, rows=rows, paper=cells)


def _study(name: str, title: str, experiments: list[Any], label: Callable[[Experiment], str] | None = None) -> Study:
    """Return a study with a row per kind of experiment and the columns of the front. label: by default as there."""
    by_row: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        by_row.setdefault((label or _row)(experiment), []).append(experiment)
    sources = {(row, column): (tuple(runs), column) for row, runs in by_row.items() for column in COLUMNS}
    metrics = dict(zip(COLUMNS, COLUMNS, strict=True))
    return Study(name, title, tuple(by_row), COLUMNS, metrics, sources, {}, rules=RULES)


def _row(experiment: Experiment) -> str:
    """Label an experiment as the front does."""
    settings = experiment.method_arguments
    memory = f", {settings['memory']:g}" if "memory" in settings else ""
    members = f" ×{experiment.members}" if experiment.members > 1 else ""
    return f"{experiment.method}{members}{memory}{', coupled' * bool(settings.get('coupled'))}"


def _tuned_row(experiment: Experiment) -> str:
    """Label an experiment by its method, what its members keep, and how long they are trained."""
    settings, epochs = experiment.method_arguments, experiment.changes["epochs"]
    tuned = settings.get("tune_epochs", 0)
    how_long = f"{epochs - tuned} + {tuned} epochs" if tuned else f"{epochs} epochs"
    random = ", random" * (settings.get("selection") == "random")
    return f"{_row(experiment)}{random}, {how_long}"
