"""Prune and Tune (Whitaker and Whitley 2022): train one network, cut mirrored children out of it, tune each briefly.

There, children lose single weights and keep zeros in their places; here they lose whole neurons, and are smaller.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import nn

from structured_ensembles.build import recalibrate_members
from structured_ensembles.channels import trace
from structured_ensembles.common.checks import check_choice, check_number, check_seed, check_whole
from structured_ensembles.common.devices import Device
from structured_ensembles.common.progress import say
from structured_ensembles.data import Data
from structured_ensembles.data.losses import Loss
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.comparison import compare_with_base
from structured_ensembles.examination.examine import check_arguments, examine
from structured_ensembles.extraction import extract
from structured_ensembles.methods.phases import join_histories, renumber_epochs
from structured_ensembles.networks.copying import clone_model, dtype_of
from structured_ensembles.resuming.folder import open_folder
from structured_ensembles.selection import select
from structured_ensembles.train import train
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import OnEpoch, check_on_epoch
from structured_ensembles.training.recipe import recipe_for

RISING = 0.1  # share of the one-cycle schedule in which the learning rate rises


def prune_and_tune(
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
    selection: Literal["mirrored", "random"] = "mirrored",
    tune_epochs: int | None = None,
    peak_rate: float | None = None,
) -> Ensemble:
    """Train the model, cut `members` children out of it, and tune them with a one-cycle learning rate.

    The recipe's epochs are those of the base and of the children together. The history has the rows of both, the base's
    first, under the number `members`. Batch norm's statistics are measured anew for each child before it is tuned.

    prune, memory, coupled, round_to, selection: what the children keep, see `select`; by default mirrored halves.
    tune_epochs: those of the children; by default a quarter of the recipe's.
    peak_rate: to which the learning rate of the children rises in the first tenth of their steps, before it falls to
    zero along a cosine; by default half of the recipe's, as in `Recipe.named("tune")`.
    """
    check_arguments(model, data, quiet=quiet, coupled=coupled)
    if prune is None and memory is None:
        prune = 0.5
    check_whole("members", members)
    check_choice("selection", selection, ("mirrored", "random"))
    check_on_epoch(on_epoch)
    seed, recipe, execution = check_seed(seed), recipe_for(data.task, recipe), execution_or_default(execution)
    if tune_epochs is None:
        tune_epochs = -(-recipe.epochs // 4)
    elif type(tune_epochs) is not int or not 1 <= tune_epochs <= recipe.epochs:
        raise ValueError(
            f"tune_epochs must be a whole number from 1 to the recipe's {recipe.epochs} epochs, not {tune_epochs!r}"
        )
    if peak_rate is None:
        peak_rate = recipe.rate / 2
    check_number("peak_rate", peak_rate)
    data = examine(model, data, device, loss)
    graph = trace(model, data.example(dtype=dtype_of(model)), coupled=coupled)
    subnets = select(
        graph, prune=prune, memory=memory, selection=selection, members=members, seed=seed, round_to=round_to
    )
    settings = {"members": members, "prune": prune, "memory": memory, "coupled": coupled, "round_to": round_to}
    run = open_folder(
        folder,
        "prune-and-tune",
        model,
        data,
        recipe=recipe,
        execution=execution,
        loss=loss,
        loss_name=loss_name,
        seed=seed,
        selection=selection,
        tune_epochs=tune_epochs,
        peak_rate=peak_rate,
        **settings,
    )
    base = Ensemble([clone_model(model)])
    train(
        base,
        data,
        replace(recipe, epochs=recipe.epochs - tune_epochs),
        device,
        seed,
        execution=execution,
        numbers=[members],  # other batches and crops than any child
        loss=loss,
        checkpoint=run.file("checkpoint-base.safetensors"),
        on_epoch=renumber_epochs(on_epoch, 0, {0: members}),
        quiet=quiet,
    )
    assert base.history is not None
    (parent,) = base.members
    ensemble = Ensemble([extract(parent, graph, subnet) for subnet in subnets], subnets=subnets, units=base.units)
    recalibrate_members(ensemble, data, device)
    one_cycle = replace(
        recipe, epochs=tune_epochs, rate=peak_rate, schedule="cosine", warmup=RISING * tune_epochs, milestones=()
    )
    children_history = train(
        ensemble,
        data,
        one_cycle,
        device,
        seed,
        execution=execution,
        loss=loss,
        checkpoint=run.file("checkpoint.safetensors"),
        on_epoch=renumber_epochs(on_epoch, base.history.epochs, {number: number for number in range(members)}),
        quiet=quiet,
    )
    ensemble.history = join_histories(base.history, children_history, {0: members})
    if not quiet:
        seconds = (base.history.seconds, ensemble.history.seconds)
        say(compare_with_base(ensemble, parent, data, base_seconds=seconds[0], seconds=seconds[1], loss=loss))
    return ensemble
