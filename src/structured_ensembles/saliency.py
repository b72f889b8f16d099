"""saliency(): score how much every neuron matters to every member (Eq. 2 of the paper).

A neuron's saliency is the absolute gradient of the member's loss with respect to the neuron's scaling value, averaged
over the batches of the training split.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.common.checks import check_flags, check_type
from structured_ensembles.common.devices import Device, pick_device
from structured_ensembles.common.gradients import gradients_on
from structured_ensembles.common.inputs import Inputs, map_inputs, move_inputs, split_batch
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.processes import rank, sum_over_processes, world_size
from structured_ensembles.common.progress import progress
from structured_ensembles.common.tables import text_table
from structured_ensembles.cuda.capture import Step, captured_if_possible
from structured_ensembles.cuda.channels_last import channels_last_on_cpu
from structured_ensembles.cuda.state import tensors_of
from structured_ensembles.data import Data
from structured_ensembles.data.feeds import Feed, feed_for
from structured_ensembles.data.losses import Loss, choose_units, loss_for, member_losses
from structured_ensembles.examination.pretrained import find_normalization
from structured_ensembles.networks.copying import copy_frozen, dtype_of
from structured_ensembles.scaling import Scales, apply_scales, can_share_batches, check_scales
from structured_ensembles.searching.checks import check_task, check_walk


@dataclass(frozen=True)
class Scores:
    """The saliency of each neuron for one member: for every prunable group a vector of shape (size,), none negative."""

    values: Mapping[str, Tensor]

    def __repr__(self) -> str:
        return (
            f"Scores({counted(sum(map(len, self.values.values())), 'neuron')} in {counted(len(self.values), 'group')})"
        )

    def __str__(self) -> str:
        rows = [
            (
                name,
                f"{len(scores):,}",
                *(f"{float(value):.2e}" for value in (scores.min(), scores.median(), scores.max())),
            )
            for name, scores in self.values.items()
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
        for regression, in the units of `train`. Batch norm runs in evaluation mode, with the statistics that the search
        collected. A group that no gradient reaches is scored by the magnitude of its weights.
    """
    check_walk(model, graph, data, loss, batch_size)
    check_type("scales", scales, Scales, "learn_scales gives them")
    check_scales(scales, graph)
    check_flags(quiet=quiet)
    check_task(graph, data)
    with gradients_on():
        data = find_normalization(model, data, device)
        device = pick_device(device, model)
        members = scales.members
        frozen = copy_frozen(model).to(device).eval()
        task_loss = loss_for(data, loss, choose_units([frozen], data, loss))
        for name, buffer in frozen.named_buffers():
            if name in scales.statistics:
                buffer.copy_(scales.statistics[name])
        dtype = dtype_of(frozen)
        vectors = {name: value.to(device, dtype, copy=True).requires_grad_() for name, value in scales.vectors.items()}
        feed = feed_for(data.train, data, batch_size, device, dtype=dtype)
        num_batches = data.num_batches("train", batch_size)
        example = move_inputs(data.example(dtype=dtype), device)
        together = can_share_batches(frozen, graph, scales.placement, example)
        scoring = _Scoring(frozen, list(vectors.values()), task_loss, members)
        with (
            channels_last_on_cpu(frozen, example),
            apply_scales(frozen, graph, vectors, scales.placement, together) as scoring.run,
            progress("saliency", num_batches, quiet) as advance,
        ):
            steps: dict[int, Step] = {}
            for batch, size in enumerate(feed.epoch(None)):
                step: Step = partial(scoring.score, feed, size)
                if size not in steps and not feed.irregular:
                    state = partial(tensors_of, scoring.totals, feed.step)
                    steps[size] = captured_if_possible(step, device, state, "the saliency", modules=[frozen])
                if batch % world_size() == rank():  # processes take turns
                    (step if feed.irregular else steps[size])()
                else:
                    feed.step.add_(1)
                advance()
        sum_over_processes(scoring.totals)
        means = {name: (total / num_batches).cpu() for name, total in zip(vectors, scoring.totals, strict=True)}
        if not all(bool(mean.isfinite().all()) for mean in means.values()):
            raise FloatingPointError(
                "the saliency is not finite: the model's outputs under these scales overflow on `data`"
            )
        for name, mean in means.items():
            if not mean.any():  # no gradient reaches it: it runs under no_grad, or in training mode only
                mean.copy_(graph.magnitudes[name])
    return [Scores({name: mean[member] for name, mean in means.items()}) for member in range(members)]


class _Scoring:
    """The sum over batches of the absolute gradients of each member's loss, shape (members, size) per group."""

    def __init__(self, frozen: nn.Module, leaves: list[Tensor], loss: Loss, members: int) -> None:
        self.leaves, self.loss, self.members = leaves, loss, members
        self.run: Callable[[Inputs], Tensor] = frozen
        self.totals = [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]

    def score(self, feed: Feed, size: int) -> None:
        """Add the absolute gradients of a batch."""
        # All members see the whole batch, one chunk of it at a time, so that no pass has more rows than the batch: one
        # backward serves all vectors, in the memory of one training step. The chunks' gradients add up.
        inputs, targets = feed.batch(size)
        chunk_size = -(-size // self.members)
        gradients = [torch.zeros_like(leaf, requires_grad=False) for leaf in self.leaves]
        for chunk, chunk_targets in zip(split_batch(inputs, chunk_size), targets.split(chunk_size), strict=True):
            outputs = self.run(_repeat(chunk, self.members))
            losses = member_losses(self.loss, outputs, _repeat(chunk_targets, self.members), self.members)
            cost = losses.sum() * (len(chunk_targets) / size)
            if not cost.requires_grad:  # all groups are bare parameters, which no vector scales, or run under no_grad
                break
            chunk_gradients = torch.autograd.grad(cost, self.leaves, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(gradients, chunk_gradients)
        torch._foreach_add_(self.totals, torch._foreach_abs(gradients))
        feed.step.add_(1)


def _repeat(batch: Any, members: int) -> Any:
    """Repeat a batch for every member: (rows, …) gives (members * rows, …)."""
    return map_inputs(lambda tensor: tensor.repeat(members, *[1] * (tensor.dim() - 1)), batch)
