"""Ensemble methods: one file each, one signature.

A method is a function of (model, data) and the keywords members, recipe, seed, device, folder, quiet, and whatever is
its own; it leaves the model alone and returns a trained `Ensemble`. To add one, write its file and a line here.
"""

from collections.abc import Callable

from structured_ensembles.build import structured_ensemble
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.methods.deep import deep_ensemble
from structured_ensembles.methods.single import single_network

METHODS: dict[str, Callable[..., Ensemble]] = {
    "single": single_network,
    "deep": deep_ensemble,
    "structured": structured_ensemble,
}

__all__ = ["METHODS", "deep_ensemble", "single_network", "structured_ensemble"]
