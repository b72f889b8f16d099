"""The loop engine: member after member, on any device. What the other engine computes, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from structured_ensembles.common.devices import seed_generators
from structured_ensembles.common.inputs import Inputs, cloned, rows_of
from structured_ensembles.common.processes import add_up, average_buffers
from structured_ensembles.data.augmentation import augment, draw_crops
from structured_ensembles.data.drawing import stream
from structured_ensembles.data.losses import mean_loss
from structured_ensembles.data.splits import Batch, TensorSplit
from structured_ensembles.prediction.combination import combined, member_outputs
from structured_ensembles.training.engine import Member, Plan, Result
from structured_ensembles.training.optimizers import optimizer_for, set_rate


class LoopEngine:
    """Step by step, every member draws, augments and normalises its batch and learns from it."""

    name = "loop"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.optimizers: dict[Member, torch.optim.Optimizer] = {}

    def take(self, active: Sequence[Member]) -> None:
        for member in active:
            if member not in self.optimizers:
                optimizer = optimizer_for(self.plan.recipe, member.network)
                member.optimizer_state.load_into(optimizer)
                self.optimizers[member] = member.optimizer_state.optimizer = optimizer

    def train_epoch(self, active: Sequence[Member], epoch: int, advance: Callable[[], None]) -> list[float]:
        plan = self.plan
        losses = torch.zeros(len(active), device=plan.device, dtype=plan.exact)
        for member in active:
            member.network.train()
        for step, batches in enumerate(self._batches(active, epoch)):
            rate = plan.recipe.rate_at(epoch * plan.steps + step, plan.steps)
            for index, (member, batch) in enumerate(zip(active, batches, strict=True)):
                optimizer = self.optimizers[member]
                inputs, targets, share = self._share(*batch)
                seed_generators(plan.member_seed("dropout", member, epoch, step, plan.mesh.data_place), plan.device)
                set_rate(optimizer, rate)
                optimizer.zero_grad(set_to_none=True)
                if share:
                    with plan.autocast():
                        outputs = member_outputs(member.network, inputs)
                    cost = share * mean_loss(plan.loss, outputs.to(plan.exact), self._fitting(targets))
                    cost.backward()
                    losses[index] += cost.detach()
                if plan.mesh.data_places > 1:
                    add_up(_gradients(member.network), plan.mesh.group)
                optimizer.step()
            advance()
        if plan.mesh.data_places > 1:
            add_up([losses], plan.mesh.group)
            for member in active:
                average_buffers(list(member.network.buffers()), plan.mesh.group)
        return (losses / plan.steps).tolist()

    def _batches(self, active: Sequence[Member], epoch: int) -> Iterator[Iterable[Batch]]:
        """Yield, for every step, the batch of each member as its network gets it.

        Members draw their own; data that are streamed are read once, and every member gets a copy of the batches.
        """
        plan, split = self.plan, self.plan.data.train
        if isinstance(split, TensorSplit):
            yield from zip(*(self._member_batches(split, member, epoch) for member in active), strict=True)
            return
        order = stream(plan.seed, "order", epoch)
        for stored, targets in split.batches(plan.recipe.batch_size, order, plan.device):
            prepared = plan.data.prepare(stored, plan.dtype)
            yield ((cloned(prepared), targets) for _ in active)

    def _member_batches(self, split: TensorSplit, member: Member, epoch: int) -> Iterator[Batch]:
        plan = self.plan
        seed = plan.member_seed("crops", member, epoch)
        crops = draw_crops(plan.augmentation, plan.shape, len(split), seed, plan.device)
        first, order = 0, plan.member_seed("order", member, epoch)
        for stored, targets in split.batches(plan.recipe.batch_size, order, plan.device):
            if crops is not None:
                assert isinstance(stored, Tensor), "only images are cropped"
                stored = augment(stored, crops[first : first + len(targets)])  # noqa: PLW2901
            yield plan.data.prepare(stored, plan.dtype), targets
            first += len(targets)

    def _fitting(self, targets: Tensor) -> Tensor:
        return targets.to(self.plan.exact) if targets.is_floating_point() else targets

    def _share(self, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor, float]:
        """Cut out what this process takes of a batch; also returns which share of the batch that is."""
        mesh, whole = self.plan.mesh, len(targets)
        if mesh.data_places == 1:
            return inputs, targets, 1.0
        if whole < 2 * mesh.data_places:  # too few for normalisation to have two each: the first takes them all
            mine = whole if mesh.data_place == 0 else 0
            return rows_of(inputs, slice(mine)), targets[:mine], float(mine > 0)
        rows = slice(mesh.data_place, None, mesh.data_places)
        targets = targets[rows]
        return rows_of(inputs, rows), targets, len(targets) / whole

    @torch.no_grad()
    def validate(self, active: Sequence[Member]) -> list[Result]:
        plan = self.plan
        if plan.data.validation is None:
            return [(None, None)] * len(active)
        classifying = plan.data.task == "classification"
        totals = torch.zeros(len(active), 2, dtype=torch.float64, device=plan.device)
        seen = 0
        for member in active:
            member.network.eval()
        for inputs, targets in plan.data.batches("validation", 512, device=plan.device, dtype=plan.dtype):
            for index, member in enumerate(active):
                with plan.autocast():
                    outputs = member_outputs(member.network, cloned(inputs)).to(plan.exact)
                totals[index, 0] += mean_loss(plan.loss, outputs, self._fitting(targets)) * len(targets)
                if classifying:
                    totals[index, 1] += (combined(outputs).argmax(-1) == targets).sum()
            seen += len(targets)
        rows: list[list[float]] = (totals / seen).tolist()
        return [(cost, accuracy if classifying else None) for cost, accuracy in rows]


def _gradients(network: nn.Module) -> list[Tensor]:
    """List the gradients of all parameters that are trained; zeros where a process had nothing to learn from."""
    gradients = []
    for parameter in network.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    return gradients
