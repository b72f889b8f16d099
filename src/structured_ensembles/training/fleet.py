"""train_fleet(): train all members of an ensemble at once.

Every member has its own order of batches, its own crops, flips and dropout, from (seed, member, epoch), and nothing of
what it draws depends on the other members: a member of a fleet is the network trained alone with the same seed and
member number. Only data that are streamed (`Data.from_loaders`) are read once per epoch, and shared. How the epochs are
computed is the business of an engine (`engine.py`); what an epoch means is written here.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.checks import check_list, check_whole, checked_seed
from structured_ensembles.common.devices import Device, pick_device
from structured_ensembles.common.processes import decided_by_first, gather, rank
from structured_ensembles.cuda.capture import CaptureError, ask_for_small_workspaces
from structured_ensembles.cuda.channels_last import channels_last
from structured_ensembles.data import Data
from structured_ensembles.data.augmentation import resolved
from structured_ensembles.data.losses import Loss, learned_units, loss_for
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.data.target_scaling import Units
from structured_ensembles.networks.copying import all_tensors, dtype_of, fill, unsaved_buffers, without_nested_tensors
from structured_ensembles.resuming.identity import Identity, RunFile, check_same, identity_of
from structured_ensembles.storage.container import checked, checked_leaves, checked_list, refused
from structured_ensembles.training.checkpoint import check_complete, is_members, load_checkpoint, save_checkpoint
from structured_ensembles.training.display import Display
from structured_ensembles.training.engine import Engine, Member, Plan, Result
from structured_ensembles.training.execution import Execution
from structured_ensembles.training.graph_engine import GraphEngine
from structured_ensembles.training.history import COLUMNS, History, OnEpoch, Row
from structured_ensembles.training.loop_engine import LoopEngine
from structured_ensembles.training.mesh import Mesh, collect_tensors, mesh_for, spread
from structured_ensembles.training.optimizers import OptimizerState
from structured_ensembles.training.recipe import Recipe

GRAPH_DEVICES = {"cuda"}  # where the graph engine may run; tests name the CPU, where a captured step is the step itself


@dataclass(frozen=True)
class PreparedTraining:
    """Checked arguments of a training, and what an earlier call has left in its checkpoint.

    numbers: of the members. captured: whether a CUDA graph computes the epochs. path, identity: of the checkpoint.
    earlier: the tensors and the state that lie there; None if there are none.
    """

    recipe: Recipe
    execution: Execution
    seed: int
    numbers: Sequence[int]
    device: torch.device
    mesh: Mesh
    captured: bool
    path: Path | None
    identity: Identity
    earlier: tuple[dict[str, Tensor], dict[str, Any]] | None

    def units(self, members: nn.ModuleList, data: Data, loss: Loss | None, known: Units | None) -> Units | None:
        """Return the units that the members learn a regression's targets in: those of the checkpoint, or the known."""
        if self.earlier is not None:
            with refused(f"checkpoint {self.path} is damaged; delete it to start anew"):
                return Units.from_json(checked_leaves(self.earlier[1].get("units"), (int, float), "units"))
        return learned_units(list(members), data, loss) if known is None else known


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
) -> PreparedTraining:
    """Check the arguments of a training before any network changes, and read its checkpoint if there is one.

    units, gaussian: of the ensemble, before it knows these data.
    """
    seed = checked_seed(seed)
    numbers = _checked_numbers(numbers, len(members))
    where = pick_device(device, members)
    mesh = mesh_for(len(members), where)
    captured = _captured(execution, where, mesh)
    if captured:
        ask_for_small_workspaces()  # before anything takes a large one
    own = {"seed": seed, "numbers": numbers, "units": None if units is None else units.to_json(), "gaussian": gaussian}
    path, identity = _identified(checkpoint, members, data, recipe, execution, loss, loss_name, own)
    return PreparedTraining(
        recipe, execution, seed, numbers, where, mesh, captured, path, identity, earlier=_earlier(path, identity)
    )


def train_fleet(
    run: PreparedTraining,
    members: nn.ModuleList,
    data: Data,
    loss: Loss | None,
    units: Units | None,
    on_epoch: OnEpoch | None,
    quiet: bool,
) -> History:
    """Train all members at once, in place; each ends with the weights of its best validation epoch.

    members: on the run's device. loss, units: what they are trained with. on_epoch: called after every epoch.
    """
    recipe = run.recipe
    plan = _plan(
        data.to(run.device),
        recipe,
        run.execution,
        _loss(data, recipe, loss, units),
        run.seed,
        run.device,
        dtype_of(members),
        run.mesh,
    )
    cuda = [plan.device] if plan.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=cuda),
        without_nested_tensors(members),
        channels_last(members, plan.example(torch.zeros), plan.tell),
        Display(len(members), recipe.epochs, plan.steps, data.task, quiet or rank() > 0) as display,
    ):
        fleet = [Member(network, number, _copy(network)) for network, number in zip(members, run.numbers, strict=True)]
        history, first = _resume(run.earlier, fleet, run.path)
        kept = {"identity": run.identity, "units": None if units is None else units.to_json()}
        engine: Engine = GraphEngine(plan) if run.captured else LoopEngine(plan)
        for epoch in range(first, recipe.epochs):
            active = {number: member for number, member in enumerate(fleet) if member.stopped is None}
            if not active:
                break
            start = time.perf_counter()
            own = {number: member for number, member in active.items() if run.mesh.trains(number)}
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
            _tell(fleet, history, own, rows, run.mesh)
            display.epoch(epoch, history, rate)
            if run.path is not None:
                _save(run.path, fleet, history, epoch + 1, kept, run.mesh)
            _report(on_epoch, history, epoch)
        for number, member in enumerate(fleet):
            spread(list(member.best.values()), run.mesh.source(number))
            _restore(member.network, member.best)
            member.network.eval()
    return history


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
                stacklevel=4,
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
    members: nn.ModuleList,
    data: Data,
    recipe: Recipe,
    execution: Execution,
    loss: Loss | None,
    loss_name: str | None,
    own: Mapping[str, Any],
) -> tuple[Path | None, Identity]:
    """Return the checkpoint's path, and what it must agree on with this run: its method's identity, or its own."""
    if checkpoint is None or isinstance(checkpoint, RunFile):
        return (None, {}) if checkpoint is None else (checkpoint.path, checkpoint.identity)
    # Of several processes, which may have drawn other weights, the first decides.
    return Path(checkpoint), gather(
        identity_of(members, data, recipe, execution, loss, loss_name, "checkpoint=", method="train", **own)
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
