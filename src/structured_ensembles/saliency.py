"""saliency(): how much every neuron matters to every member (Eq. 2 of the paper).

A neuron's saliency is the absolute derivative of the member's loss with respect to the neuron's scaling value, averaged
over the batches of the training split.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.common.checks import check_type
from structured_ensembles.common.devices import Device, pick_device
from structured_ensembles.common.inputs import Inputs, each, moved, pieces
from structured_ensembles.common.processes import add_up, rank, world
from structured_ensembles.common.progress import progress
from structured_ensembles.common.tables import text_table
from structured_ensembles.cuda.capture import Step, captured_if_possible
from structured_ensembles.cuda.state import tensors_of
from structured_ensembles.data import Data
from structured_ensembles.data.feeds import Feed, feed_for
from structured_ensembles.data.losses import Loss, learned_units, loss_for, member_losses
from structured_ensembles.examination.pretrained import fitted_normalization
from structured_ensembles.networks.copying import dtype_of, shadow_of
from structured_ensembles.scaling import Scales, rows_stay_apart, scaled
from structured_ensembles.search import check_task, check_walk


@dataclass(frozen=True)
class Scores:
    """How much each neuron of each prunable group matters to one member: vectors of shape (size,), none negative."""

    values: Mapping[str, Tensor]

    def __repr__(self) -> str:
        return f"Scores({sum(map(len, self.values.values())):,} neurons in {len(self.values)} groups)"

    def __str__(self) -> str:
        rows = [
            (name, f"{len(own):,}", *(f"{float(value):.2e}" for value in (own.min(), own.median(), own.max())))
            for name, own in self.values.items()
        ]
        return text_table(("group", "neurons", "least", "median", "greatest"), rows)


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
        for regression, in the units of `train`. Normalisation runs in evaluation mode on the statistics that the search
        collected. A group that no derivative reaches is scored by its weights.
    """
    check_walk(model, graph, data)
    data = fitted_normalization(model, data, device)
    check_type("scales", scales, Scales, "learn_scales gives them")
    check_task(graph, data)
    device = pick_device(device, model)
    members = scales.members
    shadow = shadow_of(model).to(device).eval()
    own_loss = loss_for(data, loss, learned_units([shadow], data, loss))
    for name, buffer in shadow.named_buffers():
        if name in scales.statistics:
            buffer.copy_(scales.statistics[name])
    dtype = dtype_of(shadow)
    vectors = {name: value.to(device, dtype, copy=True).requires_grad_() for name, value in scales.vectors.items()}
    feed = feed_for(data.train, data, batch_size, device, dtype=dtype)
    number = data.num_batches("train", batch_size)
    together = rows_stay_apart(shadow, graph, scales.placement, moved(data.example(dtype=dtype), device))
    scoring = _Scoring(shadow, list(vectors.values()), own_loss, members)
    with (
        scaled(shadow, graph, vectors, scales.placement, together) as scoring.run,
        progress("saliency", number, quiet) as advance,
    ):
        steps: dict[int, Step] = {}
        for batch, size in enumerate(feed.epoch(None)):
            step: Step = partial(scoring.score, feed, size)
            if size not in steps and not feed.irregular:
                state = partial(tensors_of, scoring.totals, feed.step)
                steps[size] = captured_if_possible(step, device, state, "the saliency", modules=[shadow])
            if batch % world() == rank():  # processes take turns
                (step if feed.irregular else steps[size])()
            else:
                feed.step.add_(1)
            advance()
    add_up(scoring.totals)
    means = {name: (total / number).cpu() for name, total in zip(vectors, scoring.totals, strict=True)}
    if not all(bool(mean.isfinite().all()) for mean in means.values()):
        raise FloatingPointError(
            "the saliency is not finite: the model's outputs under these scales overflow on `data`"
        )
    for name, mean in means.items():
        if not mean.any():  # no derivative gets there: it runs without gradients, or in training mode only
            mean.copy_(graph.magnitudes[name])
    return [Scores({name: mean[member] for name, mean in means.items()}) for member in range(members)]


class _Scoring:
    """The sum over batches of the absolute derivatives of each member's loss, shape (members, size) per group."""

    def __init__(self, shadow: nn.Module, leaves: list[Tensor], loss: Loss, members: int) -> None:
        self.leaves, self.loss, self.members = leaves, loss, members
        self.run: Callable[[Inputs], Tensor] = shadow
        self.totals = [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]

    def score(self, feed: Feed, size: int) -> None:
        # All members see the whole batch, a share of it at a time, so that no pass has more rows than the batch: one
        # backward serves all vectors, in the memory of one training step. The shares' derivatives add up.
        inputs, targets = feed.batch(size)
        share = -(-size // self.members)
        derivatives = [torch.zeros_like(leaf, requires_grad=False) for leaf in self.leaves]
        for own_inputs, own_targets in zip(pieces(inputs, share), targets.split(share), strict=True):
            outputs = self.run(_tile(own_inputs, self.members))
            losses = member_losses(self.loss, outputs, _tile(own_targets, self.members), self.members)
            part = losses.sum() * (len(own_targets) / size)
            found = torch.autograd.grad(part, self.leaves, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(derivatives, found)
        torch._foreach_add_(self.totals, torch._foreach_abs(derivatives))
        feed.step.add_(1)


def _tile(batch: Any, members: int) -> Any:
    """The batch once for every member: (rows, …) gives (members * rows, …)."""
    return each(lambda tensor: tensor.repeat(members, *[1] * (tensor.dim() - 1)), batch)
