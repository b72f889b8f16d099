"""The runs behind the front of quality against memory: a star around four members in the memory of one network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from structured_ensembles.paper.studies import PRUNED, Part, Study, methods_of, places_of, runs_of
from structured_ensembles.runs.evaluations import RULES

COLUMNS = (
    "size/overhead", "cls/accuracy", "cal/nll", "cal/ece15", "cal/nll_t", "cal/ece15_t", "div/disagreement",
    "size/file_bytes",
)  # fmt: skip
PLACES = ("cifar10/resnet18", "cifar100/resnet18")
CENTRE = {"members": 4, "memory": 1.0}


def front_rows(part: Part) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """One row per point of the star: a method and its arguments.

    coupled: members are cut out of the residual stream too. Narrow networks of that shape are what Packed-Ensembles
    amounts to.
    """
    points = ((2, 1.0), (4, 1.0), (8, 1.0), (4, 0.5), (4, 2.0))
    rows: dict[str, tuple[str, Mapping[str, Any]]] = {"single": ("single", {})}
    rows |= {f"deep ×{members}": ("deep", {"members": members}) for members in (4, 2)}
    for members, memory in sorted(points, key=lambda own: own != (4, 1.0)):  # the centre first
        for coupled in (True, False):
            own = {"members": members, "memory": memory} | ({"coupled": True} if coupled else {})
            rows[f"structured ×{members}, {memory:g}{', coupled' * coupled}"] = ("structured", own)
    for method in ("random", "narrow"):
        rows[f"{method} ×4, 1, coupled"] = (method, {**CENTRE, "coupled": True})
    for method in ("batch-ensemble", "mc-dropout"):
        rows[f"{method} ×4"] = (method, {"members": 4})
    wanted = methods_of(part)
    return {row: own for row, own in rows.items() if own[0] in wanted}


def front(part: Part) -> Study:
    """Quality against memory: every point of the star on each data set, trained by the recipe `modern`."""
    part = replace(part, recipe=part.recipe or "modern")
    places = places_of(part, PLACES)
    rows = front_rows(part)
    if part.smoke:
        rows = {row: own for row, own in rows.items() if own[0] not in PRUNED or row.endswith("×4, 1")}
    sources: dict[tuple[str, str], Any] = {}
    for place in places:
        for row, (method, arguments) in rows.items():
            label = f"{row}, {'/'.join(place)}" if len(places) > 1 else row
            runs = runs_of(part, *place, method, **arguments)
            sources |= {(label, column): (runs, column) for column in COLUMNS}
    labels = tuple(dict.fromkeys(row for row, _ in sources))
    metrics = dict(zip(COLUMNS, COLUMNS, strict=True))
    return Study("front", "Quality against memory", labels, COLUMNS, metrics, sources, {}, rules=RULES)
