"""All studies by name."""

from __future__ import annotations

from structured_ensembles.paper.continual_studies import CONTINUAL_STUDIES
from structured_ensembles.paper.defaults import defaults
from structured_ensembles.paper.front import front
from structured_ensembles.paper.studies import ENSEMBLE_STUDIES, Study, StudyOptions
from structured_ensembles.paper.subsets import subsets

STUDIES = {**ENSEMBLE_STUDIES, "front": front, "defaults": defaults, "subsets": subsets, **CONTINUAL_STUDIES}


def study_names() -> tuple[str, ...]:
    """Return the names of all studies."""
    return tuple(STUDIES)


def study(name: str, options: StudyOptions) -> Study:
    """Return the study of a table or figure, restricted by `options`."""
    if name not in STUDIES:
        raise ValueError(f"name must be one of {', '.join(STUDIES)}, not {name!r}")
    restricted = STUDIES[name](options)
    if not restricted.experiments and not restricted.counted:
        filters = {"dataset": options.datasets, "model": options.models, "method": options.methods}
        described = ", ".join(f"{field} {' or '.join(names)}" for field, names in filters.items() if names)
        raise ValueError(f"nothing of {name} is left: it has no {described}")
    return restricted
