"""The experiments behind the paper's tables and figure on continual learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from structured_ensembles import zoo
from structured_ensembles.continual.experiment import ContinualExperiment
from structured_ensembles.continual.memory import Memory, paper_memory
from structured_ensembles.paper.published import published
from structured_ensembles.paper.studies import Study, StudyOptions, list_setups

MORE = ("cl/final_accuracy", "cl/forgetting", "cl/accuracy_without_identity")
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
PAPER_FLOAT = 64  # bits, in the paper's table
# Left out of a run's arguments, so that tables share runs: defaults of StructuredLearner, which the paper uses
USUAL = {"prune": 0.5, "scope": "layer", "extraction": "hard"}


def _runs(
    options: StudyOptions, dataset: str, model: str, method: str, **arguments: Any
) -> tuple[ContinualExperiment, ...]:
    """Return one experiment per seed, with the paper's epochs for the data set."""
    method_arguments = {name: value for name, value in arguments.items() if USUAL.get(name) != value}
    if options.epochs is not None:
        method_arguments["epochs"] = options.epochs
    if options.smoke:
        method_arguments["epochs"] = options.epochs or 3
        if method == "structured":
            method_arguments["search_epochs"] = 1
    experiment = ContinualExperiment(dataset, model, method, method_arguments=method_arguments, limit=options.limit)
    return tuple(replace(experiment, seed=seed) for seed in options.seeds)


def _accuracy(options: StudyOptions) -> Study:
    """Return the study of accuracy and forgetting: methods against data sets."""
    table = published("continual-accuracy")
    setups = list_setups(options, table.columns)
    rows = options.methods if options.methods is not None else table.rows
    sources: dict[tuple[str, str], Any] = {}
    metrics: dict[str, str] = {}
    for setup in setups:
        column = "/".join(setup)
        metrics |= {column: "cl/accuracy", **{f"{column}/{figure}": figure for figure in MORE}}
        for row in rows:
            runs = _runs(options, *setup, row)
            sources[row, column] = (runs, "cl/accuracy")
            sources |= {(row, f"{column}/{figure}"): (runs, figure) for figure in MORE}
    cells = {key: cell for key, cell in table.cells.items() if key in sources}
    return Study("table-continual", table.title, rows, tuple(metrics), metrics, sources, cells)


def _settings(
    options: StudyOptions,
    name: str,
    title: str,
    rows: Mapping[str, Mapping[str, Any]],
    published_name: str | None = None,
) -> Study:
    """Return a study of settings of the structured learner, on the paper's data set for them."""
    setups = list_setups(options, ["cifar10/half-vgg11"])
    cells = {} if published_name is None else published(published_name).cells
    sources = {
        (row, "/".join(setup)): (_runs(options, *setup, "structured", **arguments), "cl/accuracy")
        for setup in setups
        for row, arguments in rows.items()
    }
    columns = tuple("/".join(setup) for setup in setups)
    known = {key: cell for key, cell in cells.items() if key in sources}
    return Study(name, title, tuple(rows), columns, dict.fromkeys(columns, "cl/accuracy"), sources, known)


def _ablation(options: StudyOptions) -> Study:
    """Return the study of scopes and extractions."""
    table = published("continual-ablation")
    rows = {row: dict(zip(("scope", "extraction"), row.split("-"), strict=True)) for row in table.rows}
    return _settings(options, "table-continual-ablation", table.title, rows, "continual-ablation")


def _pruning(options: StudyOptions) -> Study:
    """Return the study of the share of pruned neurons."""
    shares = (0.3, 0.5, 0.7) if options.smoke else SHARES
    title = "Continual learning, by the share of pruned neurons"
    return _settings(options, "figure-continual-pruning", title, {f"{share:g}": {"prune": share} for share in shares})


def _memory_by_model() -> Iterator[tuple[str, Mapping[str, Memory], Mapping[str, Memory]]]:
    """Yield the name of each backbone and, by method, its memory after one task and after two."""
    for model in ("lenet5", "half-vgg11"):
        backbone = getattr(zoo, f"{model.replace('-', '_')}_backbone")()
        one, two = (paper_memory(backbone, tasks) for tasks in (1, 2))
        yield model, one, two


def _memory(options: StudyOptions) -> Study:
    """Count, without runs, the bits that each method stores for a backbone once, and for every task."""
    table = published("continual-memory-bits")
    counted: dict[tuple[str, str], list[float]] = {}
    for model, one, two in _memory_by_model():
        for row in table.rows:
            once = one[row].bits(PAPER_FLOAT) if row == "naive" else 0
            counted[row, f"{model}/size/bits"] = [float(once)]
            counted[row, f"{model}/size/bits_per_task"] = [
                float(two[row].bits(PAPER_FLOAT) - one[row].bits(PAPER_FLOAT))
            ]
    return Study(
        "table-continual-memory",
        table.title,
        table.rows,
        table.columns,
        table.metrics,
        {},
        table.cells,
        counted=counted,
    )


def _overhead(options: StudyOptions) -> Study:
    """Count, without runs, the memory that M tasks add to b floats: `floats + floats_per_task·M`, and binaries.

    The paper has one formula for all backbones; here it is computed for each of its two.
    """
    table = published("continual-memory")
    counted: dict[tuple[str, str], list[float]] = {}
    for model, one, two in _memory_by_model():
        base = one["naive"].backbone
        for row in table.rows:
            floats = (two[row].factors - one[row].factors) / base
            counted[row, f"{model}/size/floats"] = [one[row].factors / base - floats]
            counted[row, f"{model}/size/floats_per_task"] = [floats]
            counted[row, f"{model}/size/binaries_per_task"] = [(two[row].masks - one[row].masks) / base]
    columns = tuple(dict.fromkeys(column for _, column in counted))
    metrics = {column: column.partition("/")[2] for column in columns}
    cells = {key: table.cells[key[0], metrics[key[1]]] for key in counted}
    return Study("table-continual-overhead", table.title, table.rows, columns, metrics, {}, cells, counted=counted)


CONTINUAL_STUDIES: dict[str, Callable[[StudyOptions], Study]] = {
    "table-continual": _accuracy,
    "table-continual-overhead": _overhead,
    "table-continual-memory": _memory,
    "table-continual-ablation": _ablation,
    "figure-continual-pruning": _pruning,
}
