"""The front, quality against memory: points around four members in the memory of one network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from structured_ensembles.paper.studies import PRUNED, Study, StudyOptions, list_methods, list_runs, list_setups
from structured_ensembles.runs.evaluations import RULES

COLUMNS = (
    "size/overhead", "cls/accuracy", "cal/nll", "cal/ece15", "cal/nll_t", "cal/ece15_t", "div/disagreement",
    "size/file_bytes",
)  # fmt: skip
SETUPS = ("cifar10/resnet18", "cifar100/resnet18")
CENTRE = {"members": 4, "memory": 1.0}


def front_rows(options: StudyOptions) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return one row per point of the front: a method and its arguments.

    coupled: the residual stream is pruned too. Narrow networks of that shape are Packed-Ensembles.
    """
    points = ((2, 1.0), (4, 1.0), (8, 1.0), (4, 0.5), (4, 2.0))
    rows: dict[str, tuple[str, Mapping[str, Any]]] = {"single": ("single", {})}
    rows |= {f"deep ×{members}": ("deep", {"members": members}) for members in (4, 2)}
    for members, memory in sorted(points, key=lambda point: point != (4, 1.0)):  # the centre first
        for coupled in (True, False):
            arguments = {"members": members, "memory": memory} | ({"coupled": True} if coupled else {})
            rows[f"structured ×{members}, {memory:g}{', coupled' * coupled}"] = ("structured", arguments)
    for method in ("random", "narrow"):
        rows[f"{method} ×4, 1, coupled"] = (method, {**CENTRE, "coupled": True})
    for method in ("batch-ensemble", "mc-dropout"):
        rows[f"{method} ×4"] = (method, {"members": 4})
    wanted = list_methods(options)
    return {row: (method, arguments) for row, (method, arguments) in rows.items() if method in wanted}


def front(options: StudyOptions) -> Study:
    """Return the study of quality against memory on each data set, trained by the recipe `modern`."""
    options = replace(options, recipe=options.recipe or "modern")
    setups = list_setups(options, SETUPS)
    rows = front_rows(options)
    if options.smoke:
        rows = {row: point for row, point in rows.items() if point[0] not in PRUNED or row.endswith("×4, 1")}
    sources: dict[tuple[str, str], Any] = {}
    for setup in setups:
        for row, (method, arguments) in rows.items():
            label = f"{row}, {'/'.join(setup)}" if len(setups) > 1 else row
            runs = list_runs(options, *setup, method, **arguments)
            sources |= {(label, column): (runs, column) for column in COLUMNS}
    labels = tuple(dict.fromkeys(row for row, _ in sources))
    metrics = dict(zip(COLUMNS, COLUMNS, strict=True))
    return Study("front", "Quality against memory", labels, COLUMNS, metrics, sources, {}, rules=RULES)
