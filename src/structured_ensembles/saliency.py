"""saliency(): how much every neuron matters to every member (Eq. 2 of the paper).

A neuron's saliency is the absolute derivative of the member's loss with respect to the neuron's scaling value, averaged
over the batches of the training split.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.copying import shadow_of
from structured_ensembles.data import Data
from structured_ensembles.devices import Device, pick_device
from structured_ensembles.losses import Loss, loss_for, member_losses
from structured_ensembles.progress import progress
from structured_ensembles.scaling import Scales, scaled
from structured_ensembles.search import check_task


@dataclass(frozen=True)
class Scores:
    """How much each neuron of each prunable group matters to one member: vectors of shape (size,), none negative."""

    values: Mapping[str, Tensor]


def saliency(
    model: nn.Module,
    graph: ChannelGraph,
    scales: Scales,
    data: Data,
    *,
    batch_size: int = 128,
    loss: Loss | None = None,
    device: Device = "auto",
    quiet: bool = False,
) -> list[Scores]:
    """Score every neuron for every member; one `Scores` per member. The model is not changed.

    loss: a function of (outputs, targets) that averages over samples; by default cross-entropy, or the squared error
        for regression. Normalisation runs in evaluation mode on the statistics that the search collected.
    """
    check_task(graph, data, loss)
    device = pick_device(device, model)
    own_loss = loss_for(data, loss)
    members = scales.members
    shadow = shadow_of(model).to(device).eval()
    for name, buffer in shadow.named_buffers():
        if name in scales.statistics:
            buffer.copy_(scales.statistics[name])
    dtype = next(shadow.parameters()).dtype
    vectors = {name: value.to(device, dtype, copy=True).requires_grad_() for name, value in scales.vectors.items()}
    leaves = list(vectors.values())
    totals = [torch.zeros_like(leaf) for leaf in leaves]

    batches = data.batches("train", batch_size, device=device, dtype=dtype)
    number = data.num_batches("train", batch_size)
    with scaled(shadow, graph, vectors, scales.placement), progress("saliency", number, quiet) as advance:
        for inputs, targets in batches:
            # All members see the whole batch, a share of it at a time, so that no pass has more rows than the batch:
            # one backward serves all vectors, in the memory of one training step. The shares' derivatives add up to the
            # batch's.
            share = -(-len(inputs) // members)
            derivatives = [torch.zeros_like(leaf) for leaf in leaves]
            for own_inputs, own_targets in zip(inputs.split(share), targets.split(share), strict=True):
                outputs = shadow(_tile(own_inputs, members))
                losses = member_losses(own_loss, outputs, _tile(own_targets, members), members)
                part = losses.sum() * (len(own_inputs) / len(inputs))
                for sum_so_far, derivative in zip(derivatives, torch.autograd.grad(part, leaves), strict=True):
                    sum_so_far.add_(derivative)
            for total, derivative in zip(totals, derivatives, strict=True):
                total.add_(derivative.abs())
            advance()
    means = {name: (total / number).cpu() for name, total in zip(vectors, totals, strict=True)}
    if not all(bool(mean.isfinite().all()) for mean in means.values()):
        raise FloatingPointError(
            "the saliency is not finite: the model's outputs under these scales overflow on `data`"
        )
    return [Scores({name: mean[member] for name, mean in means.items()}) for member in range(members)]


def _tile(tensor: Tensor, members: int) -> Tensor:
    """The batch once for every member: (rows, …) gives (members * rows, …)."""
    return tensor.repeat(members, *[1] * (tensor.dim() - 1))
