"""Structured ensembles whose neurons are chosen without learning: what the learned selection has to be better than."""

from typing import Any

from torch import nn

from structured_ensembles.build import structured_ensemble
from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble


def random_ensemble(model: nn.Module, data: Data, members: int = 5, **settings: Any) -> Ensemble:
    """As many neurons of each layer, drawn at random; the other arguments are those of `structured_ensemble`."""
    return structured_ensemble(model, data, members, **{"selection": "random", **settings})


def magnitude_ensemble(model: nn.Module, data: Data, members: int = 5, **settings: Any) -> Ensemble:
    """The neurons with the largest weights, the same for all members.

    So that the members differ, their weights are drawn anew (`reinit=True`). The other arguments are those of
    `structured_ensemble`.
    """
    return structured_ensemble(model, data, members, **{"selection": "magnitude", "reinit": True, **settings})
