"""reproduce(): run a table or figure of the paper, with our numbers beside the published ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from structured_ensembles.continual.experiment import ContinualExperiment
from structured_ensembles.continual.results import read_continual_run
from structured_ensembles.paper.carry_out import carry_out, check_names, is_complete
from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.studies import Study, StudyOptions
from structured_ensembles.paper.tables import fill_study_table, write_corruption_notes, write_study_notes
from structured_ensembles.report.page import describe_precisions, write_report
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.finished import read_run
from structured_ensembles.runs.grid import Job, run_grid
from structured_ensembles.runs.workers import Backend


@dataclass(frozen=True)
class Reproduced:
    """Result of a reproduction: the page, the numbers of known and new runs, and errors by name of the run."""

    page: Path
    known: int
    new: int
    failed: dict[str, str]


def reproduce(
    name: str,
    out: Path,
    options: StudyOptions,
    *,
    root: Path | None = None,
    device: str = "auto",
    backend: Backend = "loky",
    workers: int | None = None,
    quiet: bool = False,
) -> Reproduced:
    """Train and measure missing runs, then write `out/name/report.html`, `report.md` and `figures/`.

    Runs lie in `out/runs` and are shared by all studies: an ensemble is trained once and measured many times.
    """
    wanted = study(name, options)
    for run in wanted.experiments:
        check_names(run)
    folder = out / "runs"
    missing = [run for run in wanted.experiments if not is_complete(run, folder / run.folder, wanted.request, root)]
    settings = {"request": wanted.request, "root": root, "device": device}
    jobs = [
        Job(run.folder, carry_out, {"experiment": run, "folder": folder / run.folder, **settings}) for run in missing
    ]
    outcomes = run_grid(jobs, backend=backend, workers=workers, quiet=quiet)
    failed = {outcome.name: outcome.error or "" for outcome in outcomes if outcome.state == "failed"}
    done = {
        run.folder: (read_continual_run if isinstance(run, ContinualExperiment) else read_run)(folder / run.folder)
        for run in wanted.experiments
        if run.folder not in failed and (folder / run.folder / "result.json").exists()
    }
    report_folder = out / name
    lines = [fill_study_table(wanted, done, rule) for rule in wanted.rules]
    intro = write_study_notes(wanted, options) + write_corruption_notes(wanted, done)
    runs = list(done.values())
    if wanted.split != "test":  # charts and sentences are of the test split, which must not choose among these rows
        intro += [*describe_precisions(runs), f"Figures of the {wanted.split} split only: rows are chosen by them."]
        runs = []
    page = write_report(report_folder, name_members(wanted), intro, lines, runs)
    return Reproduced(page, len(wanted.experiments) - len(jobs), len(jobs) - len(failed), failed)


def name_members(wanted: Study) -> str:
    """Return the title of a study with the number of members that its runs have: the paper's ensembles are of five."""
    members = {run.members for run in wanted.experiments if isinstance(run, Experiment)}
    if len(members) != 1 or members == {5}:
        return wanted.title
    return wanted.title.replace("of five", f"of {members.pop()}")
