"""reproduce(): run what a table or figure of the paper needs, and lay our numbers beside the published ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from structured_ensembles.checks import check_choice
from structured_ensembles.continual import LEARNERS
from structured_ensembles.continual.experiment import ContinualExperiment, run_continual
from structured_ensembles.data.sources import data_sets
from structured_ensembles.ensemble import Combine
from structured_ensembles.evaluation.corruptions import ORIGIN
from structured_ensembles.evaluation.robustness import best_source
from structured_ensembles.experiment import (
    Experiment,
    Request,
    has_official,
    measure_experiment,
    train_experiment,
    unmeasured,
)
from structured_ensembles.grid import Job, run_grid
from structured_ensembles.methods import METHODS
from structured_ensembles.models import find_function, find_model
from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.studies import RESCALED, Part, Study
from structured_ensembles.report.collected import Finished, pictures, read_run
from structured_ensembles.report.continual_collected import continual_pictures, read_continual_run
from structured_ensembles.report.page import Lines, write_report
from structured_ensembles.workers import Backend

RULE_TITLES: dict[Combine, str] = {
    "mean": "Combined by the mean of probabilities, our default",
    "logits": "Combined by the softmax of the mean logits, as the published figures are",
}


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
    official = _official_datasets(wanted, done)
    lines = [_lines(wanted, done, rule, official) for rule in wanted.rules]
    intro = _intro(wanted, part) + _corruption_notes(wanted, official)
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


def _official_datasets(wanted: Study, done: dict[str, Finished]) -> set[str]:
    """Find the data sets whose runs were all measured on the official corrupted images."""
    if not wanted.request.corruptions:
        return set()
    figures: dict[str, list[Mapping[str, float]]] = {}
    for run in done.values():
        figures.setdefault(run.config["dataset"], []).append(run.figures)
    severities = wanted.request.severities
    return {name for name, own in figures.items() if all(best_source(own, at) == "official" for at in severities)}


def _lines(wanted: Study, done: dict[str, Finished], rule: Combine, official: set[str]) -> Lines:
    """Build the table of one combination rule; official: data sets shown with their official corrupted images."""
    ours = {key: list(values) for key, values in wanted.counted.items()}
    for key, (experiments, figure) in wanted.sources.items():
        runs = [done[own.folder] for own in experiments if own.folder in done]
        measured = experiments[0].dataset in official and figure.startswith("cor/")
        shown = f"official/{figure.removeprefix('cor/')}" if measured else figure
        values = [found[shown] for run in runs if shown in (found := run.combined_by(rule))]
        if values:
            ours[key] = values
    filled = wanted.sources.keys() | wanted.counted.keys()
    blank = {(row, column) for row in wanted.rows for column in wanted.columns if (row, column) not in filled}
    title = RULE_TITLES[rule] if len(wanted.rules) > 1 else ""
    return Lines(title, wanted.rows, wanted.columns, wanted.metrics, ours, wanted.paper, blank)


def _intro(wanted: Study, part: Part) -> list[str]:
    if wanted.counted:
        lines = ["Counted for the paper's backbones; in brackets what the paper printed."]
        if wanted.name == "table-continual-overhead":
            lines.append(
                "b: the floats of the backbone. The paper's bound for structured learners, 0.001·b binary values per "
                "task, holds for half-VGG11; LeNet-5 has more neurons for its size."
            )
        return lines
    seeds = ", ".join(map(str, part.seeds))
    lines = [
        f"Ours: mean ± standard deviation over seeds {seeds}. In brackets what the paper printed; struck through where "
        "it cannot be trusted."
    ]
    if len(wanted.rules) > 1:
        lines.append(
            "Predictions of the members are combined in two ways, one table each: the published numbers come from the "
            "softmax of the mean logits. Plots are of the mean of probabilities."
        )
    if any(row.partition(f", {RESCALED}")[0].endswith((", layer", ", network")) for row in wanted.rows):
        lines.append(
            "layer, network: neurons ranked in each layer, or in the whole network at once. The paper's text says the "
            "first, its overheads can only come from the second; its numbers stand beside both."
        )
    if any(RESCALED in row for row in wanted.rows):
        lines.append(
            "rescaled: inherited weights × √(full fan-in / kept fan-in), for networks without normalisation, whose "
            "activations shrink otherwise. The paper does not do it."
        )
    if part.smoke:
        lines.append("A trial run on digits for three epochs: it shows that everything works, and nothing else.")
    elif (recipe := _recipe(wanted)) != "paper" or part.epochs is not None or part.limit is not None:
        lines.append(
            f"Not the paper's training: recipe {recipe}"
            + (f", {part.epochs} epochs" if part.epochs is not None else "")
            + (f", {part.limit} training samples" if part.limit is not None else "")
            + "."
        )
    return lines


def _recipe(wanted: Study) -> str:
    """Name the recipe of a study's runs; continual learners are trained as the paper says."""
    return next((own.recipe for own in wanted.experiments if isinstance(own, Experiment)), "paper")


def _corruption_notes(wanted: Study, official: set[str]) -> list[str]:
    """Say which corrupted images the figures are of, and what their mean is over."""
    if not wanted.request.corruptions:
        return []
    lines = ["Figures under corruptions are means over the 15 standard ones."]
    if official:
        lines.append(f"For {', '.join(sorted(official))} they are of the official corrupted images.")
    if {own.dataset for own in wanted.experiments} - official:
        lines.append(("Elsewhere: " if official else "") + ORIGIN)
    return lines
