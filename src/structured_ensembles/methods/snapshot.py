"""Snapshot ensemble (Huang et al. 2017): one network whose rate is restarted; every cycle leaves a member behind."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from structured_ensembles.common.checks import check_whole, checked_seed
from structured_ensembles.common.devices import Device
from structured_ensembles.data import Data
from structured_ensembles.data.losses import Loss
from structured_ensembles.data.target_scaling import Units
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import examined
from structured_ensembles.networks.copying import clone_of
from structured_ensembles.resuming.identity import open_folder
from structured_ensembles.train import calibrate_trained, train
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import EpochRow, History, OnEpoch
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
    """The first cycle starts from the model's own weights, each other from the snapshot before it.

    Within a cycle the rate falls from the recipe's to zero along a cosine. The recipe's own schedule, warm-up and
    patience do not apply, and a snapshot is the last epoch of its cycle, not the best.

    cycle: its epochs; by default 50, or the recipe's epochs divided among the members if that is less.
    """
    check_whole("members", members)
    seed, recipe, execution = checked_seed(seed), recipe_for(data.task, recipe), execution_or_default(execution)
    data = examined(model, data, device)
    if cycle is None:
        cycle = min(CYCLE, recipe.epochs // members)
    if not isinstance(cycle, int) or cycle < 1:
        raise ValueError(
            f"cycle must be a whole number of epochs, at least 1, not {cycle!r}; by default it is the recipe's "
            f"{recipe.epochs} epochs divided among {members} members"
        )
    what = {"members": members, "seed": seed, "cycle": cycle}
    run = open_folder(
        folder, "snapshot", model, data, recipe=recipe, execution=execution, loss=loss, loss_name=loss_name, **what
    )
    annealed = replace(recipe, epochs=cycle, schedule="cosine", warmup=0.0, patience=None, keep="last")
    networks: list[nn.Module] = []
    history = History()
    units: Units | None = None
    for number in range(members):
        network = clone_of(networks[-1] if networks else model)
        checkpoint = run.file(f"checkpoint-{number + 1}.safetensors")
        alone = Ensemble([network], units=units)
        own = train(
            alone,
            data,
            annealed,
            device,
            seed,
            execution=execution,
            numbers=[number],
            loss=loss,
            checkpoint=checkpoint,
            on_epoch=None if on_epoch is None else _counted_through(on_epoch, number, cycle),
            quiet=quiet,
        )
        units = alone.units
        _append(history, own, number, cycle)
        networks.append(network)
    ensemble = Ensemble(networks, units=units)
    ensemble.adopt(data, loss)
    ensemble.history = history
    calibrate_trained(ensemble, data)
    return ensemble


def _counted_through(on_epoch: OnEpoch, number: int, cycle: int) -> OnEpoch:
    """Return a function that hands the rows of cycle `number` on as `_append` numbers them."""

    def call(row: EpochRow) -> None:
        on_epoch(row.renumbered(number * cycle + row.epoch, {0: number}))

    return call


def _append(history: History, own: History, number: int, cycle: int) -> None:
    """The rows of cycle `number` as those of member `number`, with epochs counted through."""
    history.rows += [{**row, "epoch": number * cycle + int(row["epoch"] or 0), "member": number} for row in own.rows]
    for engine in own.engines:
        history.add_engine(engine, own.fallbacks)
    if own.stopped:
        history.stopped[number] = own.stopped[0]
