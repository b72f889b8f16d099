"""compare_with_base(): one table of a trained base and the ensemble that was cut out of it."""

from __future__ import annotations

import warnings

from torch import nn

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.tables import text_table
from structured_ensembles.data import Data
from structured_ensembles.data.dataset import SplitName
from structured_ensembles.data.losses import Loss
from structured_ensembles.data.target_scaling import fit_units
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.evaluate import evaluate
from structured_ensembles.networks.copying import copy_frozen

COLUMNS = {
    "classification": {"accuracy": "cls/accuracy", "NLL": "cal/nll", "ECE": "cal/ece15"},
    "regression": {"RMSE": "reg/rmse", "NLL": "reg/nll"},
}


def compare_with_base(
    ensemble: Ensemble,
    base: nn.Module,
    data: Data,
    *,
    base_seconds: float | None = None,
    seconds: float | None = None,
    loss: Loss | None = None,
) -> str:
    """Write a table of base and ensemble: accuracy, NLL and ECE (15 bins), memory in networks, seconds.

    For a regression RMSE instead, and the NLL of Gaussian heads. Figures are of the test split, or of the validation
    split if there is none, without temperature. The base is not changed.

    base_seconds, seconds: what they took, a dash if unknown. loss: that of the training.
    Returns "" if there is no such split; warns if the figures cannot be computed, as training must not fail at its end.
    """
    split: SplitName = "test" if data.test is not None else "validation"
    if getattr(data, split) is None:
        return ""
    try:
        figures = [evaluate(one, data, split) for one in (_as_ensemble(base, ensemble, data, loss), ensemble)]
        memory = [1.0, ensemble.overhead(base)]
    except Exception as error:
        warnings.warn(f"base and ensemble cannot be compared: {error}", stacklevel=2)
        return ""
    shown = {title: name for title, name in COLUMNS[data.task].items() if any(name in row for row in figures)}
    rows = [
        (
            name,
            *(_format(row.get(figure), percent=title in ("accuracy", "ECE")) for title, figure in shown.items()),
            f"{share:.2f}",
            "–" if took is None else f"{took:.0f}",
        )
        for name, row, share, took in zip(
            ("base", f"ensemble of {len(ensemble)}"), figures, memory, (base_seconds, seconds), strict=True
        )
    ]
    return text_table((f"{split} split", *shown, "memory", "seconds"), rows)


def _as_ensemble(base: nn.Module, like: Ensemble, data: Data, loss: Loss | None) -> Ensemble:
    """Return a frozen copy of the base as an ensemble of one, which predicts as `like` does."""
    network = copy_frozen(base).to(device_of(like))
    single = Ensemble([network], units=fit_units([network], data, like.gaussian), gaussian=like.gaussian)
    single.adopt(data, loss)
    return single


def _format(value: float | None, percent: bool) -> str:
    """Write a share in percent, another figure with four decimals; a dash if there is none."""
    if value is None:
        return "–"
    return f"{100 * value:.2f}%" if percent else f"{value:.4f}"
