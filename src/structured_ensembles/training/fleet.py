"""train(): all members of an ensemble at once.

Every member has its own order of batches, its own crops, flips and dropout, from (seed, member, epoch), and nothing of
what it draws depends on the other members: a member of a fleet is the network trained alone with the same seed and
member number. Only data that are streamed (`Data.from_loaders`) are read once per epoch, and shared. How the epochs are
computed is the business of an engine, `loop` or `graph`; what an epoch means is written here.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.checks import check_list, check_type, check_whole, checked_seed
from structured_ensembles.common.devices import Device, pick_device
from structured_ensembles.common.processes import decided_by_first, gather, rank
from structured_ensembles.cuda.capture import CaptureError, ask_for_small_workspaces
from structured_ensembles.cuda.channels_last import channels_last
from structured_ensembles.data import Data
from structured_ensembles.data.augmentation import resolved
from structured_ensembles.data.dataset import check_data
from structured_ensembles.data.losses import Loss, learned_units, loss_for
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.data.target_scaling import Units
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.networks.copying import all_tensors, dtype_of, fill, unsaved_buffers, without_nested_tensors
from structured_ensembles.networks.examination import examined, warn_of_one_class
from structured_ensembles.prediction.calibration_fit import calibrate_trained
from structured_ensembles.storage.container import checked, checked_leaves, checked_list, refused
from structured_ensembles.storage.identity import Identity, RunFile, check_same, identity_of
from structured_ensembles.training.checkpoint import check_complete, is_members, load_checkpoint, save_checkpoint
from structured_ensembles.training.display import Display
from structured_ensembles.training.engine import Engine, Member, Plan, Result
from structured_ensembles.training.execution import Execution, execution_or_default
from structured_ensembles.training.graph_engine import GraphEngine
from structured_ensembles.training.history import COLUMNS, History, OnEpoch, Row, check_on_epoch
from structured_ensembles.training.loop_engine import LoopEngine
from structured_ensembles.training.mesh import Mesh, collect_tensors, mesh_for, spread
from structured_ensembles.training.optimizers import OptimizerState, check_rules
from structured_ensembles.training.recipe import Recipe, recipe_for

GRAPH_DEVICES = {"cuda"}  # where the graph engine may run; tests name the CPU, where a captured step is the step itself


def train(
    ensemble: Ensemble,
    data: Data,
    recipe: Recipe | None = None,
    device: Device = "auto",
    seed: int = 0,
    *,
    execution: Execution | None = None,
    numbers: Sequence[int] | None = None,
    loss: Loss | None = None,
    loss_name: str | None = None,
    checkpoint: str | Path | RunFile | None = None,
    on_epoch: OnEpoch | None = None,
    quiet: bool = False,
) -> History:
    """Train every member of `ensemble` in place; each ends with the weights of its best validation epoch.

    Every member sees the data in its own order, with its own crops, flips and dropout, drawn from `seed` and its
    number. The batches of `Data.from_loaders` are the loader's, and the same for all members.

    Where there is a validation split, the ensemble ends calibrated on it: see `Ensemble.calibrate`, `threshold_for` and
    `conformal`. The same samples have chosen the best epoch.

    recipe: what training does, by default `Recipe.named("modern")`, or "regression" for such data.
    execution: how it is computed: engine, precision, streams, compile; by default `Execution()`.
    device: "auto" takes a GPU if there is one; the ensemble stays on the device.
    numbers: the members' numbers, by default 0, 1, …: to train some members of a larger ensemble, here or on another
        machine, give theirs. The network trained alone as `numbers=[3]` is member 3 of the fleet. Members of the same
        number see the same batches, crops and dropout.
    loss: a function of (outputs, targets) that averages over samples; by default the task's own. That of a regression
        is the squared error in units of the targets' variance: networks learn values of mean 0 and deviation 1, unless
        they give values as large as the targets already; the ensemble gives values as the targets are. With a loss of
        your own, networks that are trained for the first time learn the targets as they are. `gaussian_nll` is for
        networks that give a mean and a variance for every value: targets are standardised as by default, and the
        ensemble predicts distributions; see `Ensemble.distribution`.
    checkpoint: a file to write after every epoch; if it is there already, training goes on from it, to the same
        weights. A file of another run (other weights to start from, data, recipe, precision, seed, loss, …) is refused.
    on_epoch: a function that is called with an `EpochRow` after every epoch, when its checkpoint is written, such as a
        logger's: see docs/how-to/loggers.md. An exception that it raises ends the training and is raised here. A run
        that goes on from a checkpoint calls it for the new epochs only. Of several processes, the first one calls it.
    loss_name: tells this loss from others, where there is a checkpoint and the loss cannot be told by itself, such as a
        lambda.
    """
    _check_arguments(ensemble, data, on_epoch)
    recipe, execution = _checked_recipe(recipe, data, ensemble), execution_or_default(execution)
    seed = checked_seed(seed)
    numbers = _checked_numbers(numbers, len(ensemble.members))
    where = pick_device(device, ensemble)
    mesh = mesh_for(len(ensemble.members), where)
    captured = _captured(execution, where, mesh)
    if captured:
        ask_for_small_workspaces()  # before anything takes a large one
    path, identity = _identified(checkpoint, ensemble, data, recipe, execution, seed, numbers, loss, loss_name)
    earlier = _earlier(path, identity)
    data, loss = _adopted(ensemble, data, loss, where)
    if earlier is not None:
        with refused(f"checkpoint {path} is damaged; delete it to start anew"):
            ensemble.units = Units.from_json(checked_leaves(earlier[1].get("units"), (int, float), "units"))
    elif ensemble.units is None:
        ensemble.units = learned_units(list(ensemble.members), data, loss)
    cost = _loss(data, recipe, loss, ensemble.units)
    plan = _plan(data.to(where), recipe, execution, cost, seed, where, dtype_of(ensemble), mesh)
    cuda = [where] if where.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=cuda),
        without_nested_tensors(ensemble),
        channels_last(ensemble.members, plan.example(torch.zeros), plan.tell),
        Display(len(ensemble.members), recipe.epochs, plan.steps, data.task, quiet or rank() > 0) as display,
    ):
        fleet = [
            Member(network, number, _copy(network)) for network, number in zip(ensemble.members, numbers, strict=True)
        ]
        history, first = _resume(earlier, fleet, path)
        units = None if ensemble.units is None else ensemble.units.to_json()
        engine: Engine = GraphEngine(plan) if captured else LoopEngine(plan)
        for epoch in range(first, recipe.epochs):
            active = {number: member for number, member in enumerate(fleet) if member.stopped is None}
            if not active:
                break
            start = time.perf_counter()
            own = {number: member for number, member in active.items() if mesh.trains(number)}
            engine = _ready(engine, plan, list(own.values()))
            losses, results = _epoch(engine, list(own.values()), epoch, display)
            history.add_engine(engine.name, plan.fallbacks)
            rate = recipe.rate_at((epoch + 1) * plan.steps - 1, plan.steps)
            seconds = time.perf_counter() - start
            rows = [
                dict(zip(COLUMNS, (epoch, number, rate, cost, *result, seconds), strict=True))
                for number, cost, result in zip(own, losses, results, strict=True)
            ]
            for (number, member), row in zip(own.items(), rows, strict=True):
                _judge(member, number, row, recipe)
            _tell(fleet, history, own, rows, mesh)
            display.epoch(epoch, history, rate)
            if path is not None:
                _save(path, fleet, history, epoch + 1, {"identity": identity, "units": units}, mesh)
            _report(on_epoch, history, epoch)
        for number, member in enumerate(fleet):
            spread(list(member.best.values()), mesh.source(number))
            _restore(member.network, member.best)
            member.network.eval()
    ensemble.history = history
    calibrate_trained(ensemble, data)
    warn_of_one_class(ensemble, data, recipe.epochs)
    return history


def _check_arguments(ensemble: Ensemble, data: Data, on_epoch: OnEpoch | None) -> None:
    check_type("ensemble", ensemble, Ensemble, "Ensemble([network, …]) makes one, also of one network")
    check_data(data)
    check_on_epoch(on_epoch)


def _adopted(ensemble: Ensemble, data: Data, loss: Loss | None, device: torch.device) -> tuple[Data, Loss | None]:
    """Examine the data, let the ensemble adopt them and move to the device; return data and loss to train with."""
    data = examined(ensemble.members[0], data, device)
    loss = ensemble.adopt(data, loss)
    ensemble.to(device)
    return data, loss


def _epoch(engine: Engine, active: Sequence[Member], epoch: int, display: Display) -> tuple[list[float], list[Result]]:
    if not active:  # those of this process have all stopped, others have not
        return [], []
    return engine.train_epoch(active, epoch, display.step), engine.validate(active)


def _ready(engine: Engine, plan: Plan, active: Sequence[Member]) -> Engine:
    """The engine, if it can train these members; otherwise the loop, which trains any."""
    try:
        engine.take(active)
    except CaptureError as error:
        plan.tell(f"training goes on without a CUDA graph, slower: {error}")
        engine = LoopEngine(plan)
        engine.take(active)
    return engine


def _tell(
    fleet: Sequence[Member], history: History, own: Mapping[int, Member], rows: Sequence[Row], mesh: Mesh
) -> None:
    """Let every process know what became of every member in this epoch."""
    speaks = mesh.data_place == 0
    news = [(row, _standing(own[int(row["member"] or 0)])) for row in rows] if speaks else []
    for row, standing in sorted((item for part in gather(news) for item in part), key=lambda item: item[0]["member"]):
        number = row["member"]
        history.rows.append(row)
        _take_standing(fleet[number], standing)
        if fleet[number].stopped:
            history.stopped[number] = fleet[number].stopped or ""


def _report(on_epoch: OnEpoch | None, history: History, epoch: int) -> None:
    """Call the user's function, if there is one, in the first process; an exception of it ends all processes."""

    def call() -> None:
        if on_epoch is not None:
            on_epoch(history.epoch(epoch))

    decided_by_first(call)  # all take part, also those that were given no function


def _standing(member: Member) -> dict[str, Any]:
    return {"score": member.best_score, "epoch": member.best_epoch, "rise": member.rise, "stopped": member.stopped}


def _take_standing(member: Member, standing: Mapping[str, Any]) -> None:
    member.best_score = float(checked(standing["score"], (int, float), "a member's score"))
    member.best_epoch = checked(standing["epoch"], int, "a member's best epoch")
    member.rise = checked(standing["rise"], int, "a member's last epoch that was better")
    member.stopped = checked(standing["stopped"], (str, type(None)), "why a member stopped")


def _captured(execution: Execution, device: torch.device, mesh: Mesh) -> bool:
    """Whether a CUDA graph does the work: not where processes have to exchange derivatives in a step."""
    if execution.engine == "graph" and device.type not in GRAPH_DEVICES:
        raise ValueError(f"engine must be 'loop' or 'auto' on {device}: 'graph' is for CUDA devices")
    if execution.engine == "graph" and mesh.data_places > 1:
        raise ValueError(
            "engine must be 'loop' or 'auto' where several processes share a member: a graph holds no messages"
        )
    return device.type in GRAPH_DEVICES and execution.engine != "loop" and mesh.data_places == 1


def _plan(
    data: Data,
    recipe: Recipe,
    execution: Execution,
    loss: Loss,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh,
) -> Plan:
    streamed = not isinstance(data.train, TensorSplit)
    shape = data.shape
    augmentation = "none" if streamed else resolved(recipe.augmentation, shape, data.task)
    steps = data.num_batches("train", recipe.batch_size)
    plan = Plan(data, recipe, execution, loss, seed, device, augmentation, shape, steps, dtype, mesh)
    if device.type == "cuda" and mesh.data_places > 1:
        plan.tell("training runs without a CUDA graph, slower: several processes share a member")
    return plan


def _checked_recipe(recipe: Recipe | None, data: Data, ensemble: Ensemble) -> Recipe:
    recipe = recipe_for(data.task, recipe)
    check_rules(recipe, ensemble)
    return recipe


def _checked_numbers(numbers: Sequence[int] | None, members: int) -> list[int]:
    if numbers is None:
        return list(range(members))
    check_list("numbers", numbers)
    if len(numbers) != members:
        raise ValueError(f"numbers must hold one for each of the {members} networks, not {list(numbers)!r}")
    for number in numbers:
        check_whole("each of numbers", number, least=0)
    return [int(number) for number in numbers]


def _judge(member: Member, number: int, row: Row, recipe: Recipe) -> None:
    """Keep the weights if they are the best so far; stop the member if it diverged or stands still."""
    epoch, accuracy = int(row["epoch"] or 0), row["validation_accuracy"]
    for name in ("loss", "validation_loss"):
        value = row[name]
        if value is not None and not math.isfinite(value):
            kept = f"of epoch {member.best_epoch + 1}" if member.best_epoch >= 0 else "it started with"
            member.stopped = f"its {name.replace('_', ' ')} became {value} in epoch {epoch + 1}"
            warnings.warn(
                f"member {number} stops with the weights {kept}: {member.stopped}. Look for extremes in `data`, or "
                f"lower the recipe's rate ({recipe.rate:g})",
                stacklevel=3,
            )
            return
    # By accuracy, or the loss of a regression; of equal epochs the last, which has learned longest. Without a
    # validation split that is the last of all.
    cost = row["validation_loss"]
    score = accuracy if accuracy is not None else 0.0 if cost is None else -cost
    if score > member.best_score:
        member.rise = epoch
    if score >= member.best_score or recipe.keep == "last":
        _copy_into(member.best, member.network)
        member.best_score, member.best_epoch = max(score, member.best_score), epoch
    if recipe.patience is not None and cost is not None and epoch - member.rise >= recipe.patience:
        member.stopped = f"no better validation result for {recipe.patience} epochs"


def _loss(data: Data, recipe: Recipe, loss: Loss | None, units: Units | None) -> Loss:
    if loss is None and data.task == "classification" and recipe.label_smoothing:
        return lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=recipe.label_smoothing)
    return loss_for(data, loss, units)


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in all_tensors(network).items()}


def _restore(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Bring a network to what `_copy` has kept of it; a buffer that was not set then is not set now."""
    fill(network, tensors)
    for name in unsaved_buffers(network) - tensors.keys():
        owner, _, attribute = name.rpartition(".")
        network.get_submodule(owner)._buffers[attribute] = None


@torch.no_grad()
def _copy_into(copy: dict[str, Tensor], network: nn.Module) -> None:
    """In few kernels, whatever the number of tensors."""
    state = all_tensors(network)
    for name in copy.keys() - state.keys():  # a buffer that is not set any more
        del copy[name]
    for name, tensor in state.items():
        if name not in copy or copy[name].shape != tensor.shape:  # a buffer that is new, or has grown
            copy[name] = tensor.detach().clone()
    for dtype in {tensor.dtype for tensor in state.values()}:
        names = [name for name, tensor in state.items() if tensor.dtype == dtype]
        torch._foreach_copy_([copy[name] for name in names], [state[name] for name in names])


def _identified(
    checkpoint: str | Path | RunFile | None,
    ensemble: Ensemble,
    data: Data,
    recipe: Recipe,
    execution: Execution,
    seed: int,
    numbers: Sequence[int],
    loss: Loss | None,
    loss_name: str | None,
) -> tuple[Path | None, Identity]:
    """Return the checkpoint's path, and what it must agree on with this run: its method's identity, or its own."""
    if checkpoint is None or isinstance(checkpoint, RunFile):
        return (None, {}) if checkpoint is None else (checkpoint.path, checkpoint.identity)
    units = None if ensemble.units is None else ensemble.units.to_json()
    own = {"seed": seed, "numbers": numbers, "units": units, "gaussian": ensemble.gaussian}
    # Of several processes, which may have drawn other weights, the first decides.
    return Path(checkpoint), gather(
        identity_of(ensemble.members, data, recipe, execution, loss, loss_name, "checkpoint=", method="train", **own)
    )[0]


def _save(
    path: Path, fleet: list[Member], history: History, next_epoch: int, run: Mapping[str, Any], mesh: Mesh
) -> None:
    tensors: dict[str, Tensor] = {}
    for number, member in enumerate(fleet):
        if rank() != mesh.source(number):
            continue
        tensors |= {f"{number}.now.{name}": tensor for name, tensor in _copy(member.network).items()}
        tensors |= {f"{number}.best.{name}": tensor for name, tensor in member.best.items()}
        state = member.optimizer_state.tensors()
        tensors |= {f"{number}.optimizer.{name}": tensor for name, tensor in state.items()}
    everything = collect_tensors(tensors)
    if everything is not None:
        members = [_standing(member) for member in fleet]
        engines = {"engines": history.engines, "fallbacks": history.fallbacks}
        save_checkpoint(
            path, everything, {**run, "epoch": next_epoch, "members": members, "rows": history.rows, **engines}
        )


def _earlier(path: Path | None, identity: Identity) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The checkpoint of this run; None if there is none."""
    found = None if path is None else load_checkpoint(path)
    if found is not None:
        check_same(found[1].get("identity"), identity, f"checkpoint {path}")
    return found


def _resume(
    earlier: tuple[dict[str, Tensor], dict[str, Any]] | None, fleet: list[Member], path: Path | None
) -> tuple[History, int]:
    """Bring the fleet to where a checkpoint left it; returns the history so far and the next epoch."""
    if earlier is None:
        return History(), 0
    tensors, state = earlier
    with refused(f"checkpoint {path} does not fit the networks (delete it to start anew)"):
        history = History.restored(state["rows"], state.get("engines", []), state.get("fallbacks", []))
        epoch = checked(state["epoch"], int, "epoch")
        standings = checked_list(state["members"], dict, "members")
        if epoch != history.epochs or epoch < 1:
            raise ValueError(f"it goes on with epoch {epoch}, which does not follow the last one of its history")
        strangers = {name for name in tensors if not is_members(name, len(fleet))}
        if strangers:
            raise ValueError(f"it has {min(strangers)}")
        for number, (member, standing) in enumerate(zip(fleet, standings, strict=True)):
            device = next(member.network.parameters()).device
            now, best = (_named(tensors, f"{number}.{kind}.", device) for kind in ("now", "best"))
            for kept in (now, best):
                check_complete(member.network, kept, bool(state.get("earlier_version")))
            _restore(member.network, now)
            member.best = best
            member.optimizer_state = OptimizerState(_named(tensors, f"{number}.optimizer.", device))
            _take_standing(member, standing)
            if member.stopped:
                history.stopped[number] = member.stopped
    return history, epoch


def _named(tensors: Mapping[str, Tensor], prefix: str, device: torch.device) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t.to(device) for name, t in tensors.items() if name.startswith(prefix)}
