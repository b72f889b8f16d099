"""What can be reproduced, by name."""

from __future__ import annotations

from structured_ensembles.paper.continual_studies import CONTINUAL_STUDIES
from structured_ensembles.paper.front import front
from structured_ensembles.paper.studies import ENSEMBLE_STUDIES, Part, Study

STUDIES = {**ENSEMBLE_STUDIES, "front": front, **CONTINUAL_STUDIES}


def study_names() -> tuple[str, ...]:
    return tuple(STUDIES)


def study(name: str, part: Part) -> Study:
    """The study of a table or figure, narrowed to `part`."""
    if name not in STUDIES:
        raise ValueError(f"name must be one of {', '.join(STUDIES)}, not {name!r}")
    found = STUDIES[name](part)
    if not found.experiments and not found.counted:
        given = {"dataset": part.datasets, "model": part.models, "method": part.methods}
        described = ", ".join(f"{kind} {' or '.join(own)}" for kind, own in given.items() if own)
        raise ValueError(f"nothing of {name} is left: it has no {described}")
    return found
