"""Members in the memory of one network, taught by a deep ensemble (Hinton et al. 2015).

The teacher costs the training of full networks, but only the members are kept.
"""

from pathlib import Path
from typing import Literal

from torch import nn

from structured_ensembles.channels import trace
from structured_ensembles.common.checks import check_choice, check_seed, check_whole
from structured_ensembles.common.devices import Device, pick_device
from structured_ensembles.data import Data
from structured_ensembles.data.losses import Loss
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import check_arguments, examine
from structured_ensembles.extraction import extract
from structured_ensembles.methods.deep import copy_independent
from structured_ensembles.methods.phases import join_histories, renumber_epochs
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.resuming.folder import open_folder
from structured_ensembles.selection import select
from structured_ensembles.train import train, try_lessons
from structured_ensembles.training import Execution, Recipe, Teacher
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import OnEpoch, check_on_epoch
from structured_ensembles.training.recipe import recipe_for


def taught_ensemble(
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
    teachers: int | None = None,
    share: float = Teacher.share,
    temperature: float = Teacher.temperature,
    prune: float | None = None,
    memory: float | None = None,
    coupled: bool = False,
    round_to: int = 1,
    selection: Literal["random", "mirrored"] = "random",
) -> Ensemble:
    """Train a deep ensemble, then `members` sub-networks of the model, which it teaches.

    Both are trained by the recipe, each for all of its epochs. The history has the rows of both, those of the teacher's
    networks first, under the numbers from `members` on. The teacher is the deep ensemble of the same seed.

    teachers: full networks of the teacher; by default as many as members.
    share, temperature: how it teaches, see `Teacher`.
    prune, memory, coupled, round_to, selection: what members keep, see `select`; by default random halves. One member
        with memory=1.0 is the whole network.
    """
    check_arguments(model, data, quiet=quiet, coupled=coupled)
    if prune is None and memory is None:
        prune = 0.5
    check_whole("members", members)
    check_whole("teachers", teachers, or_none=True)
    teachers = members if teachers is None else teachers
    check_choice("selection", selection, ("random", "mirrored"))
    check_on_epoch(on_epoch)
    seed, recipe, execution = check_seed(seed), recipe_for(data.task, recipe), execution_or_default(execution)
    data = examine(model, data, device, loss)
    graph = trace(model, data.example(dtype=dtype_of(model)), coupled=coupled)
    subnets = select(
        graph, prune=prune, memory=memory, selection=selection, members=members, seed=seed, round_to=round_to
    )
    try_lessons(Teacher(model, share, temperature), data, loss, pick_device(device, model))
    settings = {"members": members, "prune": prune, "memory": memory, "coupled": coupled, "round_to": round_to}
    run = open_folder(
        folder,
        "taught",
        model,
        data,
        recipe=recipe,
        execution=execution,
        loss=loss,
        loss_name=loss_name,
        seed=seed,
        selection=selection,
        teachers=teachers,
        share=share,
        temperature=temperature,
        **settings,
    )
    teacher = Ensemble(copy_independent(model, teachers, seed))
    numbers = {number: members + number for number in range(teachers)}
    earlier = train(
        teacher,
        data,
        recipe,
        device,
        seed,
        execution=execution,
        checkpoint=run.file("checkpoint-teacher.safetensors"),
        on_epoch=renumber_epochs(on_epoch, 0, numbers),
        quiet=quiet,
    )
    ensemble = Ensemble([extract(model, graph, subnet) for subnet in subnets], subnets=subnets)
    later = train(
        ensemble,
        data,
        recipe,
        device,
        seed,
        execution=execution,
        checkpoint=run.file("checkpoint.safetensors"),
        on_epoch=renumber_epochs(on_epoch, earlier.epochs, {number: number for number in range(members)}),
        teacher=Teacher(teacher, share, temperature),
        quiet=quiet,
    )
    ensemble.history = join_histories(earlier, later, numbers)
    return ensemble
