"""One network, the baseline of every ensemble."""

from typing import Any

from torch import nn

from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.methods.deep import deep_ensemble


def single_network(model: nn.Module, data: Data, members: int = 1, **settings: Any) -> Ensemble:
    """Train a deep ensemble of one; `members` is ignored and exists for the common signature."""
    return deep_ensemble(model, data, 1, **settings)
