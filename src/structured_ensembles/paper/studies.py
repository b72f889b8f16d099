"""Studies: the experiments behind each table and figure of the paper, and the source of each cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from structured_ensembles.data.dataset import SplitName
from structured_ensembles.paper.published import Cell, published
from structured_ensembles.prediction.combination import Combine
from structured_ensembles.runs.evaluations import RULES
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.measurement import Request

Key = tuple[str, str]  # row, column
Rows = Mapping[str, tuple[str, Mapping[str, Any]]]  # by label, a method and its arguments

SEEDS = (0, 1, 2)
RIVALS = ("single", "deep", "snapshot", "batch-ensemble", "mc-dropout", "structured")  # in the paper
CONTROLS = ("random", "magnitude", "narrow")  # ours, to measure what the learned selection adds
PRUNED = ("structured", "random", "magnitude", "narrow")
INHERITING = ("structured", "random", "magnitude")  # members have weights of the full network
SCOPES = ("layer", "network")
RESCALED = "rescaled"
USUAL = {"scope": "layer", "initial": "N(0,1)"}  # left out of a run's arguments, so that tables share runs
SPREAD = ("div/disagreement", "div/mutual_information")  # beside the paper's diversity, see the notes on it
NOTHING_MORE = Request()
EVERYTHING = Request(fgsm=(0.02, 0.5), corruptions=True, severities=(3, 5))


@dataclass(frozen=True)
class StudyOptions:
    """Restrictions of a study, and how long to train.

    datasets, models, methods: of those that the study has; None means all. epochs: instead of the recipe's.
    recipe: None is the study's own: "paper" for studies of the paper, "modern" for the front.
    smoke: minutes on a CPU: digits, a small network, three epochs, few members. limit: the largest number of training
        samples.
    """

    datasets: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = SEEDS
    epochs: int | None = None
    limit: int | None = None
    recipe: str | None = None
    smoke: bool = False


@dataclass(frozen=True)
class Study:
    """Table of figures: for every cell the experiments (one per seed) and the figure of theirs that it shows.

    paper: the published cells. request: the measurements of every run. counted: cells that need no run.
    rules: the combination rules, one table each. split: on which the figures were measured.
    """

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    metrics: Mapping[str, str]
    sources: Mapping[Key, tuple[tuple[Any, ...], str]]
    paper: Mapping[Key, Cell]
    request: Request = NOTHING_MORE
    counted: Mapping[Key, Sequence[float]] = field(default_factory=dict)
    rules: tuple[Combine, ...] = RULES[:1]
    split: SplitName = "test"

    @property
    def experiments(self) -> list[Any]:
        """Return every run once, in the order of the table: `Experiment` or `ContinualExperiment`."""
        return list({run.folder: run for runs, _ in self.sources.values() for run in runs}.values())


# Runs -----------------------------------------------------------------------------------------------------------------


def list_runs(options: StudyOptions, dataset: str, model: str, method: str, **arguments: Any) -> tuple[Experiment, ...]:
    """Return one experiment per seed, with the paper's settings."""
    recipe = options.recipe or "paper"
    changes: dict[str, Any] = {}
    method_arguments = {name: value for name, value in arguments.items() if USUAL.get(name) != value}
    members = method_arguments.pop("members", 5)
    if recipe == "paper":
        changes |= {"rate": 0.01} if model.startswith("vgg") else {}
        changes |= {"patience": 5} if dataset == "svhn" else {}
    if method in PRUNED:
        method_arguments = method_arguments if "memory" in method_arguments else {"prune": 0.5, **method_arguments}
    if method == "snapshot" and recipe == "paper" and options.epochs is None and not options.smoke:
        method_arguments["cycle"] = 50
    if options.epochs is not None:
        changes["epochs"] = options.epochs
    if options.smoke:
        changes |= {"epochs": options.epochs or 3, "rate": 0.02}  # the paper's is too high for so small a network
        members = min(members, 3)
        if method == "structured":
            method_arguments["search_epochs"] = 1
    experiment = Experiment(
        dataset, model, method, 0, members, {}, method_arguments, recipe, changes, limit=options.limit
    )
    return tuple(replace(experiment, seed=seed) for seed in options.seeds)


def list_methods(options: StudyOptions) -> tuple[str, ...]:
    """Return the requested methods, also `package.module:function`; by default the paper's and our controls."""
    return options.methods if options.methods is not None else (*RIVALS, *CONTROLS)


def _method_rows(options: StudyOptions) -> Rows:
    """Return one row per method, and one per scope of the structured ensemble.

    The paper's text says layer-wise, but its overheads can only come from one threshold for the whole network.
    """
    rows: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for method in list_methods(options):
        if method == "structured":
            rows |= {f"{method}, {scope}": (method, {"scope": scope}) for scope in SCOPES}
        else:
            rows[method] = (method, {})
    return rows


def _with_rescaled(rows: Rows, model: str) -> Rows:
    """Add for VGG, which has no norms, a row with rescaled weights to every row that inherits them."""
    if "vgg" not in model:
        return rows
    extended = {}
    for row, (method, arguments) in rows.items():
        extended[row] = (method, arguments)
        if method in INHERITING:
            extended[f"{row}, {RESCALED}"] = (method, {**arguments, "rescale": True})
    return extended


def published_row(row: str) -> str:
    """Return the published row that belongs to a row of ours: the paper has one for both scopes."""
    for scope in SCOPES:
        row = row.removesuffix(f", {scope}")
    return row


def list_setups(options: StudyOptions, columns: Sequence[str]) -> list[tuple[str, str]]:
    """List the pairs of data set and network, restricted by `options`."""
    if options.smoke:
        return [("digits", "lenet5")]
    setups = [(dataset, model) for dataset, model in (column.split("/") for column in columns)]
    if options.datasets is not None:
        others = [name for name in options.datasets if name not in {dataset for dataset, _ in setups}]
        setups = [setup for setup in setups if setup[0] in options.datasets]
        setups += [(name, model) for name in others for model in options.models or ("resnet20",)]
    if options.models is not None:
        others = [name for name in options.models if name not in {model for _, model in setups}]
        datasets = dict.fromkeys(dataset for dataset, _ in setups)
        setups = [setup for setup in setups if setup[1] in options.models]
        setups += [(dataset, name) for name in others for dataset in datasets]
    return list(dict.fromkeys(setups))


# Tables ---------------------------------------------------------------------------------------------------------------


def _study_by_setup(name: str, options: StudyOptions) -> Study:
    """Return a study of methods against data sets: accuracy, ECE."""
    table = published(name)
    setups = list_setups(options, table.columns)
    columns = tuple("/".join(setup) for setup in setups)
    metric = next(iter(table.metrics.values()))
    sources = {
        (row, "/".join(setup)): (list_runs(options, *setup, method, **arguments), metric)
        for setup in setups
        for row, (method, arguments) in _with_rescaled(_method_rows(options), setup[1]).items()
    }
    rows = tuple(
        row for row in _with_rescaled(_method_rows(options), "vgg") if any(label == row for label, _ in sources)
    )
    known = {key: table.cells.get((published_row(key[0]), key[1])) for key in sources}
    cells = {key: cell for key, cell in known.items() if cell is not None}
    metrics = dict.fromkeys(columns, metric)
    return Study(f"table-{name}", table.title, rows, columns, metrics, sources, cells, rules=RULES)


def _study_by_figure(
    name: str,
    options: StudyOptions,
    rows: Rows,
    more: Sequence[str] = (),
    request: Request = NOTHING_MORE,
    prefix: str = "table",
    rules: tuple[Combine, ...] = RULES,
) -> Study:
    """Return a study of settings against figures, on one data set and network."""
    table = published(name)
    setups = list_setups(options, [f"{table.dataset}/{table.model}"])
    columns = (*table.columns, *more)
    metrics = {column: "/".join(column.split("/")[-2:]) for column in columns}
    sources = {}
    cells = {}
    several = len(setups) > 1
    for setup in setups:
        for row, (method, arguments) in _with_rescaled(rows, setup[1]).items():
            label = f"{row}, {'/'.join(setup)}" if several else row
            for column in columns:
                sources[label, column] = (list_runs(options, *setup, method, **arguments), figure_of(column))
                cell = table.cells.get((published_row(row), column))
                if cell is not None and not options.smoke and setup == (table.dataset, table.model):
                    cells[label, column] = cell
    labels = tuple(dict.fromkeys(row for row, _ in sources))
    return Study(f"{prefix}-{name}", table.title, labels, columns, metrics, sources, cells, request, rules=rules)


def figure_of(column: str) -> str:
    """Return the figure of `evaluate` for a column such as `fgsm-0.02/unc/discarded` or `cls/accuracy`."""
    condition, _, metric = column.partition("/")
    change, _, value = condition.partition("-")
    if change not in ("fgsm", "corruptions"):
        return column
    name = f"adv/fgsm@{value}" if change == "fgsm" else f"cor/mean@{value}"
    return name if metric == "cls/accuracy" else f"{name}/{metric.partition('/')[2]}"


def _pruning(options: StudyOptions) -> Study:
    """Return the study of the share of pruned neurons."""
    shares = ("0.5", "0.8") if options.smoke else published("pruning").rows
    rows = {
        f"{share}, {scope}": ("structured", {"prune": float(share), "scope": scope})
        for scope in SCOPES
        for share in shares
    }
    return _study_by_figure("pruning", options, rows, more=("cal/nll",))


def _initialization(options: StudyOptions) -> Study:
    """Return the study of the scales' initialisation."""
    rows = {
        f"{initial}, {scope}": ("structured", {"initial": initial, "scope": scope})
        for scope in SCOPES
        for initial in published("initialization").rows
    }
    return _study_by_figure("initialization", options, rows, more=("cal/nll",))


ENSEMBLE_STUDIES: dict[str, Callable[[StudyOptions], Study]] = {
    "table-accuracy": lambda options: _study_by_setup("accuracy", options),
    "figure-memory": lambda options: _study_by_figure(
        "memory", options, _method_rows(options), prefix="figure", rules=RULES[:1]
    ),
    "table-ece": lambda options: _study_by_setup("ece", options),
    "table-diversity": lambda options: _study_by_figure("diversity", options, _method_rows(options), more=SPREAD),
    "table-uncertainty": lambda options: _study_by_figure(
        "uncertainty", options, _method_rows(options), request=EVERYTHING
    ),
    "table-pruning": _pruning,
    "table-initialization": _initialization,
}
