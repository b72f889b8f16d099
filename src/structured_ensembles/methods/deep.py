"""Deep ensemble (Lakshminarayanan et al. 2017): the same network, trained from several initialisations."""

from pathlib import Path

from torch import nn

from structured_ensembles.common.checks import check_seed, check_whole
from structured_ensembles.common.devices import Device
from structured_ensembles.data import Data
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.data.losses import Loss
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import check_arguments, examine
from structured_ensembles.networks.copying import clone_model
from structured_ensembles.networks.initialization import draw_weights
from structured_ensembles.resuming.folder import open_folder
from structured_ensembles.train import train
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import OnEpoch
from structured_ensembles.training.recipe import recipe_for


def deep_ensemble(
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
) -> Ensemble:
    """Train a deep ensemble: the first member starts from the model's weights, the others are reinitialised."""
    check_arguments(model, data, quiet=quiet)
    check_whole("members", members)
    seed, recipe, execution = check_seed(seed), recipe_for(data.task, recipe), execution_or_default(execution)
    data = examine(model, data, device, loss)
    settings = {"members": members, "seed": seed}
    run = open_folder(
        folder, "deep", model, data, recipe=recipe, execution=execution, loss=loss, loss_name=loss_name, **settings
    )
    ensemble = Ensemble(copy_independent(model, members, seed))
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


def copy_independent(model: nn.Module, count: int, seed: int) -> list[nn.Module]:
    """Copy a model `count` times: the first copy has its weights, those of the others are drawn from the seed."""
    networks = [clone_model(model) for _ in range(count)]
    for number, network in enumerate(networks[1:], start=1):
        draw_weights(network, derive_seed(seed, "weights", number))
    return networks
