"""Snapshot ensemble (Huang et al. 2017): one network with a cyclic learning rate; every cycle ends in a member."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from structured_ensembles.common.checks import check_seed, check_whole
from structured_ensembles.common.devices import Device
from structured_ensembles.common.plurals import counted
from structured_ensembles.data import Data
from structured_ensembles.data.losses import Loss
from structured_ensembles.data.target_scaling import Units
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import check_arguments, examine
from structured_ensembles.methods.phases import renumber_epochs
from structured_ensembles.networks.copying import clone_model
from structured_ensembles.resuming.folder import open_folder
from structured_ensembles.train import calibrate_trained, train
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import History, OnEpoch, check_on_epoch
from structured_ensembles.training.recipe import recipe_for

CYCLE = 50  # epochs, in the paper


def snapshot_ensemble(
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
    cycle: int | None = None,
) -> Ensemble:
    """Train a snapshot ensemble: the first cycle starts from the model's weights, each other from the last snapshot.

    Within a cycle the learning rate falls from the recipe's to zero along a cosine. The recipe's schedule, warm-up and
    patience do not apply, and a snapshot is the last epoch of its cycle, not the best.

    cycle: its epochs; by default 50, or the recipe's epochs divided among the members if that is less.
    """
    check_arguments(model, data, quiet=quiet)
    check_whole("members", members)
    check_on_epoch(on_epoch)
    seed, recipe, execution = check_seed(seed), recipe_for(data.task, recipe), execution_or_default(execution)
    data = examine(model, data, device, loss)
    if cycle is None:
        cycle = min(CYCLE, recipe.epochs // members)
    if not isinstance(cycle, int) or cycle < 1:
        raise ValueError(
            f"cycle must be a whole number of epochs, at least 1, not {cycle!r}; by default it is the recipe's "
            f"{counted(recipe.epochs, 'epoch')} divided among {counted(members, 'member')}"
        )
    settings = {"members": members, "seed": seed, "cycle": cycle}
    run = open_folder(
        folder, "snapshot", model, data, recipe=recipe, execution=execution, loss=loss, loss_name=loss_name, **settings
    )
    annealed = replace(recipe, epochs=cycle, schedule="cosine", warmup=0.0, patience=None, keep="last")
    networks: list[nn.Module] = []
    history = History()
    units: Units | None = None
    for number in range(members):
        network = clone_model(networks[-1] if networks else model)
        checkpoint = run.file(f"checkpoint-{number + 1}.safetensors")
        member = Ensemble([network], units=units)
        member_history = train(
            member,
            data,
            annealed,
            device,
            seed,
            execution=execution,
            numbers=[number],
            loss=loss,
            checkpoint=checkpoint,
            on_epoch=renumber_epochs(on_epoch, number * cycle, {0: number}),
            quiet=quiet,
        )
        units = member.units
        _append_cycle(history, member_history, number, cycle)
        networks.append(network)
    ensemble = Ensemble(networks, units=units)
    ensemble.adopt(data, loss)
    ensemble.history = history
    calibrate_trained(ensemble, data)
    return ensemble


def _append_cycle(history: History, member_history: History, number: int, cycle: int) -> None:
    """Append the rows of cycle `number` as those of member `number`, with epochs numbered as for `on_epoch`."""
    history.rows += [
        {**row, "epoch": number * cycle + int(row["epoch"] or 0), "member": number} for row in member_history.rows
    ]
    for engine in member_history.engines:
        history.add_engine(engine, member_history.fallbacks)
    if member_history.stopped:
        history.stopped[number] = member_history.stopped[0]
