"""Objective: the members' losses under scaling vectors of one frozen network, plus the penalty on their likeness."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import Inputs, select_rows
from structured_ensembles.common.processes import rank, sum_over_processes, world_size
from structured_ensembles.cuda.capture import CaptureError, log_fallback
from structured_ensembles.cuda.program import ProgramError
from structured_ensembles.cuda.scaled_program import Factors, ScaledProgram, compile_and_check
from structured_ensembles.data.losses import Loss, member_losses
from structured_ensembles.diversity import Diversity, mmd_penalty, overlap_penalty, terms_for
from structured_ensembles.scaling import Placement, factors_along, scaled_layers


class Objective:
    """Cost that the search minimises; its gradients are those of the vectors, as the network is frozen.

    vectors: (members, channels) by group. strength, diversity: of the penalty, see `learn_scales`. largest_change: that
        an entry of the vectors can move in the whole search.
    """

    def __init__(
        self,
        frozen: nn.Module,
        vectors: dict[str, Tensor],
        loss: Loss,
        members: int,
        strength: float,
        diversity: Diversity | None,
        largest_change: float,
    ) -> None:
        self.frozen, self.vectors, self.loss, self.members = frozen, vectors, loss, members
        self.strength, self.diversity = strength, diversity
        self.terms = _count_terms(vectors, largest_change)
        self.run: Callable[[Inputs], Tensor] = frozen
        self.program: ScaledProgram | None = None  # for training passes, where there is one; else `run`
        self.factors: Callable[[], Factors] = dict

    def compile(
        self, graph: ChannelGraph, placement: Placement, example: Inputs, sizes: Sequence[int], together: bool
    ) -> None:
        """Compile the training pass to a program in bfloat16, if possible.

        sizes: of the batches. together: whether members can share a batch, see `can_share_batches`.
        """
        layers = scaled_layers(graph, placement)
        self.factors = lambda: {layer: factors_along(output.axis, self.vectors) for layer, output in layers}
        try:
            if not together:
                raise ProgramError("members cannot share a batch")
            if len(dict(layers)) < len(layers):
                raise ProgramError("a batch norm is scaled twice")
            dims = {layer: output.dim for layer, output in layers}
            rows = [self.members * -(-size // self.members) for size in sizes]
            self.program = compile_and_check(self.frozen, dims, example, self.factors(), rows)
        except (ProgramError, CaptureError, torch.OutOfMemoryError) as error:
            log_fallback(f"the search computes in float32, without our kernels, slower: {first_line(error)}")

    def gradients(self, inputs: Inputs, targets: Tensor, shares: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the cost of a batch that is divided among the members, and its gradients by the vectors.

        shares: which samples each member gets, (members, share), see `assign_samples`. Of several processes, each takes
            some of every member's share, and the gradients are added up. (The penalty "overlap" is then a mean over
            processes, each of which sees the saliencies on its own samples.)
        """
        local = shares[:, rank() :: world_size()]
        gradient_share = local.shape[1] / shares.shape[1]
        leaves = list(self.vectors.values())
        cost = self._penalty() / world_size()
        if local.shape[1]:
            rows = local.flatten()
            losses = self.losses(select_rows(inputs, rows), targets[rows])
            if self.diversity == "overlap" and self.strength:
                member_gradients = torch.autograd.grad(losses.sum() + cost, leaves, create_graph=True)
                overlap = overlap_penalty([gradient.abs() for gradient in member_gradients])
                cost = cost + self.strength * gradient_share * overlap
            cost = cost + gradient_share * losses.mean()
        gradients = [gradient.contiguous() for gradient in torch.autograd.grad(cost, leaves)]
        cost = cost.detach()
        sum_over_processes([cost, *gradients])
        return cost, gradients

    def losses(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Return the loss of each member, shape (members,), on rows grouped by member."""
        if self.program is not None and self.frozen.training:
            outputs = self.program(inputs, self.factors())
        else:
            outputs = self.run(inputs)
        return member_losses(self.loss, outputs, targets, self.members)

    def _penalty(self) -> Tensor:
        """Return the penalty on the vectors; zero, with gradients, where there is none or it is "overlap"."""
        if self.diversity == "mmd" and self.strength:
            return self.strength * mmd_penalty(self.vectors, self.terms)
        return torch.stack([0 * vector.sum() for vector in self.vectors.values()]).sum()


def _count_terms(vectors: Mapping[str, Tensor], largest_change: float) -> dict[str, int]:
    """Count the terms that the penalty "mmd" needs for each group's vectors, by a bound that holds for a whole search.

    largest_change: of an entry.
    """
    return {
        name: terms_for(float(value.detach().abs().max()) + largest_change, value.shape[1])
        for name, value in vectors.items()
    }
