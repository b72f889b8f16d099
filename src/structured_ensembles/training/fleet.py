"""train_fleet(): train all members of an ensemble at once.

Every member has its own order of batches, crops, flips and dropout, drawn from (seed, member, epoch). Nothing that it
draws depends on the other members: a member of a fleet is the network trained alone with the same seed and member
number. Only the batches of `Data.from_loaders` are read once per epoch and shared. This module defines what an epoch
does; an engine (`engine.py`) computes it.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from structured_ensembles.common.checks import check_list, check_seed, check_whole
from structured_ensembles.common.devices import Device, pick_device
from structured_ensembles.common.processes import decide_in_first_process, gather, rank
from structured_ensembles.cuda.capture import CaptureError, ask_for_small_workspaces
from structured_ensembles.cuda.channels_last import channels_last
from structured_ensembles.data import Data
from structured_ensembles.data.augmentation import resolve_augmentation
from structured_ensembles.data.batch_changes import check_mixup
from structured_ensembles.data.losses import Loss, choose_units, loss_for, smoothed_cross_entropy
from structured_ensembles.data.splits import IndexedSplit
from structured_ensembles.data.target_scaling import Units
from structured_ensembles.networks.copying import dtype_of, without_nested_tensors
from structured_ensembles.resuming.identity import Identity, RunFile, compute_identity
from structured_ensembles.storage.container import check_leaves, raise_as_artifact_error
from structured_ensembles.training.averaging import finish_average, start_average
from structured_ensembles.training.display import Display
from structured_ensembles.training.engine import Engine, Member, Plan, Result
from structured_ensembles.training.execution import Execution
from structured_ensembles.training.fleet_checkpoint import (
    Checkpoint,
    load_fleet,
    resume_fleet,
    save_fleet,
    set_standing,
    standing_of,
)
from structured_ensembles.training.graph_engine import GraphEngine
from structured_ensembles.training.history import COLUMNS, History, OnEpoch, Row
from structured_ensembles.training.loop_engine import LoopEngine
from structured_ensembles.training.mesh import Mesh, broadcast_tensors, mesh_for
from structured_ensembles.training.recipe import Recipe
from structured_ensembles.training.state_copies import copy_state, restore_state, update_copy
from structured_ensembles.training.teaching import Lessons, Teaching

MAX_NUMBER = 2**63 - 1  # of a member
GRAPH_DEVICES = {"cuda"}  # where the graph engine may run; tests name the CPU, where a captured step is the step itself


@dataclass(frozen=True)
class PreparedTraining:
    """The checked arguments of a training run, and the checkpoint of an earlier call.

    numbers: of the members. uses_graph: whether a CUDA graph computes the epochs. path, identity: of the checkpoint.
    earlier: the checkpoint that is there already, or None.
    """

    recipe: Recipe
    execution: Execution
    seed: int
    numbers: Sequence[int]
    device: torch.device
    mesh: Mesh
    uses_graph: bool
    path: Path | None
    identity: Identity
    earlier: Checkpoint | None

    def units(self, members: nn.ModuleList, data: Data, loss: Loss | None, known: Units | None) -> Units | None:
        """Return the units in which members learn a regression's targets: the checkpoint's, the known, or new ones."""
        if self.earlier is not None:
            with raise_as_artifact_error(f"checkpoint {self.path} is damaged; delete it to start anew"):
                return Units.from_json(check_leaves(self.earlier[1].get("units"), (int, float), "units"))
        return choose_units(list(members), data, loss) if known is None else known


def prepare_training(
    members: nn.ModuleList,
    data: Data,
    recipe: Recipe,
    execution: Execution,
    device: Device,
    seed: int,
    *,
    numbers: Sequence[int] | None,
    loss: Loss | None,
    loss_name: str | None,
    checkpoint: str | Path | RunFile | None,
    units: Units | None,
    gaussian: bool,
    lessons: Lessons | None = None,
) -> PreparedTraining:
    """Check the arguments of a training run before any network changes, and read its checkpoint if there is one.

    units, gaussian: those of the ensemble before this run. lessons: of a teacher.
    """
    seed = check_seed(seed)
    check_mixup(recipe.mixup, data, loss is not None)
    numbers = _check_numbers(numbers, len(members))
    for name, tensor in (*members.named_parameters(), *members.named_buffers()):
        if tensor.is_inference():
            raise ValueError(
                f"the networks cannot be trained: {name} was made under torch.inference_mode(); make or load them "
                "outside of it"
            )
    run_device = pick_device(device, members)
    mesh = mesh_for(len(members), run_device)
    uses_graph = _uses_graph(execution, run_device, mesh)
    if uses_graph:
        ask_for_small_workspaces()  # before cuBLAS allocates a large one
    settings = {
        "seed": seed,
        "numbers": numbers,
        "units": None if units is None else units.to_json(),
        "gaussian": gaussian,
        **({} if lessons is None or checkpoint is None else {"teacher": lessons.identity()}),
    }
    path, identity = _identify(checkpoint, members, data, recipe, execution, loss, loss_name, settings)
    return PreparedTraining(
        recipe, execution, seed, numbers, run_device, mesh, uses_graph, path, identity, load_fleet(path, identity)
    )


def train_fleet(
    run: PreparedTraining,
    members: nn.ModuleList,
    data: Data,
    loss: Loss | None,
    units: Units | None,
    on_epoch: OnEpoch | None,
    quiet: bool,
    teaching: Teaching | None = None,
) -> History:
    """Train all members at once, in place; each ends with the weights of its best validation epoch.

    members: on the run's device. loss, units: of the training. on_epoch: called after every epoch. teaching: by a
    teacher, if there is one.
    """
    recipe = run.recipe
    plan = _make_plan(
        data.to(run.device),
        recipe,
        run.execution,
        _choose_loss(data, recipe, loss, units) if teaching is None else teaching.loss(recipe.label_smoothing),
        run.seed,
        run.device,
        dtype_of(members),
        run.mesh,
        teaching,
    )
    cuda = [plan.device] if plan.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=cuda),
        without_nested_tensors(members),
        channels_last(members, plan.example(torch.zeros), plan.log_fallback),
        Display(len(members), recipe.epochs, plan.steps, data.task, quiet or rank() > 0) as display,
    ):
        fleet = [
            Member(network, number, copy_state(network), average=start_average(network) if recipe.averaging else {})
            for network, number in zip(members, run.numbers, strict=True)
        ]
        history, first = resume_fleet(run.earlier, fleet, run.path)
        run_state = {"identity": run.identity, "units": None if units is None else units.to_json()}
        engine: Engine = GraphEngine(plan) if run.uses_graph else LoopEngine(plan)
        for epoch in range(first, recipe.epochs):
            if all(member.stopped is not None for member in fleet):
                break
            engine = _train_epoch(engine, plan, fleet, history, epoch, display)
            if run.path is not None:
                save_fleet(run.path, fleet, history, epoch + 1, run_state, run.mesh)
            _call_on_epoch(on_epoch, history, epoch)
        for number, member in enumerate(fleet):
            if recipe.averaging and recipe.epochs and member.stopped is None and run.mesh.trains(number):
                finish_average(member, plan.data)
            broadcast_tensors(list(member.best.values()), run.mesh.source(number))
            restore_state(member.network, member.best)
            member.network.eval()
    return history


def _train_epoch(
    engine: Engine, plan: Plan, fleet: Sequence[Member], history: History, epoch: int, display: Display
) -> Engine:
    """Train the members that have not stopped for an epoch, judge it, and add it to the history.

    Returns the engine for the next epoch: another one if this engine could not train these members.
    """
    start = time.perf_counter()
    local = {n: member for n, member in enumerate(fleet) if member.stopped is None and plan.mesh.trains(n)}
    members = list(local.values())
    engine = _prepare_engine(engine, plan, members)
    losses: list[float] = []
    results: list[Result] = []
    if members:  # else those of this process have stopped, and others have not
        losses, results = engine.train_epoch(members, epoch, display.step), engine.validate(members)
    history.add_engine(engine.name, plan.fallbacks)
    rate = plan.recipe.rate_at((epoch + 1) * plan.steps - 1, plan.steps)
    seconds = time.perf_counter() - start
    rows = [
        dict(zip(COLUMNS, (epoch, number, rate, cost, *result, seconds), strict=True))
        for number, cost, result in zip(local, losses, results, strict=True)
    ]
    for (number, member), row in zip(local.items(), rows, strict=True):
        _judge_epoch(member, number, row, plan.recipe)
    _share_results(fleet, history, local, rows, plan.mesh)
    display.epoch(epoch, history, rate)
    return engine


def _prepare_engine(engine: Engine, plan: Plan, active: Sequence[Member]) -> Engine:
    """Prepare the engine for these members and return it; fall back to the loop, which trains any network."""
    try:
        engine.prepare(active)
    except CaptureError as error:
        plan.log_fallback(f"training goes on without a CUDA graph, slower: {error}")
        engine = LoopEngine(plan)
        engine.prepare(active)
    return engine


def _share_results(
    fleet: Sequence[Member], history: History, local: Mapping[int, Member], rows: Sequence[Row], mesh: Mesh
) -> None:
    """Exchange the results of this epoch: afterwards every process has the rows and standings of all members."""
    is_source = mesh.data_rank == 0
    results = [(row, standing_of(local[int(row["member"] or 0)])) for row in rows] if is_source else []
    for row, standing in sorted(
        (item for of_process in gather(results) for item in of_process), key=lambda item: item[0]["member"]
    ):
        number = row["member"]
        history.rows.append(row)
        set_standing(fleet[number], standing)
        if fleet[number].stopped:
            history.stopped[number] = fleet[number].stopped or ""


def _call_on_epoch(on_epoch: OnEpoch | None, history: History, epoch: int) -> None:
    """Call the user's function in the first process; if it raises an exception, all processes end."""

    def call() -> None:
        if on_epoch is not None:
            on_epoch(history.epoch(epoch))

    decide_in_first_process(call)  # a collective call: every process takes part, with or without a function


def _uses_graph(execution: Execution, device: torch.device, mesh: Mesh) -> bool:
    """Tell whether a CUDA graph computes the epochs; it cannot where processes exchange gradients in a step."""
    if execution.engine == "graph" and device.type not in GRAPH_DEVICES:
        raise ValueError(f"engine must be 'loop' or 'auto' on {device}: 'graph' is for CUDA devices")
    if execution.engine == "graph" and mesh.data_size > 1:
        raise ValueError(
            "engine must be 'loop' or 'auto' where several processes share a member: a CUDA graph cannot exchange "
            "gradients between them"
        )
    return device.type in GRAPH_DEVICES and execution.engine != "loop" and mesh.data_size == 1


def _make_plan(
    data: Data,
    recipe: Recipe,
    execution: Execution,
    loss: Loss,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh,
    teaching: Teaching | None,
) -> Plan:
    """Resolve the settings that depend on the data, and log if there will be no CUDA graph."""
    streamed = not isinstance(data.train, IndexedSplit)
    shape = data.shape
    augmentation = "none" if streamed else resolve_augmentation(recipe.augmentation, shape, data.task)
    steps = data.num_batches("train", recipe.batch_size)
    plan = Plan(data, recipe, execution, loss, seed, device, augmentation, shape, steps, dtype, mesh, teaching)
    if device.type == "cuda" and mesh.data_size > 1:
        plan.log_fallback("training runs without a CUDA graph, slower: several processes share a member")
    return plan


def _check_numbers(numbers: Sequence[int] | None, members: int) -> list[int]:
    """Return the members' numbers, 0, 1, … by default; raise an error unless there is one for each network."""
    if numbers is None:
        return list(range(members))
    check_list("numbers", numbers)
    if len(numbers) != members:
        raise ValueError(f"numbers must hold one for each of the {members} networks, not {list(numbers)!r}")
    for number in numbers:
        check_whole("each of numbers", number, least=0)
        if number > MAX_NUMBER:  # the random generator hashes 64 bits: two members would draw the same
            raise ValueError(f"each of numbers must be at most 2**63 - 1, not {number!r}")
    return [int(number) for number in numbers]


def _judge_epoch(member: Member, number: int, row: Row, recipe: Recipe) -> None:
    """Keep the weights if they are the best so far; stop the member if it diverged or its patience is over."""
    epoch, accuracy = int(row["epoch"] or 0), row["validation_accuracy"]
    for name in ("loss", "validation_loss"):
        value = row[name]
        if value is not None and not math.isfinite(value):
            origin = f"of epoch {member.best_epoch + 1}" if member.best_epoch >= 0 else "it started with"
            member.stopped = f"its {name.replace('_', ' ')} became {value} in epoch {epoch + 1}"
            warnings.warn(
                f"member {number} stops with the weights {origin}: {member.stopped}. Look for extremes in `data`, or "
                f"lower the recipe's rate ({recipe.rate:g})",
                stacklevel=5,
            )
            return
    # The score is the accuracy, or minus the loss of a regression. Of equal epochs the last one counts, which has
    # learned longest; so without a validation split the last epoch is the best.
    cost = row["validation_loss"]
    score = accuracy if accuracy is not None else 0.0 if cost is None else -cost
    if score > member.best_score:
        member.last_improvement = epoch
    if score >= member.best_score or recipe.keep == "last":
        update_copy(member.best, member.network)
        member.best_score, member.best_epoch = max(score, member.best_score), epoch
    if recipe.patience is not None and cost is not None and epoch - member.last_improvement >= recipe.patience:
        member.stopped = f"no better validation result for {recipe.patience} epochs"


def _choose_loss(data: Data, recipe: Recipe, loss: Loss | None, units: Units | None) -> Loss:
    """Return the loss of the run; cross-entropy with the recipe's label smoothing where it applies."""
    if loss is None and data.task == "classification" and (recipe.label_smoothing or recipe.mixup):
        return partial(smoothed_cross_entropy, smoothing=recipe.label_smoothing)
    return loss_for(data, loss, units)


def _identify(
    checkpoint: str | Path | RunFile | None,
    members: nn.ModuleList,
    data: Data,
    recipe: Recipe,
    execution: Execution,
    loss: Loss | None,
    loss_name: str | None,
    settings: Mapping[str, Any],
) -> tuple[Path | None, Identity]:
    """Return the checkpoint's path and the identity of the run, computed here unless a method gave it."""
    if checkpoint is None or isinstance(checkpoint, RunFile):
        return (None, {}) if checkpoint is None else (checkpoint.path, checkpoint.identity)
    # Processes may have drawn different weights: the identity of the first one counts.
    return Path(checkpoint), gather(
        compute_identity(members, data, recipe, execution, loss, loss_name, "checkpoint=", method="train", **settings)
    )[0]
