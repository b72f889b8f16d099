"""Method of the studies of defaults and of subsets: random subsets, with controls that users do not need.

Studies name it as `structured_ensembles.paper.random_subsets:train_random_subsets`.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from structured_ensembles.channels import trace
from structured_ensembles.common.checks import check_seed, check_whole
from structured_ensembles.common.devices import Device
from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import examine
from structured_ensembles.extraction import extract
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.resuming.folder import open_folder
from structured_ensembles.selection import select
from structured_ensembles.train import train
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import OnEpoch
from structured_ensembles.training.recipe import recipe_for

METHOD = f"{__name__}:train_random_subsets"


def train_random_subsets(
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
    prune: float | None = None,
    memory: float | None = None,
    coupled: bool = False,
    shared_batches: bool = False,
    training_seed: int | None = None,
) -> Ensemble:
    """Train the members of the method `random`; without the last two arguments they are the same.

    shared_batches: all members see the batches, crops and dropout of the first one, instead of their own.
    training_seed: seed of batches, crops and dropout, instead of `seed`. So the same subsets of the same initial
        weights are trained anew: `seed` draws both.
    """
    check_whole("members", members)
    seed = check_seed(seed)
    training_seed = seed if training_seed is None else check_seed(training_seed)
    recipe, execution = recipe_for(data.task, recipe), execution_or_default(execution)
    data = examine(model, data, device)
    graph = trace(model, data.example(dtype=dtype_of(model)), coupled=coupled)
    subnets = select(graph, prune=prune, memory=memory, selection="random", members=members, seed=seed)
    run = open_folder(
        folder,
        "random-subsets",
        model,
        data,
        recipe=recipe,
        execution=execution,
        loss=None,
        loss_name=None,
        members=members,
        seed=seed,
        prune=prune,
        memory=memory,
        coupled=coupled,
        shared_batches=shared_batches,
        training_seed=training_seed,
    )
    ensemble = Ensemble([extract(model, graph, subnet) for subnet in subnets], subnets=subnets)
    train(
        ensemble,
        data,
        recipe,
        device,
        training_seed,
        execution=execution,
        numbers=[0] * members if shared_batches else None,
        checkpoint=run.file("checkpoint.safetensors"),
        on_epoch=on_epoch,
        quiet=quiet,
    )
    return ensemble
