"""The experiments behind each table and figure of the paper, and where each of its cells comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from structured_ensembles.paper.published import Cell, published
from structured_ensembles.prediction.combination import Combine
from structured_ensembles.runs.evaluations import RULES
from structured_ensembles.runs.experiment import Experiment, Request

Key = tuple[str, str]  # row, column
Rows = Mapping[str, tuple[str, Mapping[str, Any]]]  # by label, a method and its arguments

SEEDS = (0, 1, 2)
RIVALS = ("single", "deep", "snapshot", "batch-ensemble", "mc-dropout", "structured")  # in the paper
CONTROLS = ("random", "magnitude", "narrow")  # ours: what the learned selection is worth
PRUNED = ("structured", "random", "magnitude", "narrow")
INHERITING = ("structured", "random", "magnitude")  # members have weights of the full network
SCOPES = ("layer", "network")
RESCALED = "rescaled"
USUAL = {"scope": "layer", "initial": "N(0,1)"}  # left out of a run's arguments, so that tables share runs
SPREAD = ("div/disagreement", "div/mutual_information")  # beside the paper's diversity, see the notes on it
NOTHING_MORE = Request()
EVERYTHING = Request(fgsm=(0.02, 0.5), corruptions=True, severities=(3, 5))


@dataclass(frozen=True)
class Part:
    """Which part of a study to run, and how long.

    datasets, models, methods: of those that the study has; None means all. epochs: instead of the recipe's.
    recipe: None is the study's own: "paper" for what is in the paper, "modern" for the front.
    smoke: minutes on a CPU: digits, a small network, two epochs, few members. limit: at most so many training samples.
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
    """A table: for every cell the experiments (one per seed) and the figure of theirs that it shows.

    paper: the published cells. request: what to measure of every run. counted: cells that need no run.
    rules: how predictions are combined: one table each.
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

    @property
    def experiments(self) -> list[Any]:
        """Every run once, in the order of the table: `Experiment` or `ContinualExperiment`."""
        return list({own.folder: own for runs, _ in self.sources.values() for own in runs}.values())


# Runs -----------------------------------------------------------------------------------------------------------------


def runs_of(part: Part, dataset: str, model: str, method: str, **arguments: Any) -> tuple[Experiment, ...]:
    """One experiment per seed, as the paper sets it up."""
    recipe = part.recipe or "paper"
    changes: dict[str, Any] = {}
    own = {name: value for name, value in arguments.items() if USUAL.get(name) != value}
    members = own.pop("members", 5)
    if recipe == "paper":
        changes |= {"rate": 0.01} if model.startswith("vgg") else {}
        changes |= {"patience": 5} if dataset == "svhn" else {}
    if method in PRUNED:
        own = own if "memory" in own else {"prune": 0.5, **own}
    if method == "snapshot" and recipe == "paper" and part.epochs is None and not part.smoke:
        own["cycle"] = 50
    if part.epochs is not None:
        changes["epochs"] = part.epochs
    if part.smoke:
        changes |= {"epochs": part.epochs or 3, "rate": 0.02}  # the paper's is too high for so small a network
        members = min(members, 3)
        if method == "structured":
            own["search_epochs"] = 1
    one = Experiment(dataset, model, method, 0, members, {}, own, recipe, changes, limit=part.limit)
    return tuple(replace(one, seed=seed) for seed in part.seeds)


def methods_of(part: Part) -> tuple[str, ...]:
    """The paper's and our controls; or those asked for, which may be somebody's own `package.module:function`."""
    return part.methods if part.methods is not None else (*RIVALS, *CONTROLS)


def _method_rows(part: Part) -> Rows:
    """One row per method, and one per scope of the structured ensemble.

    The text says layer-wise, but its overheads can only come from one threshold for the whole network.
    """
    rows: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for method in methods_of(part):
        if method == "structured":
            rows |= {f"{method}, {scope}": (method, {"scope": scope}) for scope in SCOPES}
        else:
            rows[method] = (method, {})
    return rows


def _with_rescaled(rows: Rows, model: str) -> Rows:
    """Add, for VGG (no normalisation), a row with rescaled weights to every row that inherits them."""
    if "vgg" not in model:
        return rows
    found = {}
    for row, (method, arguments) in rows.items():
        found[row] = (method, arguments)
        if method in INHERITING:
            found[f"{row}, {RESCALED}"] = (method, {**arguments, "rescale": True})
    return found


def published_row(row: str) -> str:
    """Return the published row beside a row of ours: the paper has one for both scopes."""
    for scope in SCOPES:
        row = row.removesuffix(f", {scope}")
    return row


def places_of(part: Part, columns: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of data set and network."""
    if part.smoke:
        return [("digits", "lenet5")]
    found = [(dataset, model) for dataset, model in (column.split("/") for column in columns)]
    if part.datasets is not None:
        others = [name for name in part.datasets if name not in {dataset for dataset, _ in found}]
        found = [place for place in found if place[0] in part.datasets]
        found += [(name, model) for name in others for model in part.models or ("resnet20",)]
    if part.models is not None:
        others = [name for name in part.models if name not in {model for _, model in found}]
        datasets = dict.fromkeys(dataset for dataset, _ in found)
        found = [place for place in found if place[1] in part.models]
        found += [(dataset, name) for name in others for dataset in datasets]
    return list(dict.fromkeys(found))


# Tables ---------------------------------------------------------------------------------------------------------------


def _by_place(name: str, part: Part) -> Study:
    """Methods against data sets: accuracy, ECE."""
    table = published(name)
    places = places_of(part, table.columns)
    columns = tuple("/".join(place) for place in places)
    metric = next(iter(table.metrics.values()))
    sources = {
        (row, "/".join(place)): (runs_of(part, *place, method, **arguments), metric)
        for place in places
        for row, (method, arguments) in _with_rescaled(_method_rows(part), place[1]).items()
    }
    rows = tuple(row for row in _with_rescaled(_method_rows(part), "vgg") if any(own == row for own, _ in sources))
    known = {key: table.cells.get((published_row(key[0]), key[1])) for key in sources}
    cells = {key: cell for key, cell in known.items() if cell is not None}
    metrics = dict.fromkeys(columns, metric)
    return Study(f"table-{name}", table.title, rows, columns, metrics, sources, cells, rules=RULES)


def _by_figure(
    name: str,
    part: Part,
    rows: Rows,
    more: Sequence[str] = (),
    request: Request = NOTHING_MORE,
    title: str | None = None,
    kind: str = "table",
    rules: tuple[Combine, ...] = RULES,
) -> Study:
    """Settings against figures, on one data set and network."""
    table = published(name)
    places = places_of(part, [f"{table.dataset}/{table.model}"])
    columns = (*table.columns, *more)
    metrics = {column: "/".join(column.split("/")[-2:]) for column in columns}
    sources = {}
    cells = {}
    several = len(places) > 1
    for place in places:
        for row, (method, arguments) in _with_rescaled(rows, place[1]).items():
            label = f"{row}, {'/'.join(place)}" if several else row
            for column in columns:
                sources[label, column] = (runs_of(part, *place, method, **arguments), figure_of(column))
                cell = table.cells.get((published_row(row), column))
                if cell is not None and not part.smoke and place == (table.dataset, table.model):
                    cells[label, column] = cell
    labels = tuple(dict.fromkeys(row for row, _ in sources))
    return Study(f"{kind}-{name}", title or table.title, labels, columns, metrics, sources, cells, request, rules=rules)


def figure_of(column: str) -> str:
    """The figure of `evaluate` for a column such as `fgsm-0.02/unc/discarded` or `cls/accuracy`."""
    under, _, metric = column.partition("/")
    kind, _, value = under.partition("-")
    if kind not in ("fgsm", "corruptions"):
        return column
    name = f"adv/fgsm@{value}" if kind == "fgsm" else f"cor/mean@{value}"
    return name if metric == "cls/accuracy" else f"{name}/{metric.partition('/')[2]}"


def _pruning(part: Part) -> Study:
    shares = ("0.5", "0.8") if part.smoke else published("pruning").rows
    rows = {
        f"{share}, {scope}": ("structured", {"prune": float(share), "scope": scope})
        for scope in SCOPES
        for share in shares
    }
    return _by_figure("pruning", part, rows, more=("cal/nll",))


def _initialization(part: Part) -> Study:
    rows = {
        f"{initial}, {scope}": ("structured", {"initial": initial, "scope": scope})
        for scope in SCOPES
        for initial in published("initialization").rows
    }
    return _by_figure("initialization", part, rows, more=("cal/nll",))


ENSEMBLE_STUDIES: dict[str, Callable[[Part], Study]] = {
    "table-accuracy": lambda part: _by_place("accuracy", part),
    "figure-memory": lambda part: _by_figure("memory", part, _method_rows(part), kind="figure", rules=RULES[:1]),
    "table-ece": lambda part: _by_place("ece", part),
    "table-diversity": lambda part: _by_figure("diversity", part, _method_rows(part), more=SPREAD),
    "table-uncertainty": lambda part: _by_figure("uncertainty", part, _method_rows(part), request=EVERYTHING),
    "table-pruning": _pruning,
    "table-initialization": _initialization,
}
