"""Tables of a study, filled with finished runs, and sentences on how to read them.

`sens reproduce` and `sens report --docs` both use them.
"""

from __future__ import annotations

from collections.abc import Mapping

from structured_ensembles.common.plurals import counted
from structured_ensembles.evaluation.corruptions import ORIGIN
from structured_ensembles.evaluation.robustness import best_source
from structured_ensembles.paper.layout import TableData
from structured_ensembles.paper.studies import RESCALED, Study, StudyOptions
from structured_ensembles.prediction.combination import Combine
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.finished import Finished

RULE_TITLES: dict[Combine, str] = {
    "mean": "Combined by the mean of probabilities, our default",
    "logits": "Combined by the softmax of the mean logits, as the published figures are",
}


def fill_study_table(wanted: Study, done: Mapping[str, Finished], rule: Combine) -> TableData:
    """Build the table of one combination rule.

    done: finished runs by the name of their folder. A cell of which no run is done has no entry in `ours`; one whose
        runs do not have the figure has an empty one.
    """
    official = _official_datasets(wanted, done)
    ours = {key: list(values) for key, values in wanted.counted.items()}
    for key, (experiments, figure) in wanted.sources.items():
        runs = [done[experiment.folder] for experiment in experiments if experiment.folder in done]
        is_official = experiments[0].dataset in official and figure.startswith("cor/")
        name = f"official/{figure.removeprefix('cor/')}" if is_official else figure
        values = [figures[name] for run in runs if name in (figures := run.combined_by(rule, wanted.split))]
        if runs:
            ours[key] = values
    filled = wanted.sources.keys() | wanted.counted.keys()
    blank = {(row, column) for row in wanted.rows for column in wanted.columns if (row, column) not in filled}
    title = RULE_TITLES[rule] if len(wanted.rules) > 1 else ""
    return TableData(title, wanted.rows, wanted.columns, wanted.metrics, ours, wanted.paper, blank)


def write_study_notes(wanted: Study, options: StudyOptions) -> list[str]:
    """Return sentences on how to read the tables of a study."""
    if wanted.counted:
        lines = ["Counted for the paper's backbones; in brackets what the paper printed."]
        if wanted.name == "table-continual-overhead":
            lines.append(
                "b: the floats of the backbone. The paper's bound for structured learners, 0.001·b binary values per "
                "task, holds for half-VGG11; LeNet-5 has more neurons for its size."
            )
        return lines
    runs_per_cell = max(len(runs) for runs, _ in wanted.sources.values())
    has_own_seeds = runs_per_cell != len(options.seeds)
    seeds = f"{runs_per_cell} seeds" if has_own_seeds else f"seeds {', '.join(map(str, options.seeds))}"
    printed = " In brackets what the paper printed; a note says where it cannot be trusted." if wanted.paper else ""
    figures = f"mean ± standard deviation over {seeds}" if runs_per_cell > 1 else f"one seed, {options.seeds[0]}"
    lines = [f"Ours: {figures}.{printed}"]
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
    if options.smoke:
        lines.append("A trial run on digits for a few epochs: it shows that everything works, and nothing else.")
    elif (recipe := _recipe(wanted)) != "paper" or options.epochs is not None or options.limit is not None:
        lines.append(
            f"Not the paper's training: recipe {recipe}"
            + (f", {counted(options.epochs, 'epoch')}" if options.epochs is not None else "")
            + (f", {counted(options.limit, 'training sample')}" if options.limit is not None else "")
            + "."
        )
    return lines


def _recipe(wanted: Study) -> str:
    """Return the name of the recipe of a study's runs; continual learners are trained as in the paper."""
    return next((run.recipe for run in wanted.experiments if isinstance(run, Experiment)), "paper")


def write_corruption_notes(wanted: Study, done: Mapping[str, Finished]) -> list[str]:
    """Return sentences on the corrupted images of the figures, and on their mean."""
    if not wanted.request.corruptions:
        return []
    official = _official_datasets(wanted, done)
    lines = ["Figures under corruptions are means over the 15 standard ones."]
    if official:
        lines.append(f"For {', '.join(sorted(official))} they are of the official corrupted images.")
    if {run.dataset for run in wanted.experiments} - official:
        lines.append(("Elsewhere: " if official else "") + ORIGIN)
    return lines


def _official_datasets(wanted: Study, done: Mapping[str, Finished]) -> set[str]:
    """Find the data sets whose runs were all measured on the official corrupted images."""
    if not wanted.request.corruptions:
        return set()
    figures: dict[str, list[Mapping[str, float]]] = {}
    for run in [done[planned.folder] for planned in wanted.experiments if planned.folder in done]:
        figures.setdefault(run.config["dataset"], []).append(run.figures)
    severities = wanted.request.severities
    return {
        name
        for name, run_figures in figures.items()
        if all(best_source(run_figures, severity) == "official" for severity in severities)
    }
