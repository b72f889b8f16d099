"""Study of subsets: does it matter which neurons a network keeps?

Six random subsets of one untrained ResNet20, each trained by five seeds, as single networks: if the means of subsets
differ by no more than the seeds explain, a rule of selection has little to win. The six are trained in one fleet, since
a member of a fleet is the network trained alone. The initial weights are the same in all runs; for other weights, "the
same neurons" would mean nothing.
"""

from __future__ import annotations

from typing import Any

from structured_ensembles.paper.random_subsets import METHOD
from structured_ensembles.paper.studies import Study, StudyOptions, list_setups
from structured_ensembles.paper.variance import TwoWay, analyse_two_ways
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.measurement import Request

SETUPS = ("cifar10/resnet20",)
SHARES = (0.5, 0.8)  # of the neurons that are pruned
SUBSETS, TRAINING_SEEDS = 6, (0, 1, 2, 3, 4)
EPOCHS, SMOKE_EPOCHS = 30, 2
COLUMNS = {"cls/accuracy": "accuracy", "cal/nll": "nll"}  # by metric, the name of a member's figure
EVERY_MEMBER = Request(members=True)


def subsets(options: StudyOptions) -> Study:
    """Return the study: a row for each share and subset; `options.seeds` do not count, the study has its own."""
    sources: dict[tuple[str, str], Any] = {}
    ((dataset, model),) = list_setups(options, SETUPS)[:1]
    for prune in SHARES:
        runs = list_subset_runs(options, dataset, model, prune)
        for number in range(SUBSETS):
            sources |= {
                (row_of(prune, number), column): (runs, f"member/{number}/{figure}")
                for column, figure in COLUMNS.items()
            }
    rows = tuple(dict.fromkeys(row for row, _ in sources))
    metrics = {column: column for column in COLUMNS}
    title = "Single networks, the same subsets trained by several seeds"
    return Study("subsets", title, rows, tuple(COLUMNS), metrics, sources, {}, EVERY_MEMBER)


def row_of(prune: float, number: int) -> str:
    """Return the label of a subset's row."""
    return f"{100 * prune:.0f} % pruned, subset {number + 1}"


def list_subset_runs(options: StudyOptions, dataset: str, model: str, prune: float) -> tuple[Experiment, ...]:
    """Return one experiment per training seed, all with the subsets and initial weights of seed 0."""
    changes: dict[str, Any] = {"epochs": options.epochs or (SMOKE_EPOCHS if options.smoke else EPOCHS), "keep": "last"}
    if options.smoke:
        changes["rate"] = 0.02  # the recipe's is too high for so small a network
    recipe = options.recipe or "modern"
    return tuple(
        Experiment(
            dataset, model, METHOD, 0, SUBSETS, {}, {"prune": prune, "training_seed": training_seed}, recipe, changes,
            limit=options.limit,
        )
        for training_seed in TRAINING_SEEDS
    )  # fmt: skip


def analyse_subsets(table: list[list[float]]) -> TwoWay | None:
    """Analyse values[subset][training seed]; None until every subset has every training seed."""
    complete = len(table) == SUBSETS and all(len(row) == len(TRAINING_SEEDS) for row in table)
    return analyse_two_ways(table) if complete else None
