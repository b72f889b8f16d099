"""Ensemble methods: one file each, one signature.

A method is a function of (model, data) and the keywords members, recipe, execution, seed, device, folder, on_epoch,
quiet, loss, loss_name, and those of the method; it does not change the model and returns a trained `Ensemble`. A
folder belongs to one run, see `resuming.identity`. To add a method, write its file and a line here.
"""

from collections.abc import Callable

from structured_ensembles.build import structured_ensemble
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.methods.batch_ensemble import batch_ensemble
from structured_ensembles.methods.controls import magnitude_ensemble, random_ensemble
from structured_ensembles.methods.deep import deep_ensemble
from structured_ensembles.methods.mc_dropout import mc_dropout
from structured_ensembles.methods.narrow import narrow_ensemble
from structured_ensembles.methods.prune_and_tune import prune_and_tune
from structured_ensembles.methods.single import single_network
from structured_ensembles.methods.snapshot import snapshot_ensemble
from structured_ensembles.methods.taught import taught_ensemble

METHODS: dict[str, Callable[..., Ensemble]] = {
    "single": single_network,
    "deep": deep_ensemble,
    "structured": structured_ensemble,
    "random": random_ensemble,
    "magnitude": magnitude_ensemble,
    "narrow": narrow_ensemble,
    "snapshot": snapshot_ensemble,
    "batch-ensemble": batch_ensemble,
    "mc-dropout": mc_dropout,
    "prune-and-tune": prune_and_tune,
    "taught": taught_ensemble,
}

__all__ = [
    "METHODS",
    "batch_ensemble",
    "deep_ensemble",
    "magnitude_ensemble",
    "mc_dropout",
    "narrow_ensemble",
    "prune_and_tune",
    "random_ensemble",
    "single_network",
    "snapshot_ensemble",
    "structured_ensemble",
    "taught_ensemble",
]
