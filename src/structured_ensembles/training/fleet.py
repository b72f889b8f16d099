"""train(): all members of an ensemble at once, over one pass of the data.

Every batch is drawn, augmented and normalised once, and every member takes its step on it. Randomness comes from the
seed,
the epoch and the step alone, never from the other members: a member of a fleet is the network trained alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.data import Data
from structured_ensembles.data.augmentation import Augmentation, augment, resolved
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.devices import Device, pick_device
from structured_ensembles.ensemble import Ensemble, combined, member_outputs
from structured_ensembles.evaluation.discarding import discard_threshold
from structured_ensembles.history import COLUMNS, History, Row
from structured_ensembles.losses import Loss, loss_for, mean_loss
from structured_ensembles.training.checkpoint import (
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from structured_ensembles.training.display import Display
from structured_ensembles.training.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """What every epoch of a run needs to know."""

    data: Data
    recipe: Recipe
    loss: Loss
    seed: int
    device: torch.device
    augmentation: Augmentation
    steps: int  # in an epoch


@dataclass
class Member:
    """One network in training."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    best: dict[str, Tensor]  # a true copy of the weights of the best epoch
    best_score: float = -math.inf
    best_epoch: int = -1  # the last one with that score
    rise: int = -1  # the last epoch that was better than all before
    stopped: str | None = None
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))


def train(
    ensemble: Ensemble,
    data: Data,
    recipe: Recipe | None = None,
    device: Device = "auto",
    seed: int = 0,
    *,
    loss: Loss | None = None,
    checkpoint: str | Path | None = None,
    quiet: bool = False,
) -> History:
    """Train every member of `ensemble` in place; each ends with the weights of its best validation epoch.

    device: "auto" takes a GPU if there is one; the ensemble stays on the device.
    loss: a function of (outputs, targets) that averages over samples; by default the task's own.
    checkpoint: a file to write after every epoch; if it is there already, training goes on from it, to the same
        weights.
    """
    recipe = recipe or Recipe.named("modern")
    where = pick_device(device, ensemble)
    ensemble.adopt(data)
    ensemble.to(where)
    data = data.to(where)
    streamed = not isinstance(data.train, TensorSplit)
    plan = Plan(
        data,
        recipe,
        _loss(data, recipe, loss),
        seed,
        where,
        "none" if streamed else resolved(recipe.augmentation, data.shape),
        data.num_batches("train", recipe.batch_size),
    )
    path = None if checkpoint is None else Path(checkpoint)
    identity = _identity(ensemble, data, recipe, seed)
    fleet = [Member(network, recipe.optimizer_for(network), _copy(network)) for network in ensemble.members]
    history, first = _resume(path, fleet, identity)

    cuda = [where] if where.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=cuda),
        Display(len(fleet), recipe.epochs, plan.steps, data.task, quiet) as display,
    ):
        for epoch in range(first, recipe.epochs):
            active = {number: member for number, member in enumerate(fleet) if member.stopped is None}
            if not active:
                break
            start = time.perf_counter()
            _train_epoch(list(active.values()), plan, epoch, display)
            results = _validate(list(active.values()), plan)
            seconds = time.perf_counter() - start
            rate = recipe.rate_at((epoch + 1) * plan.steps - 1, plan.steps)
            for (number, member), (validation_loss, accuracy) in zip(active.items(), results, strict=True):
                training_loss = float(member.loss) / plan.steps
                figures = (epoch, number, rate, training_loss, validation_loss, accuracy, seconds)
                history.rows.append(dict(zip(COLUMNS, figures, strict=True)))
                _judge(member, number, history.rows[-1], recipe)
                if member.stopped:
                    history.stopped[number] = member.stopped
            display.epoch(epoch, history, rate)
            if path is not None:
                _save(path, fleet, history, epoch + 1, identity)
    for member in fleet:
        member.network.load_state_dict(member.best)
        member.network.eval()
    if data.validation is not None and data.task == "classification":
        ensemble.threshold = discard_threshold(ensemble, data)
    ensemble.history = history
    return history


def _train_epoch(active: list[Member], plan: Plan, epoch: int, display: Display) -> None:
    for member in active:
        member.network.train()
        member.loss = torch.zeros((), device=plan.device)
    batches = plan.data.train.batches(plan.recipe.batch_size, (plan.seed, epoch), plan.device)
    for step, (stored, targets) in enumerate(batches):
        inputs = plan.data.prepare(augment(stored, plan.augmentation, (plan.seed, epoch, step)))
        draws = int(np.random.default_rng((plan.seed, epoch, step, 1)).integers(2**62))
        rate = plan.recipe.rate_at(epoch * plan.steps + step, plan.steps)
        for member in active:
            torch.manual_seed(draws)  # dropout: the same draws for a member alone and in a fleet
            for group in member.optimizer.param_groups:
                group["lr"] = rate
            with _autocast(plan):
                outputs = member_outputs(member.network, inputs)
            cost = mean_loss(plan.loss, outputs.float(), targets)
            member.optimizer.zero_grad(set_to_none=True)
            cost.backward()
            member.optimizer.step()
            member.loss += cost.detach()
        display.step()


@torch.no_grad()
def _validate(active: list[Member], plan: Plan) -> list[tuple[float | None, float | None]]:
    """Loss and accuracy of each member on the validation split; None where there is none."""
    if plan.data.validation is None:
        return [(None, None)] * len(active)
    classifying = plan.data.task == "classification"
    totals = torch.zeros(len(active), 2, dtype=torch.float64, device=plan.device)
    seen = 0
    for member in active:
        member.network.eval()
    for inputs, targets in plan.data.batches("validation", 512, device=plan.device):
        for index, member in enumerate(active):
            with _autocast(plan):
                outputs = member_outputs(member.network, inputs).float()
            totals[index, 0] += mean_loss(plan.loss, outputs, targets) * len(inputs)
            if classifying:
                totals[index, 1] += (combined(outputs).argmax(-1) == targets).sum()
        seen += len(inputs)
    rows: list[list[float]] = (totals / seen).tolist()
    return [(cost, accuracy if classifying else None) for cost, accuracy in rows]


def _judge(member: Member, number: int, row: Row, recipe: Recipe) -> None:
    """Keep the weights if they are the best so far; stop the member if it diverged or stands still."""
    epoch, accuracy = int(row["epoch"] or 0), row["validation_accuracy"]
    for name in ("loss", "validation_loss"):
        value = row[name]
        if value is not None and not math.isfinite(value):
            kept = f"of epoch {member.best_epoch + 1}" if member.best_epoch >= 0 else "it started with"
            member.stopped = f"its {name.replace('_', ' ')} became {value} in epoch {epoch + 1}"
            warnings.warn(f"member {number} stops with the weights {kept}: {member.stopped}", stacklevel=3)
            return
    # By accuracy, or the loss of a regression; of equal epochs the last, which has learned longest. Without a
    # validation split that is the last of all.
    cost = row["validation_loss"]
    score = accuracy if accuracy is not None else 0.0 if cost is None else -cost
    if score > member.best_score:
        member.rise = epoch
    if score >= member.best_score or recipe.keep == "last":
        member.best, member.best_score, member.best_epoch = _copy(member.network), max(score, member.best_score), epoch
    if recipe.patience is not None and cost is not None and epoch - member.rise >= recipe.patience:
        member.stopped = f"no better validation result for {recipe.patience} epochs"


def _loss(data: Data, recipe: Recipe, loss: Loss | None) -> Loss:
    if loss is None and data.task == "classification" and recipe.label_smoothing:
        return lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=recipe.label_smoothing)
    return loss_for(data, loss)


def _autocast(plan: Plan) -> AbstractContextManager[object]:
    lower = plan.recipe.precision == "bfloat16"
    if plan.recipe.precision == "auto":
        lower = plan.device.type == "cuda" and torch.cuda.is_bf16_supported()
    if not lower:
        return nullcontext()
    return torch.autocast(plan.device.type, dtype=torch.bfloat16)


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def _identity(ensemble: Ensemble, data: Data, recipe: Recipe, seed: int) -> str:
    """What a checkpoint must agree on with the run that goes on from it."""
    shapes = [[name, list(tensor.shape)] for name, tensor in ensemble.state_dict().items()]
    described = [shapes, data.name, len(data.train), recipe.to_dict(), seed]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _save(path: Path, fleet: list[Member], history: History, next_epoch: int, identity: str) -> None:
    tensors: dict[str, Tensor] = {}
    for number, member in enumerate(fleet):
        tensors |= {f"{number}.now.{name}": tensor for name, tensor in _copy(member.network).items()}
        tensors |= {f"{number}.best.{name}": tensor for name, tensor in member.best.items()}
        tensors |= optimizer_tensors(f"{number}.optimizer.", member.optimizer)
    members = [{"score": m.best_score, "epoch": m.best_epoch, "rise": m.rise, "stopped": m.stopped} for m in fleet]
    state = {"identity": identity, "epoch": next_epoch, "members": members, "rows": history.rows}
    save_checkpoint(path, tensors, state)


def _resume(path: Path | None, fleet: list[Member], identity: str) -> tuple[History, int]:
    """Bring the fleet to where a checkpoint left it; returns the history so far and the next epoch."""
    found = None if path is None else load_checkpoint(path)
    if found is None:
        return History(), 0
    tensors, state = found
    if state["identity"] != identity:
        raise ValueError(
            f"checkpoint {path} is of another run (its networks, data, recipe or seed differ): "
            "delete it, or choose another file"
        )
    history = History(state["rows"])
    for number, (member, kept) in enumerate(zip(fleet, state["members"], strict=True)):
        device = next(member.network.parameters()).device
        member.network.load_state_dict(_named(tensors, f"{number}.now.", device))
        member.best = _named(tensors, f"{number}.best.", device)
        restore_optimizer(f"{number}.optimizer.", member.optimizer, tensors)
        member.best_score, member.best_epoch = kept["score"], kept["epoch"]
        member.rise, member.stopped = kept["rise"], kept["stopped"]
        if member.stopped:
            history.stopped[number] = member.stopped
    return history, state["epoch"]


def _named(tensors: Mapping[str, Tensor], prefix: str, device: torch.device) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t.to(device) for name, t in tensors.items() if name.startswith(prefix)}
