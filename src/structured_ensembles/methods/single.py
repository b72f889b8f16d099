"""One network: what every ensemble is compared with."""

from typing import Any

from torch import nn

from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.methods.deep import deep_ensemble


def single_network(model: nn.Module, data: Data, members: int = 1, **settings: Any) -> Ensemble:
    """A deep ensemble of one; `members` is there for the common signature and does not matter."""
    return deep_ensemble(model, data, 1, **settings)
