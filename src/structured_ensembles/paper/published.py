"""published(): the numbers of the paper's tables, one data file each in the folder `published`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from structured_ensembles.paper.metrics import metric_of

FOLDER = files("structured_ensembles.paper").joinpath("published")
TABLES = (
    "accuracy",
    "memory",
    "ece",
    "diversity",
    "uncertainty",
    "pruning",
    "initialization",
    "continual-accuracy",
    "continual-memory",
    "continual-memory-bits",
    "continual-ablation",
)


@dataclass(frozen=True)
class Cell:
    """Published number, in the unit of `evaluate()`: shares of 1 where the paper prints percent.

    deviation: over the seeds, where it is given.
    suspicious: why the number cannot be trusted; such a cell is shown, but is no target.
    below: the paper only says that the number is smaller than this.
    """

    value: float
    deviation: float | None = None
    suspicious: str | None = None
    below: bool = False


@dataclass(frozen=True)
class Table:
    """Published table, with our names for rows and columns.

    label: of the table in the paper's source.
    rows: methods, or the settings of an ablation. columns: `dataset/model`, or metrics, possibly after an attack or a
        corruption, such as `fgsm-0.5/cls/accuracy`.
    metrics: of each column. cells: by (row, column); numbers that the paper does not have are missing.
    dataset, model: of the table, where the columns do not name them.
    """

    name: str
    title: str
    label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    metrics: Mapping[str, str]
    cells: Mapping[tuple[str, str], Cell]
    dataset: str | None = None
    model: str | None = None

    def __getitem__(self, key: tuple[str, str]) -> Cell:
        return self.cells[key]

    def targets(self) -> dict[tuple[str, str], Cell]:
        """Return the cells that a reproduction is measured by: neither suspicious nor mere bounds."""
        return {key: cell for key, cell in self.cells.items() if cell.suspicious is None and not cell.below}


def table_names() -> tuple[str, ...]:
    """Return the names of the published tables, in the order of the paper."""
    return TABLES


def published(name: str) -> Table:
    """Read a table of the paper, such as `published("accuracy")["structured", "cifar100/vgg11"]`."""
    if name not in TABLES:
        raise ValueError(f"name must be one of {', '.join(TABLES)}, not {name!r}")
    contents = tomllib.loads(FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    columns = tuple(contents["columns"])
    metrics = {column: contents.get("metric") or "/".join(column.split("/")[-2:]) for column in columns}
    doubts = {
        (row, column): doubt["reason"]
        for doubt in contents.get("suspicious", ())
        for row in doubt["rows"]
        for column in doubt["columns"]
    }
    cells = {
        (row, column): _cell(printed, metric_of(metrics[column]).percent, doubts.get((row, column)))
        for row, line in contents["rows"].items()
        for column, printed in zip(columns, line, strict=True)
    }
    if unknown := doubts.keys() - cells.keys():
        raise ValueError(f"{name}.toml marks cells that it does not have: {sorted(unknown)}")
    return Table(
        name,
        contents["title"],
        contents["label"],
        tuple(contents["rows"]),
        columns,
        metrics,
        cells,
        contents.get("dataset"),
        contents.get("model"),
    )


def _cell(printed: Any, percent: bool, suspicious: str | None) -> Cell:
    """Read a cell from `value`, `[value, deviation]` or `"<value"`."""
    below = isinstance(printed, str)
    value, deviation = printed if isinstance(printed, list) else (float(str(printed).removeprefix("<")), None)
    unit = 100 if percent else 1
    return Cell(value / unit, None if deviation is None else deviation / unit, suspicious, below)
