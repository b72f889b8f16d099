"""reproduce(): run what a table or figure of the paper needs, and lay our numbers beside the published ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from structured_ensembles.continual.experiment import ContinualExperiment
from structured_ensembles.continual.results import read_continual_run
from structured_ensembles.paper.carry_out import carry_out, check_names, is_complete
from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.studies import Part
from structured_ensembles.paper.tables import corruption_notes, study_notes, study_table
from structured_ensembles.report.continual_pictures import continual_pictures
from structured_ensembles.report.page import write_report
from structured_ensembles.report.pictures import pictures
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.finished import Finished, read_run
from structured_ensembles.runs.grid import Job, run_grid
from structured_ensembles.runs.workers import Backend


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
        check_names(own)
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


def _read(experiment: Experiment | ContinualExperiment) -> Callable[[Path], Finished]:
    return read_continual_run if isinstance(experiment, ContinualExperiment) else read_run
