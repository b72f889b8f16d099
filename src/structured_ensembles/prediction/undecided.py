"""Predictions that are NaN, as of a network whose training diverged: they have no class, though argmax gives 0."""

from __future__ import annotations

import warnings

from torch import Tensor

from structured_ensembles.common.plurals import counted

CAUSE = "the outputs of a network are NaN or infinite, as after a training that diverged; logits(x) shows whose"


def check_decided(values: Tensor, method: str) -> Tensor:
    """Return values (samples, classes), on the CPU, that `method` takes classes from; raise an error if any is NaN."""
    count = _count_undecided(values)
    if count:
        raise ValueError(f"{method} cannot tell the class of {count} of {counted(len(values), 'sample')}: {CAUSE}")
    return values


def warn_of_undecided(values: Tensor, consequence: str) -> None:
    """Warn if any of values (samples, …), on the CPU, is NaN. consequence: what is wrong then."""
    count = _count_undecided(values)
    if count:
        warnings.warn(
            f"predictions are NaN for {count} of {counted(len(values), 'sample')}, {consequence}: {CAUSE}", stacklevel=3
        )


def _count_undecided(values: Tensor) -> int:
    """Return for how many samples some value is NaN."""
    return int(values.reshape(len(values), -1).isnan().any(1).sum())
