"""The loop engine: trains one member after the other in plain PyTorch, on any device; the reference for the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from structured_ensembles.common.devices import seed_generators
from structured_ensembles.common.inputs import Inputs, clone_inputs, select_rows
from structured_ensembles.common.processes import average_buffers, sum_over_processes
from structured_ensembles.data.augmentation import augment, draw_crops
from structured_ensembles.data.batch_changes import changes_for
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.data.losses import mean_loss
from structured_ensembles.data.preparation import prepare_targets
from structured_ensembles.data.splits import Batch, IndexedSplit
from structured_ensembles.prediction.combination import combine_logits, member_outputs
from structured_ensembles.training.averaging import update_average
from structured_ensembles.training.engine import Member, Plan, Result
from structured_ensembles.training.optimizers import optimizer_for, set_rate


class LoopEngine:
    """An engine that takes every step for each member in turn."""

    name = "loop"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.optimizers: dict[Member, torch.optim.Optimizer] = {}

    def prepare(self, active: Sequence[Member]) -> None:
        for member in active:
            if member not in self.optimizers:
                optimizer = optimizer_for(self.plan.recipe, member.network)
                member.optimizer_state.load_into(optimizer)
                self.optimizers[member] = member.optimizer_state.optimizer = optimizer

    def train_epoch(self, active: Sequence[Member], epoch: int, advance: Callable[[], None]) -> list[float]:
        plan = self.plan
        losses = torch.zeros(len(active), device=plan.device, dtype=plan.loss_dtype)
        for member in active:
            member.network.train()
        has_samples = False
        for step, batches in enumerate(self._batches(active, epoch)):
            rate = plan.recipe.rate_at(epoch * plan.steps + step, plan.steps)
            weight = plan.recipe.averaging_weight(epoch * plan.steps + step, plan.steps)
            for index, (member, batch) in enumerate(zip(active, batches, strict=True)):
                optimizer = self.optimizers[member]
                inputs, targets, share = self._process_share(*batch)
                seed_generators(plan.member_seed("dropout", member, epoch, step, plan.mesh.data_rank), plan.device)
                set_rate(optimizer, rate)
                optimizer.zero_grad(set_to_none=True)
                if share:
                    targets = prepare_targets(plan.teach(targets, inputs), plan.dtype)
                    with plan.autocast():
                        outputs = member_outputs(member.network, inputs)
                    cost = share * mean_loss(plan.loss, outputs.to(plan.loss_dtype), targets)
                    cost.backward()
                    losses[index] += cost.detach()
                    has_samples = True
                if plan.mesh.data_size > 1:
                    sum_over_processes(_gradients(member.network), plan.mesh.group)
                optimizer.step()
                if weight:
                    update_average([member], weight)
            advance()
        if plan.mesh.data_size > 1:
            sum_over_processes([losses], plan.mesh.group)
            for member in active:
                average_buffers(member.network, plan.mesh.group, has_samples=has_samples)
        return (losses / plan.steps).tolist()

    def _batches(self, active: Sequence[Member], epoch: int) -> Iterator[Iterable[Batch]]:
        """Yield, for every step, the batch of each member as its network gets it.

        Members draw their own batches; those of a loader are read once, and every member gets a copy of each batch.
        """
        plan, split = self.plan, self.plan.data.train
        if isinstance(split, IndexedSplit):
            yield from zip(*(self._member_batches(split, member, epoch) for member in active), strict=True)
            return
        order = derive_seed(plan.seed, "order", epoch)
        for stored, targets in split.batches(plan.recipe.batch_size, order, plan.device):
            prepared = plan.data.prepare(stored, plan.dtype)
            yield ((clone_inputs(prepared), targets) for _ in active)

    def _member_batches(self, split: IndexedSplit, member: Member, epoch: int) -> Iterator[Batch]:
        """Yield the batches that a member draws, augmented and normalised."""
        plan = self.plan
        seed = plan.member_seed("crops", member, epoch)
        crops = draw_crops(plan.augmentation, plan.shape, len(split), seed, plan.device)
        changes = changes_for(plan.augmentation, plan.recipe.mixup, plan.data, len(split), plan.steps, plan.device)
        if changes is not None:
            changes.shuffle(seed)
        first, order = 0, plan.member_seed("order", member, epoch)
        for step, (stored, targets) in enumerate(split.batches(plan.recipe.batch_size, order, plan.device)):
            if crops is not None:
                assert isinstance(stored, Tensor), "only images are cropped"
                stored = augment(stored, crops[first : first + len(targets)])  # noqa: PLW2901
            batch = plan.data.prepare(stored, plan.dtype), targets
            yield batch if changes is None else changes.apply(*batch, first, step)
            first += len(targets)

    def _process_share(self, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor, float]:
        """Return this process's rows of a batch, inputs and targets, and their share of the batch."""
        mesh, batch_size = self.plan.mesh, len(targets)
        if mesh.data_size == 1:
            return inputs, targets, 1.0
        if batch_size < 2 * mesh.data_size:  # batch norm needs two samples in each process: the first one takes all
            count = batch_size if mesh.data_rank == 0 else 0
            return select_rows(inputs, slice(count)), targets[:count], float(count > 0)
        rows = slice(mesh.data_rank, None, mesh.data_size)
        targets = targets[rows]
        return select_rows(inputs, rows), targets, len(targets) / batch_size

    @torch.no_grad()
    def validate(self, active: Sequence[Member]) -> list[Result]:
        plan = self.plan
        if plan.data.validation is None:
            return [(None, None)] * len(active)
        classifying = plan.data.task == "classification"
        totals = torch.zeros(len(active), 2, dtype=torch.float64, device=plan.device)
        samples = 0
        for member in active:
            member.network.eval()
        for inputs, targets in plan.data.batches("validation", 512, device=plan.device, dtype=plan.dtype):
            for index, member in enumerate(active):
                with plan.autocast():
                    outputs = member_outputs(member.network, clone_inputs(inputs)).to(plan.loss_dtype)
                totals[index, 0] += mean_loss(plan.loss, outputs, targets) * len(targets)
                if classifying:
                    totals[index, 1] += (combine_logits(outputs).argmax(-1) == targets).sum()
            samples += len(targets)
        rows: list[list[float]] = (totals / samples).tolist()
        return [(cost, accuracy if classifying else None) for cost, accuracy in rows]


def _gradients(network: nn.Module) -> list[Tensor]:
    """Return the gradients of all trained parameters; zeros where a process had no samples."""
    gradients = []
    for parameter in network.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    return gradients
