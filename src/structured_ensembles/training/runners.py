"""Runners compute the steps of members in the graph engine: by a program for several, or by a network as it is.

A runner's steps work in place on tensors that stay where they are, so that they can be captured (cuda/capture.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from structured_ensembles.common.inputs import Inputs, call_arguments, clone_inputs, map_inputs, tensors_in
from structured_ensembles.common.outputs import pick_logits
from structured_ensembles.cuda import batch_drawing
from structured_ensembles.cuda.batch_drawing import BatchDrawer
from structured_ensembles.cuda.bf16_copies import Bfloat16Copies, castable
from structured_ensembles.cuda.capture import CaptureError, side_by_side
from structured_ensembles.cuda.compilation import Compiled
from structured_ensembles.cuda.launch import compile_only
from structured_ensembles.cuda.operations import conv_norm, member_conv
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack, assign_gradients, unpadded
from structured_ensembles.cuda.state import tensors_of
from structured_ensembles.data.feeds import MemberFeed
from structured_ensembles.data.losses import mean_loss
from structured_ensembles.data.splits import Batch
from structured_ensembles.prediction.combination import combine_logits
from structured_ensembles.tracing.fake_model import first_line
from structured_ensembles.training.engine import Member, Plan

Optimizers = Sequence[torch.optim.Optimizer]
Streams = Sequence[torch.cuda.Stream]


class Runner(Protocol):
    """Computes the steps of some members.

    losses: (members,), summed over steps. totals: (members, 2), summed losses and right predictions of validation.
    """

    members: Sequence[Member]
    losses: Tensor
    totals: Tensor
    ours: bool  # whether kernels of our own run

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


class ProgramRunner:
    """Members that share a program: their samples are one batch, and every kernel computes all of them."""

    ours = True

    def __init__(
        self,
        members: Sequence[Member],
        plan: Plan,
        compiled: Compiled,
        optimizers: Optimizers,
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
        self._generators = [_generator(plan.device) for _ in members] if compiled.draws else None
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
            _shuffle(feed, self.plan, member, epoch)
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
            side_by_side([partial(_descend, optimizer) for optimizer in self.optimizers], streams)
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
        _validate(self.plan, self.networks[number], self._cast[number], batch, self.totals[number])

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
        if count > 1 and self.plan.loss is F.cross_entropy and outputs.dim() == 2:
            return F.cross_entropy(outputs, targets, reduction="none").view(count, -1).mean(1)
        pairs = zip(_members_of(outputs, self.networks[0], count), targets.chunk(count), strict=True)
        return torch.stack([mean_loss(self.plan.loss, member_outputs, wanted) for member_outputs, wanted in pairs])


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
        self.ours = self.drawer is not None
        named = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        self.bfloat16 = Bfloat16Copies(network, castable(network) if plan.uses_bfloat16 else [])
        self.parameters = list(named.values())
        self.leaves = [self.bfloat16.copies.get(name, parameter) for name, parameter in named.items()]
        self.copied = [parameter for name, parameter in named.items() if name in self.bfloat16.copies]
        self.losses = torch.zeros(1, device=plan.device, dtype=plan.loss_dtype)
        self.totals = torch.zeros(1, 2, dtype=torch.float64, device=plan.device)
        self._generator = _generator(plan.device)
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
            _shuffle(self.feed, self.plan, self.member, epoch)
        if self._generator is not None:
            self._generator.manual_seed(self.plan.member_seed("dropout", self.member, epoch))

    def train_step(self, size: int, shared: Batch | None, streams: Streams) -> None:
        inputs, targets = self._batch(size) if shared is None else (clone_inputs(shared[0]), shared[1])
        targets = self.plan.teach(targets, inputs)
        network = self.member.network.train()
        with draw_from(self._generator), self.plan.autocast(), torch.enable_grad():
            forward = self.compiled if size == self.compiled_size else self.forward
            outputs = pick_logits(forward(*call_arguments(inputs)))
            cost = mean_loss(self.plan.loss, _stacked(outputs, network).to(self.plan.loss_dtype), targets)
        gradients = self._gradients(cost)
        with torch.no_grad():
            assign_gradients(gradients)
            _descend(self.optimizer)
            self.bfloat16.refresh()
            self.losses.add_(cost)

    def finish_epoch(self) -> None:
        pass  # its steps change the network itself

    @torch.no_grad()
    def validation_step(self, batch: Batch, streams: Streams) -> None:
        copies = {name: copy.detach() for name, copy in self.bfloat16.copies.items()}
        _validate(self.plan, self.member.network, copies, batch, self.totals[0])

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


def _descend(optimizer: torch.optim.Optimizer) -> None:
    """Take an optimizer's step, and drop the gradients."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _validate(plan: Plan, network: nn.Module, weights: dict[str, Tensor], batch: Batch, totals: Tensor) -> None:
    """Add the loss of a batch, and the number of right predictions, to totals (2,)."""
    inputs, targets = batch
    network.eval()
    with plan.autocast():
        outputs = functional_call(network, weights, *call_arguments(clone_inputs(inputs)), tie_weights=False)
    outputs = _stacked(pick_logits(outputs), network).to(plan.loss_dtype)
    totals[0] += mean_loss(plan.loss, outputs, targets) * len(targets)
    if plan.data.task == "classification":
        totals[1] += (combine_logits(outputs).argmax(-1) == targets).sum()


def _stacked(outputs: Tensor, network: nn.Module) -> Tensor:
    """Return outputs as (members, batch, …): a network with `num_members` gives several, see prediction/combination."""
    return outputs if hasattr(network, "num_members") else outputs[None]


def _members_of(outputs: Tensor, network: nn.Module, count: int) -> list[Tensor]:
    """Cut the outputs of a program into those of its members, each (1, batch, …), or all of one network."""
    return [_stacked(chunk, network) for chunk in (outputs.chunk(count) if count > 1 else (outputs,))]


def _shuffle(feed: MemberFeed, plan: Plan, member: Member, epoch: int) -> None:
    """Draw a member's order of samples and its crops for an epoch."""
    feed.shuffle(plan.member_seed("order", member, epoch), plan.member_seed("crops", member, epoch))


def _starts_with_convolutions(compiled: Compiled) -> bool:
    """Tell whether only convolutions in bfloat16 read the input, so that it can be drawn in their type and layout."""
    readers = [user for node in compiled.program.nodes if node.name in compiled.program.inputs for user in node.users]
    return all(user.target in (conv_norm, member_conv) and user.args[1].name in compiled.bfloat16 for user in readers)


def _generator(device: torch.device) -> torch.Generator | None:
    """Return a generator whose state a CUDA graph can hold; None on other devices, which draw from the default one."""
    if device.type != "cuda":
        return None
    return torch.cuda.default_generators[device.index or 0].clone_state()


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
