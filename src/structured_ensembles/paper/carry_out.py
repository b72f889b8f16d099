"""carry_out(): one run of a study, in its folder."""

from __future__ import annotations

from pathlib import Path

from structured_ensembles.common.checks import check_choice
from structured_ensembles.continual import LEARNERS
from structured_ensembles.continual.experiment import ContinualExperiment, run_continual
from structured_ensembles.data.sources import data_sets, is_folder
from structured_ensembles.methods import METHODS
from structured_ensembles.runs.experiment import Experiment, train_experiment
from structured_ensembles.runs.measurement import Request, find_missing, has_official, measure_experiment
from structured_ensembles.zoo.by_name import find_function, find_model


def carry_out(
    experiment: Experiment | ContinualExperiment, folder: Path, request: Request, root: Path | None, device: str
) -> None:
    """Train and measure one run of the grid, as far as it is not done."""
    if isinstance(experiment, ContinualExperiment):
        run_continual(experiment, folder, root=root, device=device, quiet=True)
        return
    train_experiment(experiment, folder, root=root, device=device, quiet=True)
    trusted = (experiment.dataset, experiment.model)  # the user named them on the command line
    measure_experiment(folder, request, root=root, device=device, trust_code=trusted)


def is_complete(
    experiment: Experiment | ContinualExperiment, folder: Path, request: Request, root: Path | None = None
) -> bool:
    """Tell whether a run is trained, and all of the request is measured."""
    if isinstance(experiment, ContinualExperiment):
        return (folder / "result.json").exists()
    official = request.corruptions and has_official(experiment.dataset, root)
    return (folder / "result.json").exists() and find_missing(folder, request, official) is None


def check_names(experiment: Experiment | ContinualExperiment) -> None:
    """Raise a ValueError, before any work, for an unknown data set, model or method."""
    is_continual = isinstance(experiment, ContinualExperiment)
    find_function("method", experiment.method, LEARNERS if is_continual else METHODS)
    find_model(experiment.model)
    if is_folder(experiment.dataset):
        return
    if ":" in experiment.dataset:
        find_function("dataset", experiment.dataset, {})
    else:
        check_choice("dataset", experiment.dataset, list(data_sets()))
