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
from functools import partial

import torch
from torch import nn

from structured_ensembles.common.processes import decide_in_first_process, gather, rank
from structured_ensembles.cuda.capture import CaptureError
from structured_ensembles.cuda.channels_last import channels_last
from structured_ensembles.data import Data
from structured_ensembles.data.augmentation import resolve_augmentation
from structured_ensembles.data.losses import Loss, loss_for, smoothed_cross_entropy
from structured_ensembles.data.splits import IndexedSplit
from structured_ensembles.data.target_scaling import Units
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.networks.modes import without_nested_tensors
from structured_ensembles.training.averaging import finish_average, start_average
from structured_ensembles.training.display import Display
from structured_ensembles.training.engine import Engine, Member, Plan, Result
from structured_ensembles.training.fleet_checkpoint import resume_fleet, set_standing, standing_of
from structured_ensembles.training.fleet_saving import FleetSaver
from structured_ensembles.training.graph_engine import GraphEngine
from structured_ensembles.training.history import COLUMNS, History, OnEpoch, Row
from structured_ensembles.training.loop_engine import LoopEngine
from structured_ensembles.training.mesh import Mesh, broadcast_tensors, share_state
from structured_ensembles.training.preparation import PreparedTraining
from structured_ensembles.training.recipe import Recipe
from structured_ensembles.training.state_copies import copy_state, restore_state, update_copy
from structured_ensembles.training.teaching import Teaching


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
    used_loss = _choose_loss(data, recipe, loss, units) if teaching is None else teaching.loss(recipe.label_smoothing)
    plan = _make_plan(run, data.to(run.device), used_loss, dtype_of(members), teaching)
    cuda = [plan.device] if plan.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=cuda),
        without_nested_tensors(members),
        channels_last(members, plan.example(torch.zeros), plan.log_fallback),
        Display(len(members), recipe.epochs, plan.steps, quiet or rank() > 0) as display,
    ):
        for network in members:  # processes may have drawn different weights: those of the first one count
            broadcast_tensors([*network.parameters(), *network.buffers()], source=0)
        fleet = [
            Member(network, number, copy_state(network), average=start_average(network) if recipe.averaging else {})
            for network, number in zip(members, run.numbers, strict=True)
        ]
        history, first = resume_fleet(run.earlier, fleet, run.path)
        display.resume(first)
        run_state = {"identity": run.identity, "units": None if units is None else units.to_json()}
        saver = FleetSaver(run.path, fleet, history, run_state, run.mesh)
        local = [member for number, member in enumerate(fleet) if run.mesh.trains(number)]
        engine: Engine = GraphEngine(plan, local) if run.uses_graph else LoopEngine(plan)
        for epoch in range(first, recipe.epochs):
            if all(member.stopped is not None for member in fleet):
                break
            engine = _train_epoch(engine, plan, fleet, history, epoch, display)
            saver.save_if_due()
            _call_on_epoch(on_epoch, history, epoch, saver)
        saver.save()
        for number, member in enumerate(fleet):
            if recipe.averaging and recipe.epochs and member.stopped is None and run.mesh.trains(number):
                finish_average(member, plan.data)
            share_state(member.best, run.mesh.source(number))
            restore_state(member.network, member.best)
            member.network.eval()
            member.network.zero_grad()  # gradients take as much memory as the weights
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


def _call_on_epoch(on_epoch: OnEpoch | None, history: History, epoch: int, saver: FleetSaver) -> None:
    """Call the user's function in the first process; if it raises an exception, all processes save and end."""

    def call() -> None:
        if on_epoch is not None:
            on_epoch(history.epoch(epoch))

    try:
        decide_in_first_process(call)  # a collective call: every process takes part, with or without a function
    except Exception:
        saver.save()
        raise


def _make_plan(run: PreparedTraining, data: Data, loss: Loss, dtype: torch.dtype, teaching: Teaching | None) -> Plan:
    """Resolve the settings that depend on the data, and log if there will be no CUDA graph."""
    recipe, shape = run.recipe, data.shape
    streamed = not isinstance(data.train, IndexedSplit)
    plan = Plan(
        data,
        recipe,
        run.execution,
        loss,
        run.seed,
        run.device,
        augmentation="none" if streamed else resolve_augmentation(recipe.augmentation, shape, data.task),
        shape=shape,
        steps=data.num_batches("train", recipe.batch_size),
        dtype=dtype,
        mesh=run.mesh,
        teaching=teaching,
    )
    if run.device.type == "cuda" and run.mesh.data_size > 1:
        plan.log_fallback("training runs without a CUDA graph, slower: several processes share a member")
    return plan


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
