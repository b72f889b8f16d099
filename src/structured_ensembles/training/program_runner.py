"""ProgramRunner: computes the steps of members that share a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import Inputs, map_inputs, tensors_in
from structured_ensembles.cuda import batch_drawing
from structured_ensembles.cuda.batch_drawing import BatchDrawer
from structured_ensembles.cuda.capture import CaptureError, side_by_side
from structured_ensembles.cuda.compilation import Compiled
from structured_ensembles.cuda.launch import compile_only
from structured_ensembles.cuda.operations import conv_norm, member_conv
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack, unpadded
from structured_ensembles.cuda.state import tensors_of
from structured_ensembles.data.feeds import MemberFeed
from structured_ensembles.data.losses import Loss, mean_loss, smoothed_cross_entropy
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
from structured_ensembles.training.teaching import taught_cross_entropy


class ProgramRunner:
    """Members that share a program: their samples are one batch, and every kernel computes all of them."""

    uses_our_kernels = True

    def __init__(
        self,
        members: Sequence[Member],
        plan: Plan,
        compiled: Compiled,
        optimizers: Sequence[torch.optim.Optimizer],
        feeds: Sequence[MemberFeed | None],
    ) -> None:
        self.members, self.plan, self.optimizers = members, plan, optimizers
        self.program = compiled.program
        self.networks = [member.network for member in members]
        self.stack = Stack(self.program, self.networks, compiled.shapes, compiled.bfloat16)
        self.feeds = [feed for feed in feeds if feed is not None]
        self.drawer = None
        tables = [feed for feed in self.feeds if batch_drawing.fits(feed)]
        if tables and len(tables) == len(self.feeds):
            direct = _starts_with_convolutions(compiled)
            self.drawer = BatchDrawer(tables, torch.bfloat16 if direct else None, channels_last=direct)
        self.losses = torch.zeros(len(members), device=plan.device, dtype=plan.loss_dtype)
        self.totals = torch.zeros(len(members), 2, device=plan.device, dtype=torch.float64)
        self._generators = [make_generator(plan.device) for _ in members] if compiled.draws else None
        self._counters = [
            buffer
            for network in self.networks
            for name, buffer in network.named_buffers(remove_duplicate=False)
            if name in self.program.counters
        ]
        # In validation, networks read the stack's bfloat16 weights in place of their own.
        cast = {self.program.names[placeholder]: self.stack.weights[placeholder] for placeholder in compiled.bfloat16}
        self._cast = [
            {name: unpadded(stacked[number], network.get_parameter(name).shape) for name, stacked in cast.items()}
            for number, network in enumerate(self.networks)
        ]

    @torch.no_grad()
    def begin(self, epoch: int) -> None:
        self.losses.zero_()
        self.stack.refresh()
        self.stack.load_statistics()
        for feed, member in zip(self.feeds, self.members, strict=bool(self.feeds)):
            shuffle_feed(feed, self.plan, member, epoch)
        for generator, member in zip(self._generators or [], self.members, strict=self._generators is not None):
            if generator is not None:
                generator.manual_seed(self.plan.member_seed("dropout", member, epoch))

    def compile_kernels(self, sizes: Sequence[int]) -> None:
        """Compile the kernels of steps on batches of these sizes, in parallel, before the first step needs them.

        Raises `CaptureError` where they cannot be compiled.
        """
        if self.drawer is None:  # there is one only on a GPU with Triton
            return
        try:
            with compile_only() as possible, self.plan.autocast():
                for size in sizes if possible else ():
                    self._run_without_result(size)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton needs a C compiler, and some kernels more than a GPU has
            raise CaptureError(first_line(error)) from error
        self.stack.load_statistics()  # norms without a kernel of ours have seen zeros
        torch.cuda.empty_cache()  # a graph has memory of its own

    def _run_without_result(self, size: int) -> None:
        """Run all that a step launches; within `compile_only` its results mean nothing."""
        assert self.drawer is not None
        inputs, _ = self.drawer.batch(size)
        run = Run(self.program, self.stack.weights, self.stack.learned, generators=None)
        run.backward(torch.zeros_like(run.forward(tensors_in(inputs))))
        self.stack.refresh()

    def train_step(self, size: int, shared: Batch | None, streams: Streams) -> None:
        inputs, targets = self._batch(size, shared)
        targets = self.plan.teach(targets, inputs)
        generators = self._generators
        side = streams[0] if streams else None
        run = Run(self.program, self.stack.weights, self.stack.learned, generators, side)
        with self.plan.autocast():
            outputs = run.forward(tensors_in(inputs))
        with torch.enable_grad():
            leaf = outputs.detach().to(self.plan.loss_dtype).requires_grad_()
            costs = self._costs(leaf, targets)
            (gradient,) = torch.autograd.grad(costs.sum(), leaf)
        with self.plan.autocast():
            gradients = run.backward(gradient.to(outputs.dtype))
        with torch.no_grad():
            self.stack.set_gradients(gradients)
            side_by_side([partial(take_optimizer_step, optimizer) for optimizer in self.optimizers], streams)
            self.stack.refresh()
            if self._counters:
                torch._foreach_add_(self._counters, 1)
            self.losses.add_(costs.detach())

    def finish_epoch(self) -> None:
        self.stack.store_statistics()

    @torch.no_grad()
    def validation_step(self, batch: Batch, streams: Streams) -> None:
        side_by_side([partial(self._validate, number, batch) for number in range(len(self.members))], streams)

    def _validate(self, number: int, batch: Batch) -> None:
        """Validate one member on a batch."""
        validate_member(self.plan, self.networks[number], self._cast[number], batch, self.totals[number])

    def state(self) -> Iterator[Tensor]:
        return tensors_of(self.networks, self.optimizers, self.stack.tensors(), self.losses, self.totals)

    def generators(self) -> list[torch.Generator]:
        return [generator for generator in self._generators or [] if generator is not None]

    def _batch(self, size: int, shared: Batch | None) -> tuple[Inputs, Tensor]:
        """Return inputs and targets of all members, (members × size, …)."""
        if shared is not None:
            count = len(self.members)
            return map_inputs(lambda x: torch.cat([x] * count), shared[0]), torch.cat([shared[1]] * count)
        if self.drawer is not None:
            return self.drawer.batch(size)
        batches = [feed.batch(size) for feed in self.feeds]
        inputs, targets = zip(*batches, strict=True)
        if len(batches) == 1:
            return inputs[0], targets[0]
        return map_inputs(lambda *of_members: torch.cat(of_members), *inputs), torch.cat(targets)

    def _costs(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each member, (members,); outputs: (members × size, …)."""
        count = len(self.members)
        by_sample = loss_by_sample(self.plan.loss)
        if count > 1 and by_sample is not None and outputs.dim() == 2:
            return by_sample(outputs, targets).view(count, -1).mean(1)
        pairs = zip(_members_of(outputs, self.networks[0], count), targets.chunk(count), strict=True)
        return torch.stack(
            [mean_loss(self.plan.loss, member_outputs, member_targets) for member_outputs, member_targets in pairs]
        )


def loss_by_sample(loss: Callable[..., Tensor]) -> Loss | None:
    """Return the loss of every sample, (samples,), of which our cross-entropies are the mean; None of a user's loss."""
    is_ours = isinstance(loss, partial) and loss.func in (smoothed_cross_entropy, taught_cross_entropy)
    return partial(loss, reduction="none") if is_ours or loss is F.cross_entropy else None


def _members_of(outputs: Tensor, network: nn.Module, count: int) -> list[Tensor]:
    """Cut the outputs of a program into those of its members, each (1, batch, …), or all of one network."""
    return [stack_outputs(chunk, network) for chunk in (outputs.chunk(count) if count > 1 else (outputs,))]


def _starts_with_convolutions(compiled: Compiled) -> bool:
    """Tell whether only convolutions in bfloat16 read the input, so that it can be drawn in their type and layout."""
    readers = [user for node in compiled.program.nodes if node.name in compiled.program.inputs for user in node.users]
    return all(user.target in (conv_norm, member_conv) and user.args[1].name in compiled.bfloat16 for user in readers)
