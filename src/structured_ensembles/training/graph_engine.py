"""The graph engine: a step of all members as one CUDA graph.

Every member draws its own batch, from (seed, member); that, the forward and backward passes, and the optimizers of all
members are captured once and replayed for every step. The host only says "again": the order of an epoch, its crops and
rates lie in tables on the device, a counter there says which row is next, and losses are summed up there.

Networks are compiled to programs (cuda/compilation.py); members that share one are computed together, every kernel for
all of them. Those that cannot be compiled run as they are, a stream for each. Both hold the activations of all members
at a time; `Execution.streams` lets fewer run at a time, in less memory, and so does a GPU that has not enough of it.

Measured by benchmarks/fleet.py; recorded in benchmarks/results.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.cuda.capture import CaptureError, Step, all_captured, side_by_side, side_streams
from structured_ensembles.cuda.compilation import Compiled, compile_networks
from structured_ensembles.cuda.state import tensors_of
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.data.feeds import Feed, MemberFeed, StreamFeed, feed_for
from structured_ensembles.training.averaging import update_average
from structured_ensembles.training.engine import Member, Plan, Result
from structured_ensembles.training.module_runner import ModuleRunner
from structured_ensembles.training.optimizers import optimizer_for, rate_factors
from structured_ensembles.training.program_runner import ProgramRunner
from structured_ensembles.training.runners import Runner


class GraphEngine:
    """Captures a step for each size of batch, and anew when a member has stopped.

    members: all that this process trains. Programs are made for all of them, also for those that have stopped before
    this call: channels are padded as they were, and a resumed training computes the same numbers.
    """

    name = "graph"

    def __init__(self, plan: Plan, members: Sequence[Member]) -> None:
        self.plan, self.members = plan, members
        self.rate_tables = {factor: torch.zeros(plan.steps, device=plan.device) for factor in rate_factors(plan.recipe)}
        self.rates = {factor: torch.zeros((), device=plan.device) for factor in self.rate_tables}
        self.averaging_table = torch.zeros(plan.steps, device=plan.device)
        self.averaging_weight = torch.zeros((), device=plan.device)
        data, size = plan.data, plan.recipe.batch_size
        # Counts the steps. Of a loader it gives the batches, too, the same to all members.
        self.training = feed_for(
            data.train,
            data,
            size,
            plan.device,
            augmentation=plan.augmentation,
            dtype=plan.dtype,
            mixup=plan.recipe.mixup,
        )
        self.feeds: dict[Member, MemberFeed] = {}
        self.optimizers: dict[Member, torch.optim.Optimizer] = {}
        self.validation: Feed | None = None
        if data.validation is not None:
            self.validation = feed_for(data.validation, data, 512, plan.device, dtype=plan.dtype)
        self.runners: list[Runner] = []
        self.streams: list[torch.cuda.Stream] = []
        self.max_parallel = plan.execution.streams  # members at a time; None: all of them
        self.kernels = True  # our own, where they can run
        self.compiled: list[tuple[list[Member], Compiled]] | None = None  # None: not yet
        self.steps: dict[tuple[str, int], Step] = {}
        self._loss_modules = [plan.loss] if isinstance(plan.loss, nn.Module) else []
        self._teachers: list[nn.Module] = [] if plan.teaching is None else [plan.teaching.networks]
        if plan.device.type == "cuda" and find_spec("triton") is None:
            plan.log_fallback("PyTorch's own kernels are used, slower: Triton is not installed")

    def train_epoch(self, active: Sequence[Member], epoch: int, advance: Callable[[], None]) -> list[float]:
        plan = self.plan
        rates = [plan.recipe.rate_at(epoch * plan.steps + step, plan.steps) for step in range(plan.steps)]
        for factor, table in self.rate_tables.items():
            table.copy_(torch.tensor(rates) * factor)
        weights = [plan.recipe.averaging_weight(epoch * plan.steps + step, plan.steps) for step in range(plan.steps)]
        self.averaging_table.copy_(torch.tensor(weights))
        for runner in self.runners:
            runner.begin(epoch)
        for size in self.training.epoch(derive_seed(plan.seed, "order", epoch) if self._streamed else None):
            step = None if self.training.irregular else self.steps.get(("train", size))
            if step is None:  # a batch of a loader whose shape was not captured
                self._train_step(size)
            else:
                step()
            advance()
        for runner in self.runners:
            runner.finish_epoch()
        losses = self._by_member({runner: (runner.losses / plan.steps).tolist() for runner in self.runners})
        return [losses[member] for member in active]

    def validate(self, active: Sequence[Member]) -> list[Result]:
        if self.validation is None:
            return [(None, None)] * len(active)
        samples = 0
        for runner in self.runners:
            runner.totals.zero_()
        for size in self.validation.epoch(None):
            step = None if self.validation.irregular else self.steps.get(("validate", size))
            (step or partial(self._validation_step, size))()
            samples += size
        totals = self._by_member({runner: (runner.totals / samples).tolist() for runner in self.runners})
        classifying = self.plan.data.task == "classification"
        return [(totals[member][0], totals[member][1] if classifying else None) for member in active]

    def _by_member(self, values: dict[Runner, list[Any]]) -> dict[Member, Any]:
        """Return values by member, from lists by runner."""
        return {
            member: value
            for runner, of_members in values.items()
            for member, value in zip(runner.members, of_members, strict=True)
        }

    @property
    def _captured_members(self) -> list[Member]:
        """List the members of all runners."""
        return [member for runner in self.runners for member in runner.members]

    @property
    def _counters(self) -> list[Tensor]:
        """List the feeds' counters of batches."""
        return [feed.step for feed in (self.training, self.validation) if feed is not None]

    @property
    def _streamed(self) -> bool:
        """Tell whether a loader gives the batches, the same to all members."""
        return isinstance(self.training, StreamFeed)

    def prepare(self, active: Sequence[Member]) -> None:
        """Capture the steps of these members, unless they are those of the last epoch."""
        if not active or set(self._captured_members) == set(active):
            return
        try:
            self._prepare(active)
            return
        except CaptureError as error:
            ours_run = any(runner.uses_our_kernels for runner in self.runners)
            if not ours_run or isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            reason = str(error)
        # Perhaps it is our kernels that fail: Triton needs a C compiler, and more of some GPUs than they have.
        self.kernels, self.compiled = False, []
        self._prepare(active)
        self.plan.log_fallback(f"training goes on without our own kernels, slower: {reason}")

    def _prepare(self, active: Sequence[Member]) -> None:
        """Capture the steps of these members. Raises `CaptureError`; then the members have not changed."""
        self.steps.clear()  # before anything new is made, so that its memory is free
        self.runners = []
        if self.plan.execution.compile:
            from torch._dynamo import config

            # Members share a function's code.
            config.recompile_limit = max(config.recompile_limit, 2 * len(active))
        optimizers = {member: self._optimizer(member) for member in active}
        self.steps = self._capture(active, optimizers)
        for member, optimizer in optimizers.items():  # only now, when nothing can fail any more
            member.optimizer_state.optimizer = self.optimizers[member] = optimizer

    def _optimizer(self, member: Member) -> torch.optim.Optimizer:
        """Return the optimizer of an earlier capture, or build one with the member's state."""
        if member in self.optimizers:
            return self.optimizers[member]
        optimizer = optimizer_for(self.plan.recipe, member.network, self.rates)
        member.optimizer_state.load_into(optimizer)
        return optimizer

    def _capture(
        self, active: Sequence[Member], optimizers: dict[Member, torch.optim.Optimizer]
    ) -> dict[tuple[str, int], Step]:
        """Capture the steps of all members at a time, or of as many as the GPU has memory for."""
        while True:
            at_a_time = min(self.max_parallel or len(active), len(active))
            try:
                return self._capture_steps(active, optimizers, at_a_time)
            except (CaptureError, torch.OutOfMemoryError) as error:
                cause = error if isinstance(error, torch.OutOfMemoryError) else error.__cause__
                if at_a_time == 1 or not isinstance(cause, torch.OutOfMemoryError):
                    raise
            # Here the error is gone, and with it the activations that it held.
            self.max_parallel = (at_a_time + 1) // 2
            self.plan.log_fallback(
                f"the GPU has not enough memory for {at_a_time} members at a time: it trains {self.max_parallel}, "
                f"which Execution(streams={self.max_parallel}) says from the start"
            )
            self.runners = []
            gc.collect()
            if self.plan.device.type == "cuda":
                torch.cuda.empty_cache()

    def _capture_steps(
        self, active: Sequence[Member], optimizers: dict[Member, torch.optim.Optimizer], at_a_time: int
    ) -> dict[tuple[str, int], Step]:
        """Make the runners and capture their steps, of so many members at a time."""
        self.streams = side_streams(self.plan.device, at_a_time)
        self.runners = self._make_runners(active, optimizers, at_a_time)
        for counter in self._counters:  # after an epoch, they are past the last row of its tables
            counter.zero_()
        for runner in self.runners:
            if isinstance(runner, ProgramRunner):
                runner.compile_kernels(self.training.sizes)
        steps = self._plain_steps()
        captured = all_captured(
            list(steps.values()),
            self.plan.device,
            self._state,
            modules=[member.network for member in active] + self._loss_modules + self._teachers,
            generators=lambda: [generator for runner in self.runners for generator in runner.generators()],
        )
        return dict(zip(steps, captured, strict=True))

    def _plain_steps(self) -> dict[tuple[str, int], Step]:
        """Return the steps to capture, by kind ("train", "validate") and size of batch."""
        kinds: list[tuple[str, Feed, Callable[[int], None]]] = [("train", self.training, self._train_step)]
        if self.validation is not None:
            kinds.append(("validate", self.validation, self._validation_step))
        steps: dict[tuple[str, int], Step] = {}
        for kind, feed, function in kinds:
            steps |= {(kind, size): partial(function, size) for size in feed.sizes}
        return steps

    def _make_runners(
        self, active: Sequence[Member], optimizers: dict[Member, torch.optim.Optimizer], at_a_time: int
    ) -> list[Runner]:
        """Compile the members' networks, once in a run, and make a runner for each program and each network without."""
        if self.compiled is None:
            self.compiled = self._compile()
        runners: list[Runner] = []
        rest = list(active)
        for members, compiled in self.compiled:
            remaining = [member for member in members if member in rest]
            for start in range(0, len(remaining), at_a_time):
                group = remaining[start : start + at_a_time]
                runners.append(
                    ProgramRunner(
                        group,
                        self.plan,
                        compiled.of_members(len(group)),
                        [optimizers[member] for member in group],
                        [self._feed(member) for member in group],
                    )
                )
            rest = [member for member in rest if member not in remaining]
        compiled_size = self.training.sizes[0] if self.plan.execution.compile else None
        runners += [
            ModuleRunner(member, self.plan, optimizers[member], self._feed(member), self.kernels, compiled_size)
            for member in rest
        ]
        return runners

    def _compile(self) -> list[tuple[list[Member], Compiled]]:
        """Compile the members' networks to programs; members whose networks cannot be compiled are missing."""
        plan = self.plan
        if plan.execution.compile or (plan.device.type == "cuda" and find_spec("triton") is None):
            return []
        example = plan.example(partial(_noise, torch.Generator().manual_seed(0)))
        networks = [member.network for member in self.members]
        # In float32 convolutions are cuDNN's, one network at a time: streams keep the GPU busier than a common program.
        together = plan.uses_bfloat16 or plan.device.type != "cuda"
        results = compile_networks(networks, example, plan.uses_bfloat16, together, plan.log_fallback)
        return [([self.members[number] for number in compiled.numbers], compiled) for compiled in results]

    def _feed(self, member: Member) -> MemberFeed | None:
        """Return the feed of the member's own batches, on the common counter; None for those of a loader."""
        if not isinstance(self.training, MemberFeed):
            return None
        if member not in self.feeds:
            self.feeds[member] = self.training.for_member()
        return self.feeds[member]

    def _state(self) -> Iterator[Tensor]:
        """Yield all tensors that steps change."""
        averages = [member.average for member in self._captured_members]
        runner_states = [runner.state() for runner in self.runners]
        return tensors_of(
            self.rates, self.averaging_weight, averages, self._counters, self._loss_modules, runner_states
        )

    def _train_step(self, size: int) -> None:
        """Take a training step of all members on batches of `size` samples."""
        batch = self.training.batch(size) if self._streamed else None
        # A loader may give more batches than it says.
        step = self.training.step.clamp(max=self.plan.steps - 1) if self._streamed else self.training.step
        for factor, table in self.rate_tables.items():
            self.rates[factor].copy_(table[step].squeeze(0))
        self._run([(runner, partial(runner.train_step, size, batch)) for runner in self.runners])
        if self.plan.recipe.averaging:
            self.averaging_weight.copy_(self.averaging_table[step].squeeze(0))
            update_average(self._captured_members, self.averaging_weight)
        self.training.step.add_(1)

    def _validation_step(self, size: int) -> None:
        """Validate all members on a batch of `size` samples."""
        assert self.validation is not None
        batch = self.validation.batch(size)
        self._run([(runner, partial(runner.validation_step, batch)) for runner in self.runners])
        self.validation.step.add_(1)

    def _run(self, steps: Sequence[tuple[Runner, Callable[[Sequence[torch.cuda.Stream]], None]]]) -> None:
        """Run the steps of single members side by side; those of several, which keep the GPU busy, one by one."""
        for runner, step in steps:
            if len(runner.members) > 1 or len(steps) == 1:
                step(self.streams)
        alone = [partial(step, ()) for runner, step in steps if len(runner.members) == 1 and len(steps) > 1]
        side_by_side(alone, self.streams)


def _noise(generator: torch.Generator, *shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Draw noise on the CPU, so that it is the same on every device."""
    return torch.randn(*shape, generator=generator).to(device, dtype)
