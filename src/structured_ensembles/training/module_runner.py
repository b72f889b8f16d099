"""ModuleRunner: computes the steps of a member whose network has no program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from structured_ensembles.common.inputs import call_arguments, clone_inputs
from structured_ensembles.cuda import batch_drawing
from structured_ensembles.cuda.batch_drawing import BatchDrawer
from structured_ensembles.cuda.bf16_copies import Bfloat16Copies, castable_parameters
from structured_ensembles.cuda.capture import CaptureError
from structured_ensembles.cuda.stacking import assign_gradients
from structured_ensembles.cuda.state import tensors_of
from structured_ensembles.data.feeds import MemberFeed
from structured_ensembles.data.losses import mean_loss
from structured_ensembles.data.splits import Batch
from structured_ensembles.training.engine import Member, Plan
from structured_ensembles.training.runners import (
    Streams,
    make_generator,
    shuffle_feed,
    stack_outputs,
    take_optimizer_step,
    validate_member,
)


class ModuleRunner:
    """One member whose network has no program: it runs as it is, with weights cast to bfloat16 once a step.

    kernels: whether our own may run. compiled_size: of the batches that run through torch.compile; None: of none.
    """

    def __init__(
        self,
        member: Member,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        feed: MemberFeed | None,
        kernels: bool,
        compiled_size: int | None,
    ) -> None:
        self.members: Sequence[Member] = [member]
        self.member, self.plan, self.optimizer, self.feed = member, plan, optimizer, feed
        network = member.network
        self.drawer = BatchDrawer([feed]) if kernels and feed is not None and batch_drawing.fits(feed) else None
        self.uses_our_kernels = self.drawer is not None
        named = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        self.bfloat16 = Bfloat16Copies(network, castable_parameters(network) if plan.uses_bfloat16 else [])
        self.parameters = list(named.values())
        self.leaves = [self.bfloat16.copies.get(name, parameter) for name, parameter in named.items()]
        self.copied = [parameter for name, parameter in named.items() if name in self.bfloat16.copies]
        self.losses = torch.zeros(1, device=plan.device, dtype=plan.loss_dtype)
        self.totals = torch.zeros(1, 2, dtype=torch.float64, device=plan.device)
        self._generator = make_generator(plan.device)
        if self._generator is not None:
            self._generator.manual_seed(0)  # from here on, an offset means that the network draws
        self.forward: Callable[..., Any] = partial(functional_call, network, self.bfloat16.copies, tie_weights=False)
        self.compiled_size = compiled_size
        if compiled_size is not None:
            self.compiled = torch.compile(self.forward, dynamic=False)

    def begin(self, epoch: int) -> None:
        self.losses.zero_()
        self.bfloat16.refresh()
        if self.feed is not None:
            shuffle_feed(self.feed, self.plan, self.member, epoch)
        if self._generator is not None:
            self._generator.manual_seed(self.plan.member_seed("dropout", self.member, epoch))

    def train_step(self, size: int, shared: Batch | None, streams: Streams) -> None:
        inputs, targets = self._batch(size) if shared is None else (clone_inputs(shared[0]), shared[1])
        targets = self.plan.teach(targets, inputs)
        network = self.member.network.train()
        with draw_from(self._generator), self.plan.autocast(), torch.enable_grad():
            forward = self.compiled if size == self.compiled_size else self.forward
            outputs = stack_outputs(forward(*call_arguments(inputs)), network)
            cost = mean_loss(self.plan.loss, outputs.to(self.plan.loss_dtype), targets)
        gradients = self._gradients(cost)
        with torch.no_grad():
            assign_gradients(gradients)
            take_optimizer_step(self.optimizer)
            self.bfloat16.refresh()
            self.losses.add_(cost)

    def finish_epoch(self) -> None:
        pass  # its steps change the network itself

    @torch.no_grad()
    def validation_step(self, batch: Batch, streams: Streams) -> None:
        copies = {name: copy.detach() for name, copy in self.bfloat16.copies.items()}
        validate_member(self.plan, self.member.network, copies, batch, self.totals[0])

    def state(self) -> Iterator[Tensor]:
        return tensors_of(self.member.network, self.optimizer, self.bfloat16.tensors(), self.losses, self.totals)

    def generators(self) -> list[torch.Generator]:
        """Return its generator if the network has drawn from it."""
        generator = self._generator
        return [generator] if generator is not None and generator.get_offset() > 0 else []

    def _batch(self, size: int) -> Batch:
        """Return the member's next batch."""
        assert self.feed is not None
        return self.feed.batch(size) if self.drawer is None else self.drawer.batch(size)

    def _gradients(self, cost: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a parameter and its gradient, or that of its copy; none for layers that did not run."""
        gradients = torch.autograd.grad(cost, [*self.leaves, *self.copied], allow_unused=True)
        of_leaves, of_originals = gradients[: len(self.leaves)], gradients[len(self.leaves) :]
        if any(gradient is not None for gradient in of_originals):
            raise CaptureError("it reaches a layer's weights by another way than through the layer")
        pairs = zip(self.parameters, of_leaves, strict=True)
        return [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]


@contextmanager
def draw_from(generator: torch.Generator | None) -> Iterator[None]:
    """Let a network without a program draw from its member's generator in place of the default one.

    Only while this lasts; programs name the generator that they draw from.
    """
    if generator is None:
        yield
        return
    default = torch.cuda.default_generators[generator.device.index or 0]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(generator)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)
