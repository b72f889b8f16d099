"""learn_scales(): train N scaling vectors per group on the frozen, untrained network (Algorithm 1, steps 1 and 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.copying import shadow_of
from structured_ensembles.data import Data
from structured_ensembles.dealing import deal
from structured_ensembles.devices import Device, pick_device
from structured_ensembles.diversity import Diversity, mmd_penalty, overlap_penalty, terms_for
from structured_ensembles.losses import Loss, loss_for, member_losses
from structured_ensembles.progress import progress
from structured_ensembles.scaling import Initial, Placement, Scales, check_choice, scaled


def learn_scales(
    model: nn.Module,
    graph: ChannelGraph,
    data: Data,
    members: int = 5,
    strength: float = 0.1,
    diversity: Diversity | None = "mmd",
    epochs: int = 10,
    seed: int = 0,
    *,
    initial: Initial = "N(0,1)",
    placement: Placement = "output",
    batch_size: int = 128,
    rate: float = 1e-3,
    loss: Loss | None = None,
    device: Device = "auto",
    quiet: bool = False,
) -> Scales:
    """Learn the members' scaling vectors; the model itself is not changed.

    Every batch is dealt out to the members. The weights stay frozen, normalisation runs on batch statistics; the
    vectors of the epoch with the best validation loss are returned (of the last one, if `data` has no validation
    split).

    strength, diversity: λ and the kind of the penalty that keeps members apart: the paper's "mmd", our "overlap" (the
        correlation of the members' saliencies; about three times the cost), or None.
    initial, placement: how the vectors are drawn, and what they scale, see `Scales`.
    loss: a function of (outputs, targets) that averages over samples; by default cross-entropy, or the squared error
        for regression.
    """
    scales = Scales.draw(graph, members, initial, placement, seed)
    check_choice("diversity", diversity, (*get_args(Diversity), None))
    for name, value, least in (("epochs", epochs, 0), ("batch_size", batch_size, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    for name, number in (("strength", strength), ("rate", rate)):
        if not math.isfinite(number) or number < 0:
            raise ValueError(f"{name} must be a finite number of at least 0, not {number!r}")
    check_task(graph, data, loss)

    device = pick_device(device, model)
    shadow = shadow_of(model).to(device)
    dtype = next(shadow.parameters()).dtype
    vectors = {name: value.to(device, dtype, copy=True).requires_grad_() for name, value in scales.vectors.items()}
    steps = data.num_batches("train", batch_size)
    # Adam moves an entry by about its rate per step, so that this bounds the entries for the whole search.
    reach = rate * steps * epochs
    terms = {
        name: terms_for(float(value.detach().abs().max()) + reach, value.shape[1]) for name, value in vectors.items()
    }
    search = _Search(
        shadow, vectors, loss_for(data, loss), members, strength, diversity if members > 1 else None, terms
    )
    optimizer = torch.optim.Adam(vectors.values(), lr=rate)

    best, kept, history = math.inf, _snapshot(vectors, shadow), []
    with scaled(shadow, graph, vectors, placement), progress("search", epochs * steps, quiet) as advance:
        for epoch in range(epochs):
            shadow.train()
            total = torch.zeros((), device=device)
            batches = data.batches("train", batch_size, seed=(seed, epoch), device=device, dtype=dtype)
            for step, (inputs, targets) in enumerate(batches):
                cost = search.cost(inputs, targets, turn=epoch * steps + step)
                optimizer.zero_grad()
                cost.backward()
                optimizer.step()
                total += cost.detach()
                advance()
            figures = {"epoch": epoch, "loss": float(total) / steps}
            if not math.isfinite(figures["loss"]):
                raise FloatingPointError(
                    f"the search's loss became {figures['loss']} in epoch {epoch + 1}: look for extremes in `data`, "
                    f"or lower `rate` ({rate:g}) or `strength` ({strength:g})"
                )
            if data.validation is not None:
                figures["validation_loss"] = search.validate(data, batch_size, device, dtype)
            history.append(figures)
            if data.validation is None or figures["validation_loss"] < best:
                best, kept = figures.get("validation_loss", best), _snapshot(vectors, shadow)
    learned, statistics = kept
    return Scales(learned, placement, statistics, tuple(history))


@dataclass(frozen=True)
class _Search:
    """What the search minimises: the members' losses and the penalty on their likeness."""

    shadow: nn.Module
    vectors: dict[str, Tensor]
    loss: Loss
    members: int
    strength: float
    diversity: Diversity | None
    terms: dict[str, int]

    def losses(self, inputs: Tensor, targets: Tensor, turn: int) -> Tensor:
        """The loss of each member on its share of the batch, shape (members,)."""
        dealt = deal(len(inputs), self.members, turn).flatten().to(inputs.device)
        return member_losses(self.loss, self.shadow(inputs[dealt]), targets[dealt], self.members)

    def cost(self, inputs: Tensor, targets: Tensor, turn: int) -> Tensor:
        losses = self.losses(inputs, targets, turn)
        if self.diversity is None or self.strength == 0:
            return losses.mean()
        if self.diversity == "mmd":
            return losses.mean() + self.strength * mmd_penalty(self.vectors, self.terms)
        derivatives = torch.autograd.grad(losses.sum(), list(self.vectors.values()), create_graph=True)
        return losses.mean() + self.strength * overlap_penalty([derivative.abs() for derivative in derivatives])

    @torch.no_grad()
    def validate(self, data: Data, batch_size: int, device: torch.device, dtype: torch.dtype) -> float:
        """Mean loss over the members, each on its share of the validation split."""
        self.shadow.eval()
        total, seen = torch.zeros((), device=device, dtype=dtype), 0
        for turn, (inputs, targets) in enumerate(data.batches("validation", batch_size, device=device, dtype=dtype)):
            total += self.losses(inputs, targets, turn).mean() * len(inputs)
            seen += len(inputs)
        return float(total) / seen


def check_task(graph: ChannelGraph, data: Data, loss: Loss | None) -> None:
    """Whether the network's outputs can be compared with the targets, as far as can be told before any work."""
    if (
        loss is None
        and data.task == "classification"
        and graph.output_shape
        and data.num_classes > graph.output_shape[-1]
    ):
        raise ValueError(
            f"data has {data.num_classes} classes, but the model has {graph.output_shape[-1]} outputs: "
            "labels would be out of range"
        )


def _snapshot(vectors: dict[str, Tensor], shadow: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """True copies, on the CPU, of the vectors and of the statistics that belong to them."""
    learned = {name: value.detach().cpu().clone() for name, value in vectors.items()}
    return learned, {name: value.detach().cpu().clone() for name, value in shadow.named_buffers()}
