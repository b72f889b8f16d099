"""Independent narrow networks of the same number and sizes as a structured ensemble's members, as a control for it.

With `coupled=True` these are the members of Packed-Ensembles (Laurent et al. 2023), trained side by side instead of in
one grouped network: there every hidden layer is narrow, the residual stream too. By default the residual stream keeps
its full width, as in the structured ensembles that this controls for: that is not Packed-Ensembles.
"""

from pathlib import Path

from torch import nn

from structured_ensembles.channels import trace
from structured_ensembles.common.checks import check_seed
from structured_ensembles.common.devices import Device
from structured_ensembles.data import Data
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.data.losses import Loss
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import check_arguments, check_outputs
from structured_ensembles.extraction import extract
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.resuming.folder import open_folder
from structured_ensembles.selection import select
from structured_ensembles.train import train
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import OnEpoch
from structured_ensembles.training.recipe import recipe_for


def narrow_ensemble(
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
    coupled: bool = False,
    round_to: int = 1,
) -> Ensemble:
    """Train narrow networks of the same sizes, each initialised with its own seed; no weights are inherited.

    prune: the share by which each layer is narrower, by default a half: the sizes are those of `select`; or
    memory: the parameters that all members together may have, in networks.
    coupled: narrow the residual stream too, as Packed-Ensembles does; otherwise only the layers inside its blocks.
    round_to: as in `select`.
    """
    check_arguments(model, data, quiet=quiet, coupled=coupled)
    if prune is None and memory is None:
        prune = 0.5
    seed, recipe, execution = check_seed(seed), recipe_for(data.task, recipe), execution_or_default(execution)
    check_outputs(model, data, loss)
    graph = trace(model, data.example(dtype=dtype_of(model)), coupled=coupled)
    # Which channels are selected does not matter: only the sizes are used.
    subnets = select(graph, prune=prune, memory=memory, selection="random", members=members, round_to=round_to)
    settings = {"members": members, "prune": prune, "memory": memory, "coupled": coupled, "round_to": round_to}
    run = open_folder(
        folder,
        "narrow",
        model,
        data,
        recipe=recipe,
        execution=execution,
        loss=loss,
        loss_name=loss_name,
        seed=seed,
        **settings,
    )
    networks = [
        extract(model, graph, subnet, reinit=True, seed=derive_seed(seed, "weights", number))
        for number, subnet in enumerate(subnets)
    ]
    ensemble = Ensemble(networks)
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
