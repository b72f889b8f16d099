"""The loop engine: member after member, on any device. What the other engine computes, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from structured_ensembles.data.augmentation import augment, draw_crops
from structured_ensembles.data.drawing import fold
from structured_ensembles.ensemble import combined, member_outputs
from structured_ensembles.losses import mean_loss
from structured_ensembles.parallel import add_up, average_buffers
from structured_ensembles.training.plan import Member, Plan, Result


class LoopEngine:
    """Every batch is drawn, augmented and normalised once, and every member takes its step on it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def take(self, active: Sequence[Member]) -> None:
        """Nothing to get ready."""

    def train_epoch(self, active: Sequence[Member], epoch: int, advance: Callable[[], None]) -> list[float]:
        plan, size = self.plan, self.plan.recipe.batch_size
        losses = torch.zeros(len(active), device=plan.device, dtype=plan.exact)
        for member in active:
            member.network.train()
        crops = draw_crops(plan.augmentation, plan.shape, len(plan.data.train), (plan.seed, epoch, 1), plan.device)
        for step, (stored, labels) in enumerate(plan.data.train.batches(size, (plan.seed, epoch), plan.device)):
            own = None if crops is None else crops[step * size : step * size + len(stored)]
            inputs, targets, part = self._part(plan.data.prepare(augment(stored, own), plan.dtype), labels)
            rate = plan.recipe.rate_at(epoch * plan.steps + step, plan.steps)
            for index, member in enumerate(active):
                # Dropout: the same draws for a member alone and in a fleet.
                torch.manual_seed(fold((plan.seed, epoch, step, 2 + plan.mesh.data_place)))
                for group in member.optimizer.param_groups:
                    group["lr"] = rate
                member.optimizer.zero_grad(set_to_none=True)
                if part:
                    with plan.autocast():
                        outputs = member_outputs(member.network, inputs)
                    cost = part * mean_loss(plan.loss, outputs.to(plan.exact), self._fitting(targets))
                    cost.backward()
                    losses[index] += cost.detach()
                if plan.mesh.data_places > 1:
                    add_up(_derivatives(member.network), plan.mesh.group)
                member.optimizer.step()
            advance()
        if plan.mesh.data_places > 1:
            add_up([losses], plan.mesh.group)
            for member in active:
                average_buffers(list(member.network.buffers()), plan.mesh.group)
        return (losses / plan.steps).tolist()

    def _fitting(self, targets: Tensor) -> Tensor:
        return targets.to(self.plan.exact) if targets.is_floating_point() else targets

    def _part(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, float]:
        """What this process takes of a batch, and which share of the batch that is."""
        mesh, whole = self.plan.mesh, len(inputs)
        if mesh.data_places == 1:
            return inputs, targets, 1.0
        if whole < 2 * mesh.data_places:  # too few for normalisation to have two each: the first takes them all
            mine = whole if mesh.data_place == 0 else 0
            return inputs[:mine], targets[:mine], float(mine > 0)
        inputs, targets = (tensor[mesh.data_place :: mesh.data_places] for tensor in (inputs, targets))
        return inputs, targets, len(inputs) / whole

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
                    outputs = member_outputs(member.network, inputs).to(plan.exact)
                totals[index, 0] += mean_loss(plan.loss, outputs, self._fitting(targets)) * len(inputs)
                if classifying:
                    totals[index, 1] += (combined(outputs).argmax(-1) == targets).sum()
            seen += len(inputs)
        rows: list[list[float]] = (totals / seen).tolist()
        return [(cost, accuracy if classifying else None) for cost, accuracy in rows]


def _derivatives(network: nn.Module) -> list[Tensor]:
    """Those of all parameters that are trained; zeros where a process had nothing to learn from."""
    found = []
    for parameter in network.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append(parameter.grad)
    return found
