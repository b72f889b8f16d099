"""reproduce(): run what a table or figure of the paper needs, and lay our numbers beside the published ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from structured_ensembles.common.checks import check_choice
from structured_ensembles.continual import LEARNERS
from structured_ensembles.continual.experiment import ContinualExperiment, run_continual
from structured_ensembles.data.sources import data_sets
from structured_ensembles.methods import METHODS
from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.studies import Part
from structured_ensembles.paper.tables import corruption_notes, study_notes, study_table
from structured_ensembles.report.collected import Finished, pictures, read_run
from structured_ensembles.report.continual_collected import continual_pictures, read_continual_run
from structured_ensembles.report.page import write_report
from structured_ensembles.runs.experiment import (
    Experiment,
    Request,
    has_official,
    measure_experiment,
    train_experiment,
    unmeasured,
)
from structured_ensembles.runs.grid import Job, run_grid
from structured_ensembles.runs.workers import Backend
from structured_ensembles.zoo.by_name import find_function, find_model


@dataclass(frozen=True)
class Reproduced:
    """What came of it: the page, how many runs were there already or are new, and what went wrong by name."""

    page: Path
    known: int
    new: int
    failed: dict[str, str]


def reproduce(
    name: str,
    out: Path,
    part: Part,
    *,
    root: Path | None = None,
    device: str = "auto",
    backend: Backend = "loky",
    workers: int | None = None,
    quiet: bool = False,
) -> Reproduced:
    """Train and measure what is missing, then write `out/name/report.html`, `report.md` and `figures/`.

    Runs lie in `out/runs` and are shared by all studies: a trained ensemble is measured many times, trained once.
    """
    wanted = study(name, part)
    for own in wanted.experiments:
        _check_names(own)
    folder = out / "runs"
    missing = [own for own in wanted.experiments if not is_complete(own, folder / own.folder, wanted.request, root)]
    settings = {"request": wanted.request, "root": root, "device": device}
    jobs = [
        Job(own.folder, carry_out, {"experiment": own, "folder": folder / own.folder, **settings}) for own in missing
    ]
    outcomes = run_grid(jobs, backend=backend, workers=workers, quiet=quiet)
    failed = {outcome.name: outcome.error or "" for outcome in outcomes if outcome.state == "failed"}
    done = {
        own.folder: _read(own)(folder / own.folder)
        for own in wanted.experiments
        if own.folder not in failed and (folder / own.folder / "result.json").exists()
    }
    where = out / name
    draw = continual_pictures if "continual" in name else pictures
    lines = [study_table(wanted, done, rule) for rule in wanted.rules]
    intro = study_notes(wanted, part) + corruption_notes(wanted, done)
    page = write_report(where, wanted.title, intro, lines, list(done.values()), draw)
    return Reproduced(page, len(wanted.experiments) - len(jobs), len(jobs) - len(failed), failed)


def carry_out(
    experiment: Experiment | ContinualExperiment, folder: Path, request: Request, root: Path | None, device: str
) -> None:
    """One run of the grid: train it, unless it is, and measure what is not measured yet."""
    if isinstance(experiment, ContinualExperiment):
        run_continual(experiment, folder, root=root, device=device, quiet=True)
        return
    train_experiment(experiment, folder, root=root, device=device, quiet=True)
    named = (experiment.dataset, experiment.model)  # by the user, on the command line
    measure_experiment(folder, request, root=root, device=device, trust_code=named)


def is_complete(
    experiment: Experiment | ContinualExperiment, folder: Path, request: Request, root: Path | None = None
) -> bool:
    """Whether a run is trained, and all that is asked for is measured."""
    if isinstance(experiment, ContinualExperiment):
        return (folder / "result.json").exists()
    official = request.corruptions and has_official(experiment.dataset, root)
    return (folder / "result.json").exists() and unmeasured(folder, request, official) is None


def _check_names(experiment: Experiment | ContinualExperiment) -> None:
    """Before any work: a ValueError for a name that nothing has."""
    learns = isinstance(experiment, ContinualExperiment)
    find_function("method", experiment.method, LEARNERS if learns else METHODS)
    find_model(experiment.model)
    if ":" in experiment.dataset:
        find_function("dataset", experiment.dataset, {})
    else:
        check_choice("dataset", experiment.dataset, list(data_sets()))


def _read(experiment: Experiment | ContinualExperiment) -> Callable[[Path], Finished]:
    return read_continual_run if isinstance(experiment, ContinualExperiment) else read_run
