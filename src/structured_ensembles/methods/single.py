"""One network: what every ensemble is compared with."""

from pathlib import Path

from torch import nn

from structured_ensembles.data import Data
from structured_ensembles.devices import Device
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.methods.deep import deep_ensemble
from structured_ensembles.training import Recipe


def single_network(
    model: nn.Module,
    data: Data,
    members: int = 1,
    *,
    recipe: Recipe | None = None,
    device: Device = "auto",
    seed: int = 0,
    folder: str | Path | None = None,
    quiet: bool = False,
) -> Ensemble:
    """A deep ensemble of one; `members` is there for the common signature and does not matter."""
    return deep_ensemble(model, data, 1, recipe=recipe, device=device, seed=seed, folder=folder, quiet=quiet)
