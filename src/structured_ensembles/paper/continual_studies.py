"""The experiments behind the paper's tables and figure on continual learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from structured_ensembles import zoo
from structured_ensembles.continual.experiment import ContinualExperiment
from structured_ensembles.continual.memory import Memory, paper_memory
from structured_ensembles.paper.published import published
from structured_ensembles.paper.studies import Part, Study, places_of

MORE = ("cl/final_accuracy", "cl/forgetting", "cl/accuracy_without_identity")
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
PAPER_FLOAT = 64  # bits, in the paper's table


def _runs(part: Part, dataset: str, model: str, method: str, **arguments: Any) -> tuple[ContinualExperiment, ...]:
    """One experiment per seed, with the paper's epochs for the data set."""
    own = dict(arguments)
    if part.epochs is not None:
        own["epochs"] = part.epochs
    if part.smoke:
        own["epochs"] = part.epochs or 3
        if method == "structured":
            own["search_epochs"] = 1
    one = ContinualExperiment(dataset, model, method, method_arguments=own, limit=part.limit)
    return tuple(replace(one, seed=seed) for seed in part.seeds)


def _accuracy(part: Part) -> Study:
    table = published("continual-accuracy")
    places = places_of(part, table.columns)
    rows = part.methods if part.methods is not None else table.rows
    sources: dict[tuple[str, str], Any] = {}
    metrics: dict[str, str] = {}
    for place in places:
        column = "/".join(place)
        metrics |= {column: "cl/accuracy", **{f"{column}/{figure}": figure for figure in MORE}}
        for row in rows:
            runs = _runs(part, *place, row)
            sources[row, column] = (runs, "cl/accuracy")
            sources |= {(row, f"{column}/{figure}"): (runs, figure) for figure in MORE}
    cells = {key: cell for key, cell in table.cells.items() if key in sources}
    return Study("table-continual", table.title, rows, tuple(metrics), metrics, sources, cells)


def _settings(
    part: Part, name: str, title: str, rows: Mapping[str, Mapping[str, Any]], published_name: str | None = None
) -> Study:
    """Settings of the structured learner, on the paper's data set for them."""
    places = places_of(part, ["cifar10/half-vgg11"])
    cells = {} if published_name is None else published(published_name).cells
    sources = {
        (row, "/".join(place)): (_runs(part, *place, "structured", **arguments), "cl/accuracy")
        for place in places
        for row, arguments in rows.items()
    }
    columns = tuple("/".join(place) for place in places)
    known = {key: cell for key, cell in cells.items() if key in sources}
    return Study(name, title, tuple(rows), columns, dict.fromkeys(columns, "cl/accuracy"), sources, known)


def _ablation(part: Part) -> Study:
    table = published("continual-ablation")
    rows = {row: dict(zip(("scope", "extraction"), row.split("-"), strict=True)) for row in table.rows}
    return _settings(part, "table-continual-ablation", table.title, rows, "continual-ablation")


def _pruning(part: Part) -> Study:
    shares = (0.3, 0.5, 0.7) if part.smoke else SHARES
    title = "Continual learning, by the share of pruned neurons"
    return _settings(part, "figure-continual-pruning", title, {f"{own:g}": {"prune": own} for own in shares})


def _memory_by_model() -> Iterator[tuple[str, Mapping[str, Memory], Mapping[str, Memory]]]:
    """Yield the name of each backbone and, by method, its memory after one task and after two."""
    for model in ("lenet5", "half-vgg11"):
        backbone = getattr(zoo, f"{model.replace('-', '_')}_backbone")()
        one, two = (paper_memory(backbone, tasks) for tasks in (1, 2))
        yield model, one, two


def _memory(part: Part) -> Study:
    """Counted, not run: what each method stores for a backbone once, and for every task."""
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


def _overhead(part: Part) -> Study:
    """Count, without runs, what M tasks add to a backbone of b floats: `floats + floats_per_task·M`, and binaries.

    The paper has one formula for all backbones; ours is worked out for each of its two.
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


CONTINUAL_STUDIES: dict[str, Callable[[Part], Study]] = {
    "table-continual": _accuracy,
    "table-continual-overhead": _overhead,
    "table-continual-memory": _memory,
    "table-continual-ablation": _ablation,
    "figure-continual-pruning": _pruning,
}
