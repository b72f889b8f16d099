"""The graph engine: a step of all members as one CUDA graph, a stream for each member.

Every member draws its own batch, from (seed, member); that, the forward and backward passes, and the optimizers of all
members are captured once and replayed for every step. The host only says "again": the order of an epoch, its crops and
rates lie in tables on the device, a counter there says which row is next, and losses are summed up there. Members may
have different widths, for each has a stream of its own, and small networks, of which one alone leaves most of a GPU
idle, run side by side. That takes the memory of as many sets of activations; `Execution.streams` lets fewer run at a
time, in less memory, and so does a GPU that has not enough of it.

Measured by benchmarks/fleet.py; recorded in benchmarks/results/fleet-h200.json.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from structured_ensembles.common.inputs import Inputs, call_arguments, clone_inputs
from structured_ensembles.cuda import batch_drawing as fused_batch
from structured_ensembles.cuda.bf16_copies import Halves, castable, copy_all, part
from structured_ensembles.cuda.capture import CaptureError, Step, all_captured, side_by_side, side_streams
from structured_ensembles.cuda.channel_padding import PaddingError, Shapes, check_padding, padded_shapes
from structured_ensembles.cuda.faster import faster, hooked, replaceable
from structured_ensembles.cuda.pending import Pending, Waiting
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.data.feeds import Feed, TableFeed, feed_for
from structured_ensembles.data.losses import mean_loss
from structured_ensembles.data.splits import Batch, TensorSplit
from structured_ensembles.prediction.combination import combine_logits
from structured_ensembles.tracing.fake_model import first_line
from structured_ensembles.training.engine import Member, Plan, Result
from structured_ensembles.training.optimizers import optimizer_for, rate_factors


class GraphEngine:
    """Captures a step for each size of batch, and anew when a member has stopped."""

    name = "graph"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rate_tables = {factor: torch.zeros(plan.steps, device=plan.device) for factor in rate_factors(plan.recipe)}
        self.rates = {factor: torch.zeros((), device=plan.device) for factor in self.rate_tables}
        data, size = plan.data, plan.recipe.batch_size
        # Counts the steps. Of streamed data it gives the batches, too, the same to all members.
        self.training = feed_for(data.train, data, size, plan.device, augmentation=plan.augmentation, dtype=plan.dtype)
        self.feeds: dict[int, TableFeed] = {}  # by the member's number
        self.optimizers: dict[Member, torch.optim.Optimizer] = {}
        self.validation: Feed | None = None
        if data.validation is not None:
            self.validation = feed_for(data.validation, data, 512, plan.device, dtype=plan.dtype)
        self.runners: list[Runner] = []
        self.streams: list[torch.cuda.Stream] = []
        self.most = plan.execution.streams  # members at a time; None: all of them
        self.kernels = True  # our own, where a network has layers that we have them for
        self.steps: dict[tuple[str, int], Step] = {}
        self.example = plan.example(partial(_noise, torch.Generator().manual_seed(0)))
        self.proposals: dict[Hashable, Shapes] = {}
        self.padded: dict[Member, Shapes] = {}
        self._loss_modules = [plan.loss] if isinstance(plan.loss, nn.Module) else []
        if plan.device.type == "cuda" and find_spec("triton") is None:
            plan.log_fallback("PyTorch's own kernels are used, slower: Triton is not installed")

    def train_epoch(self, active: Sequence[Member], epoch: int, advance: Callable[[], None]) -> list[float]:
        plan = self.plan
        rates = [plan.recipe.rate_at(epoch * plan.steps + step, plan.steps) for step in range(plan.steps)]
        for factor, table in self.rate_tables.items():
            table.copy_(torch.tensor(rates) * factor)
        for runner in self.runners:
            runner.begin(epoch)
        for size in self.training.epoch(derive_seed(plan.seed, "order", epoch) if self._streamed else None):
            step = None if self.training.irregular else self.steps.get(("train", size))
            if step is None:  # an irregular batch of a loader
                self._train_step(size)
            else:
                step()
            advance()
        return (torch.stack([runner.loss for runner in self.runners]) / plan.steps).tolist()

    @property
    def _streamed(self) -> bool:
        return not isinstance(self.plan.data.train, TensorSplit)

    def validate(self, active: Sequence[Member]) -> list[Result]:
        if self.validation is None:
            return [(None, None)] * len(active)
        seen = 0
        for runner in self.runners:
            runner.totals.zero_()
        for size in self.validation.epoch(None):
            step = None if self.validation.irregular else self.steps.get(("validate", size))
            (step or partial(self._validation_step, size))()
            seen += size
        rows: list[list[float]] = (torch.stack([runner.totals for runner in self.runners]) / seen).tolist()
        classifying = self.plan.data.task == "classification"
        return [(cost, accuracy if classifying else None) for cost, accuracy in rows]

    def prepare(self, active: Sequence[Member]) -> None:
        """Capture the steps of these members, unless they are those of the last epoch."""
        if not active or [runner.member for runner in self.runners] == list(active):
            return
        try:
            self._take(active)
            return
        except CaptureError as error:
            ours = any(runner.faster or runner.fused_batch for runner in self.runners)
            if not ours or isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            reason = str(error)
        # Perhaps it is our kernels that fail: Triton needs a C compiler, and more of some GPUs than they have.
        self.kernels, self.padded, self.proposals = False, {}, {}
        self._take(active)
        self.plan.log_fallback(f"training goes on without our own kernels, slower: {reason}")

    def _take(self, active: Sequence[Member]) -> None:
        self.steps.clear()  # before anything new is made, so that its memory is free
        self.padded = {member: self._padded(member) for member in active}
        optimizers = [self._optimizer(member) for member in active]
        self.runners = [
            Runner(member, self.plan, optimizer, self._feed(member), self.padded[member], self.kernels)
            for member, optimizer in zip(active, optimizers, strict=True)
        ]
        kinds: list[tuple[str, Feed, Callable[[int], None]]] = [("train", self.training, self._train_step)]
        if self.validation is not None:
            kinds.append(("validate", self.validation, self._validation_step))
        if self.plan.execution.compile:
            from torch._dynamo import config

            # Members share a function's code.
            config.recompile_limit = max(config.recompile_limit, 2 * len(self.runners))
        steps: dict[tuple[str, int], Step] = {}
        for kind, feed, function in kinds:
            feed.step.zero_()
            steps |= {(kind, size): partial(function, size) for size in feed.sizes}
        self.steps = dict(zip(steps, self._captured(list(steps.values())), strict=True))
        for runner in self.runners:  # only now, when nothing can fail any more
            runner.member.optimizer_state.optimizer = self.optimizers[runner.member] = runner.optimizer

    def _optimizer(self, member: Member) -> torch.optim.Optimizer:
        """Return the optimizer of an earlier capture, or build one with the member's state."""
        if member in self.optimizers:
            return self.optimizers[member]
        optimizer = optimizer_for(self.plan.recipe, member.network, self.rates)
        member.optimizer_state.load_into(optimizer)
        return optimizer

    def _feed(self, member: Member) -> TableFeed | None:
        """Return the feed of the member's own batches, on the common counter; None where data are streamed."""
        if not isinstance(self.training, TableFeed):
            return None
        if member.number not in self.feeds:
            shared = self.training
            self.feeds[member.number] = TableFeed(
                shared.split, shared.data, self.plan.recipe.batch_size, shared.augmentation, shared.dtype,
                step=shared.step,
            )  # fmt: skip
        return self.feeds[member.number]

    def _captured(self, steps: Sequence[Step]) -> list[Step]:
        """The steps as graphs: of all members at a time, or of as many as the GPU has memory for."""
        members, device = len(self.runners), self.plan.device
        while True:
            at_a_time = min(self.most or members, members)
            self.streams = side_streams(device, at_a_time)
            try:
                return all_captured(
                    steps,
                    device,
                    self._state,
                    modules=[runner.member.network for runner in self.runners] + self._loss_modules,
                    generators=lambda: [r.generator for r in self.runners if r.generator and r.draws],
                )
            except CaptureError as error:
                if at_a_time == 1 or not isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise
            # Here the error is gone, and with it the activations that it held.
            self.most = (at_a_time + 1) // 2
            self.plan.log_fallback(
                f"the GPU has not enough memory for {at_a_time} members at a time: it trains {self.most}, which "
                f"Execution(streams={self.most}) says from the start"
            )
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def _padded(self, member: Member) -> Shapes:
        """The weights that get channels of zeros. Networks that look alike are traced once, but each is tried."""
        if member in self.padded or not self.plan.uses_bfloat16 or self.plan.execution.compile:
            return self.padded.get(member, {})
        network, norms = member.network, replaceable(member.network) if self.kernels else []
        key = (str(network), *((name, own.shape, own.requires_grad) for name, own in network.named_parameters()))
        try:
            if key not in self.proposals:
                self.proposals[key] = padded_shapes(network, self.example, castable(network), norms)
            shapes = self.proposals[key]
            if shapes:
                check_padding(network, self.example, shapes, norms)
        except PaddingError as error:
            self.proposals.setdefault(key, {})
            self.plan.log_fallback(f"widths stay as they are, not padded to multiples of eight, slower: {error}")
            return {}
        return shapes

    def _state(self) -> Iterator[Tensor]:
        yield from self.rates.values()
        yield self.training.step
        if self.validation is not None:
            yield self.validation.step
        for module in self._loss_modules:
            yield from (*module.parameters(), *module.buffers())
        for runner in self.runners:
            yield from runner.state()

    def _train_step(self, size: int) -> None:
        batch = self.training.batch(size) if self._streamed else None
        # A loader may give more batches than it says.
        step = self.training.step.clamp(max=self.plan.steps - 1) if self._streamed else self.training.step
        for factor, table in self.rate_tables.items():
            self.rates[factor].copy_(table[step].squeeze(0))
        compiled = self.plan.execution.compile and size == self.training.sizes[0]
        side_by_side([partial(runner.train_step, size, batch, compiled) for runner in self.runners], self.streams)
        self.training.step.add_(1)

    def _validation_step(self, size: int) -> None:
        assert self.validation is not None
        batch = self.validation.batch(size)
        side_by_side([partial(runner.validation_step, batch) for runner in self.runners], self.streams)
        self.validation.step.add_(1)


class Runner:
    """One member in the graph."""

    def __init__(
        self,
        member: Member,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        feed: TableFeed | None,
        padded: Shapes,
        kernels: bool,
    ) -> None:
        self.member, self.plan, self.optimizer, self.feed = member, plan, optimizer, feed
        self.fused_batch = kernels and feed is not None and fused_batch.fits(feed)
        network = member.network
        named = {name: own for name, own in network.named_parameters() if own.requires_grad}
        self.padded = bool(padded)
        self.halves = Halves(network, castable(network) if plan.uses_bfloat16 else [], padded)
        self.parameters = list(named.values())
        self.leaves = [self.halves.whole.get(name, own) for name, own in named.items()]
        self.copied = [own for name, own in named.items() if name in self.halves.whole]
        self.loss = torch.zeros((), device=plan.device, dtype=plan.loss_dtype)
        self.totals = torch.zeros(2, dtype=torch.float64, device=plan.device)
        self.generator: torch.Generator | None = None
        if plan.device.type == "cuda":
            self.generator = torch.cuda.default_generators[plan.device.index or 0].clone_state()
            self.generator.manual_seed(0)  # from here on, an offset means that the network draws
        self.faster = replaceable(network) if kernels else []
        self.joined = not hooked(network)  # hooks would see what is pending
        if self.faster and not self.joined:
            plan.log_fallback(
                "additions and ReLUs are not fused with the batch norm before them, slower: the network has hooks"
            )
        if plan.execution.compile:
            self.compiled = torch.compile(
                partial(functional_call, network, self.halves.whole, tie_weights=False), dynamic=False
            )

    @property
    def draws(self) -> bool:
        """Whether the network draws random numbers (dropout)."""
        return self.generator is not None and self.generator.get_offset() > 0

    def begin(self, epoch: int) -> None:
        """Draw all that is random in an epoch, as the network trained alone would."""
        self.loss.zero_()
        order, crops, dropout = (
            self.plan.member_seed(purpose, self.member, epoch) for purpose in ("order", "crops", "dropout")
        )
        if self.feed is not None:
            self.feed.shuffle(order, crops)
        if self.generator is not None:
            self.generator.manual_seed(dropout)

    def state(self) -> Iterator[Tensor]:
        """All that a step changes."""
        yield from self.member.network.parameters()
        yield from self.member.network.buffers()
        yield from self.halves.whole.values()
        for values in self.optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))
        yield self.loss
        yield self.totals

    def train_step(self, size: int, shared: Batch | None, compiled: bool) -> None:
        """Take one step on a batch of `size` samples: the member's own, or the one that all share."""
        batch = self._batch(size) if shared is None else (clone_inputs(shared[0]), shared[1])
        cost, derivatives = self._derived(batch, compiled)
        if any(own is not None for own in derivatives[len(self.leaves) :]):
            raise CaptureError("it reaches a layer's weights by another way than through the layer")
        with torch.no_grad():
            self._descend(derivatives[: len(self.leaves)])
            self.loss.add_(cost)

    def _batch(self, size: int) -> Batch:
        assert self.feed is not None
        return fused_batch.drawn_batch(self.feed, size) if self.fused_batch else self.feed.batch(size)

    def _derived(self, batch: Batch, compiled: bool) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The loss, and what it is derived by. Sums and ReLUs join normalisations as long as the network bears it."""
        waiting = Waiting()
        try:
            return self._passed(batch, compiled, waiting if self.joined else None)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not waiting.used:
                raise
            reason = first_line(error)
        # Here the error is gone, and with it the activations that it held.
        self.joined = False
        derived = self._passed(batch, compiled, None)
        self.plan.log_fallback(f"additions and ReLUs are not fused with the batch norm before them, slower: {reason}")
        return derived

    def _passed(
        self, batch: Batch, compiled: bool, waiting: Waiting | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        inputs, targets = batch
        self.member.network.train()
        with _drawing_from(self.generator), self.plan.autocast():
            outputs = (
                self.compiled(*call_arguments(inputs))
                if compiled
                else self._forward(inputs, self.halves.whole, waiting)
            )
        cost = mean_loss(self.plan.loss, self._stacked(outputs), targets)
        return cost, torch.autograd.grad(cost, [*self.leaves, *self.copied], allow_unused=True)

    def _descend(self, derivatives: Sequence[Tensor | None]) -> None:
        """Hand the derivatives to the optimizer, in the type and layout of the parameters."""
        whole: list[Tensor] = []
        given: list[Tensor] = []
        for parameter, own in zip(self.parameters, derivatives, strict=True):
            if own is None:  # of a layer that runs without gradients, or not at all
                continue
            derivative = part(own, parameter.shape)
            if derivative.dtype == parameter.dtype and derivative.stride() == parameter.stride():
                parameter.grad = derivative
            else:
                parameter.grad = torch.empty_like(parameter)
                whole.append(parameter.grad)
                given.append(derivative)
        copy_all(whole, given)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.halves.refresh()

    @torch.no_grad()
    def validation_step(self, batch: Batch) -> None:
        inputs, targets = batch
        self.member.network.eval()
        with self.plan.autocast():
            outputs = self._stacked(self._forward(clone_inputs(inputs), self.halves.parts))
        self.totals[0] += mean_loss(self.plan.loss, outputs, targets) * len(targets)
        if self.plan.data.task == "classification":
            self.totals[1] += (combine_logits(outputs).argmax(-1) == targets).sum()

    def _forward(self, inputs: Inputs, weights: dict[str, Tensor], waiting: Waiting | None = None) -> Tensor:
        with faster(self.faster, self.padded, waiting):
            outputs: Tensor = functional_call(self.member.network, weights, *call_arguments(inputs), tie_weights=False)
            return outputs.value() if isinstance(outputs, Pending) else outputs

    def _stacked(self, outputs: Tensor) -> Tensor:
        """Shape (members, batch, …), see `combination.member_outputs`."""
        return (outputs if hasattr(self.member.network, "num_members") else outputs[None]).to(self.plan.loss_dtype)


def _noise(generator: torch.Generator, *shape: int, **_: Any) -> Tensor:
    """Draw noise on the CPU, in float32, whatever the plan says: it is cast where it is used."""
    return torch.randn(*shape, generator=generator)


@contextmanager
def _drawing_from(generator: torch.Generator | None) -> Iterator[None]:
    """Random numbers come from a member's own generator: its draws are those of the network trained alone."""
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
