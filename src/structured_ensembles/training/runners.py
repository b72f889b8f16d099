"""Runners compute the steps of members in the graph engine; here is what the two kinds of them have in common.

`ProgramRunner` computes several members by a program, `ModuleRunner` a member whose network runs as it is. Their steps
work in place on tensors that stay where they are, so that they can be captured (cuda/capture.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from structured_ensembles.common.inputs import call_arguments, check_one_tensor, clone_inputs
from structured_ensembles.common.outputs import pick_logits
from structured_ensembles.data.feeds import MemberFeed
from structured_ensembles.data.losses import mean_loss
from structured_ensembles.data.splits import Batch
from structured_ensembles.prediction.combination import combine_logits
from structured_ensembles.training.engine import Member, Plan

Streams = Sequence[torch.cuda.Stream]


class Runner(Protocol):
    """Computes the steps of some members.

    losses: (members,), summed over steps. totals: (members, 2), summed losses and right predictions of validation.
    """

    members: Sequence[Member]
    losses: Tensor
    totals: Tensor
    uses_our_kernels: bool

    def begin(self, epoch: int) -> None:
        """Copy what was changed in the networks since, and draw all that is random in an epoch.

        The draws are those of each network trained alone.
        """
        ...

    def train_step(self, size: int, shared: Batch | None, streams: Streams) -> None:
        """Take one step on batches of `size` samples: the members' own, or the one that all share."""
        ...

    def finish_epoch(self) -> None:
        """Copy the statistics of an epoch to the networks."""
        ...

    def validation_step(self, batch: Batch, streams: Streams) -> None:
        """Add the losses and numbers of right predictions on a batch to `totals`."""
        ...

    def state(self) -> Iterator[Tensor]:
        """Yield all tensors that steps change."""
        ...

    def generators(self) -> list[torch.Generator]:
        """Return the generators that steps draw from."""
        ...


def take_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Take an optimizer's step, and drop the gradients."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def validate_member(plan: Plan, network: nn.Module, weights: dict[str, Tensor], batch: Batch, totals: Tensor) -> None:
    """Add the loss of a batch, and the number of right predictions, to totals (2,).

    weights: by name, those that the network reads in place of its own.
    """
    inputs, targets = batch
    network.eval()
    with plan.autocast():
        outputs = functional_call(network, weights, *call_arguments(clone_inputs(inputs)), tie_weights=False)
    outputs = stack_outputs(outputs, network).to(plan.loss_dtype)
    totals[0] += mean_loss(plan.loss, outputs, targets) * len(targets)
    if plan.data.task == "classification":
        totals[1] += (combine_logits(outputs).argmax(-1) == targets).sum()


def stack_outputs(outputs: Any, network: nn.Module) -> Tensor:
    """Return the logits in a network's outputs as `member_outputs` does, (members, batch, …)."""
    logits = check_one_tensor(pick_logits(outputs))
    return logits if hasattr(network, "num_members") else logits[None]


def shuffle_feed(feed: MemberFeed, plan: Plan, member: Member, epoch: int) -> None:
    """Draw a member's order of samples and its crops for an epoch."""
    feed.shuffle(plan.member_seed("order", member, epoch), plan.member_seed("crops", member, epoch))


def make_generator(device: torch.device) -> torch.Generator | None:
    """Return a generator whose state a CUDA graph can hold; None on other devices, which draw from the default one."""
    if device.type != "cuda":
        return None
    return torch.cuda.default_generators[device.index or 0].clone_state()
