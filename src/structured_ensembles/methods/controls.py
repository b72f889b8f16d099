"""Controls for the learned selection: structured ensembles of random or large-weight neurons."""

from pathlib import Path
from typing import Any

from torch import nn

from structured_ensembles.build import structured_ensemble
from structured_ensembles.channels import trace
from structured_ensembles.common.checks import check_seed, check_whole
from structured_ensembles.common.devices import Device
from structured_ensembles.data import Data
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.data.losses import Loss
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import check_arguments, examine
from structured_ensembles.extraction import check_rescale, extract, warn_of_small_outputs
from structured_ensembles.networks.copying import clone_model, dtype_of
from structured_ensembles.networks.initialization import draw_weights
from structured_ensembles.resuming.folder import open_folder
from structured_ensembles.selection import Scope, select
from structured_ensembles.train import train
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import OnEpoch
from structured_ensembles.training.recipe import recipe_for


def random_ensemble(model: nn.Module, data: Data, members: int = 5, **settings: Any) -> Ensemble:
    """Train a structured ensemble of randomly drawn neurons; the other arguments are those of `structured_ensemble`."""
    return structured_ensemble(model, data, members, **{"selection": "random", **settings})


def magnitude_ensemble(
    model: nn.Module,
    data: Data,
    members: int = 5,
    *,
    recipe: Recipe | None = None,
    execution: Execution | None = None,
    device: Device = "auto",
    seed: int = 0,
    folder: str | Path | None = None,
    on_epoch: OnEpoch | None = None,
    quiet: bool = False,
    loss: Loss | None = None,
    loss_name: str | None = None,
    prune: float | None = None,
    memory: float | None = None,
    scope: Scope = "layer",
    coupled: bool = False,
    round_to: int = 1,
    rescale: bool = False,
) -> Ensemble:
    """Train a structured ensemble of the neurons with the largest weights.

    In one network these are the same for all members. So each member is cut out of a network of its own: the model,
    and copies with reinitialised weights, as in a deep ensemble. The arguments are those of `select` and `extract`.
    """
    check_arguments(model, data, quiet=quiet, coupled=coupled)
    check_whole("members", members)
    check_rescale(rescale, reinit=False)
    if prune is None and memory is None:
        prune = 0.5
    seed, recipe, execution = check_seed(seed), recipe_for(data.task, recipe), execution_or_default(execution)
    data = examine(model, data, device, loss)
    settings = {"members": members, "prune": prune, "memory": memory, "scope": scope, "coupled": coupled}
    run = open_folder(
        folder,
        "magnitude",
        model,
        data,
        recipe=recipe,
        execution=execution,
        loss=loss,
        loss_name=loss_name,
        seed=seed,
        round_to=round_to,
        rescale=rescale,
        **settings,
    )
    networks, subnets = [], []
    for number in range(members):
        network = clone_model(model)
        if number > 0:
            draw_weights(network, derive_seed(seed, "weights", number))
        graph = trace(network, data.example(dtype=dtype_of(network)), coupled=coupled)
        share = None if memory is None else memory / members
        selected = select(
            graph, prune=prune, memory=share, scope=scope, selection="magnitude", members=1, round_to=round_to
        )
        networks.append(extract(network, graph, selected[0], rescale=rescale))
        subnets += selected
    if not rescale:
        warn_of_small_outputs(model, graph, subnets)
    ensemble = Ensemble(networks, subnets=subnets)
    checkpoint = run.file("checkpoint.safetensors")
    train(
        ensemble,
        data,
        recipe,
        device,
        seed,
        execution=execution,
        loss=loss,
        checkpoint=checkpoint,
        on_epoch=on_epoch,
        quiet=quiet,
    )
    return ensemble
