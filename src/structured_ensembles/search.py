"""learn_scales(): train N scaling vectors per group on the frozen, untrained network (Algorithm 1, steps 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.common.checks import (
    check_choice,
    check_flags,
    check_number,
    check_seed,
)
from structured_ensembles.common.devices import Device, fork_generators, pick_device, seed_generators
from structured_ensembles.common.gradients import gradients_on
from structured_ensembles.common.inputs import move_inputs, select_rows
from structured_ensembles.common.precision import Precision, resolve_precision
from structured_ensembles.common.processes import average_buffers, world_size
from structured_ensembles.common.progress import progress
from structured_ensembles.cuda.capture import Step, captured_if_possible
from structured_ensembles.cuda.channels_last import channels_last_on_cpu
from structured_ensembles.cuda.state import tensors_of
from structured_ensembles.data import Data
from structured_ensembles.data.batch_shares import assign_samples
from structured_ensembles.data.drawing import fold
from structured_ensembles.data.feeds import Feed, feed_for
from structured_ensembles.data.losses import Loss, choose_units, loss_for
from structured_ensembles.diversity import Diversity
from structured_ensembles.examination.pretrained import find_normalization
from structured_ensembles.networks.copying import copy_frozen, dtype_of
from structured_ensembles.resuming.folder import RunFile
from structured_ensembles.resuming.search_checkpoint import (
    SearchState,
    Snapshot,
    check_like,
    gather_random_states,
    identify_search,
    join_snapshot,
    load_search,
    save_search,
    set_random_state,
    split_snapshot,
)
from structured_ensembles.scaling import (
    Initial,
    Placement,
    Scales,
    apply_scales,
    can_share_batches,
)
from structured_ensembles.searching.checks import check_search, check_task, check_walk
from structured_ensembles.searching.objective import Objective
from structured_ensembles.storage.container import raise_as_artifact_error


def learn_scales(
    model: nn.Module,
    graph: ChannelGraph,
    data: Data,
    members: int = 5,
    strength: float = 0.1,
    diversity: Diversity | None = "mmd",
    epochs: int = 10,
    seed: int = 0,
    *,
    initial: Initial = "N(0,1)",
    placement: Placement = "output",
    batch_size: int = 128,
    rate: float = 1e-3,
    loss: Loss | None = None,
    device: Device = "auto",
    precision: Precision = "auto",
    checkpoint: str | Path | RunFile | None = None,
    quiet: bool = False,
) -> Scales:
    """Learn the members' scaling vectors; the model itself is not changed.

    Every batch is divided among the members. The weights stay frozen, and batch norm uses batch statistics. Returns the
    vectors of the epoch with the best validation loss (of the last one, if `data` has no validation split).

    strength, diversity: λ and the kind of the penalty that keeps members apart: the paper's "mmd", our "overlap" (the
        correlation of the members' saliencies; about three times the cost), or None.
    initial, placement: how the vectors are drawn, and what they scale, see `Scales`.
    loss: a function of (outputs, targets) that averages over samples; by default cross-entropy, or the squared error
        for regression, in the units of `train`.
    precision: what the passes compute in; vectors, losses and the penalty are in the network's own type. "auto" is
        bfloat16 on a GPU that has it, by the kernels of `train` where the network can become a program. Float32
        always: one member, whose scales batch norm undoes but for rounding; the penalty "overlap", which needs
        second derivatives.
    checkpoint: a file to write after every epoch; if it exists already, the search resumes from it, to the same
        vectors.
    """
    check_walk(model, graph, data, loss, batch_size)
    check_flags(quiet=quiet)
    seed = check_seed(seed)
    check_search(strength, diversity, epochs, initial, placement)
    check_number("rate", rate)
    check_choice("precision", precision, get_args(Precision))
    check_task(graph, data)
    scales = Scales.draw(graph, members, initial, placement, seed)
    data = find_normalization(model, data, device)
    settings: dict[str, Any] = {"members": members, "strength": strength, "diversity": diversity, "epochs": epochs}
    settings |= {"seed": seed, "initial": initial, "placement": placement, "batch_size": batch_size, "rate": rate}
    settings |= {"precision": precision}
    groups = {group.name: [group.size, group.prunable] for group in graph.groups}
    checkpoint = identify_search(checkpoint, model, data, loss, groups=groups, **settings)

    with gradients_on():
        device = pick_device(device, model)
        frozen = copy_frozen(model).to(device)
        dtype = dtype_of(frozen)
        vectors = {name: value.to(device, dtype, copy=True).requires_grad_() for name, value in scales.vectors.items()}
        steps = data.num_batches("train", batch_size)
        largest_change = rate * steps * epochs  # Adam moves an entry by about its learning rate per step
        penalty = diversity if members > 1 else None
        example = move_inputs(data.example(dtype=dtype), device)
        together = can_share_batches(frozen, graph, placement, example)
        units = choose_units([frozen], data, loss)
        objective = Objective(frozen, vectors, loss_for(data, loss, units), members, strength, penalty, largest_change)
        search = _Search(objective, rate)
        training = feed_for(data.train, data, batch_size, device, dtype=dtype)
        if members > 1 and penalty != "overlap" and resolve_precision(precision, device) == "bfloat16":
            objective.compile(graph, placement, example, training.sizes, together)
        held_out = data.validation
        validation = None if held_out is None else feed_for(held_out, data, batch_size, device, dtype=dtype)

        with (
            fork_generators(device),
            channels_last_on_cpu(frozen, example),
            apply_scales(frozen, graph, vectors, placement, together) as objective.run,
            progress("search", epochs * steps, quiet) as advance,
        ):
            seed_generators(fold((seed, 3)), device)  # for dropout
            best, history = _run_epochs(search, training, validation, epochs, steps, seed, checkpoint, advance)
    learned, statistics = best
    return Scales(learned, placement, statistics, tuple(history))


def _run_epochs(
    search: _Search,
    training: Feed,
    validation: Feed | None,
    epochs: int,
    steps: int,
    seed: int,
    checkpoint: RunFile | None,
    advance: Callable[[], None],
) -> tuple[Snapshot, list[dict[str, float]]]:
    """Run the epochs that a checkpoint does not have yet; return the snapshot of the best one, and all figures.

    steps: of an epoch. advance: called after every step, and for those of the checkpoint.
    """
    best, best_snapshot = math.inf, search.snapshot()
    history: list[dict[str, float]] = []
    if checkpoint is not None and (earlier := load_search(checkpoint)):
        with raise_as_artifact_error(f"{checkpoint.path} does not fit this search; delete it to start anew"):
            best_snapshot = split_snapshot(earlier.kept, best_snapshot)
            search.restore(earlier)
        best, history = earlier.best, list(map(dict, earlier.history))
        for _ in range(len(history) * steps):
            advance()
    for epoch in range(len(history), epochs):
        figures = {"epoch": epoch, "loss": search.epoch(training, (seed, epoch), learn=True, advance=advance)}
        if not math.isfinite(figures["loss"]):
            raise FloatingPointError(
                f"the search's loss became {figures['loss']} in epoch {epoch + 1}: look for extremes in "
                f"`data`, or lower `rate` ({search.rate:g}) or `strength` ({search.objective.strength:g})"
            )
        if validation is not None:
            figures["validation_loss"] = search.epoch(validation, None, learn=False)
        history.append(figures)
        if validation is None or figures["validation_loss"] < best:
            best, best_snapshot = figures.get("validation_loss", best), search.snapshot()
        if checkpoint is not None:
            kept, random = join_snapshot(best_snapshot), gather_random_states(search.device)
            save_search(checkpoint, SearchState(search.tensors(), kept, best, random, history))
    if validation is not None and history and not math.isfinite(best):  # the best would be the vectors as drawn
        raise FloatingPointError(
            f"the search's loss on the validation split was {history[-1]['validation_loss']} in every epoch: look for "
            "extremes in that split of `data`"
        )
    return best_snapshot, history


class _Search:
    """The steps that minimise an objective, epoch by epoch, and their state."""

    def __init__(self, objective: Objective, rate: float) -> None:
        self.objective, self.rate = objective, rate
        self.frozen, self.vectors = objective.frozen, objective.vectors
        self.device = next(iter(self.vectors.values())).device
        kernels: dict[str, Any] = {"fused": True, "capturable": True} if self.device.type == "cuda" else {}
        self.optimizer = torch.optim.Adam(self.vectors.values(), lr=rate, **kernels)
        self.steps_done = torch.zeros(1, dtype=torch.int64, device=self.device)  # of the whole search
        self.total = torch.zeros((), device=self.device, dtype=torch.float64)
        self.steps: dict[tuple[bool, int], Step] = {}

    def epoch(
        self, feed: Feed, seed: tuple[int, int] | None, learn: bool, advance: Callable[[], None] = lambda: None
    ) -> float:
        """Go through a split once and return the mean loss. On a GPU, a step is a CUDA graph, captured once."""
        self.total.zero_()
        self.frozen.train(learn)
        program = self.objective.program
        if learn and program is not None:
            program.load_statistics()
        batches = samples = 0
        for size in feed.epoch(seed):
            step: Step = partial(self._learn if learn else self._measure, feed, size)
            if (learn, size) not in self.steps and not feed.irregular:
                alone = world_size() == 1  # a CUDA graph cannot exchange gradients between processes
                capture = partial(captured_if_possible, step, self.device, partial(self._state, feed), "the search")
                self.steps[learn, size] = capture(modules=[self.frozen]) if alone else step
            (step if feed.irregular else self.steps[learn, size])()
            batches, samples = batches + 1, samples + size
            advance()
        if learn and program is not None:
            program.store_statistics()
        if learn:
            average_buffers(self.frozen)
        return float(self.total) / (batches if learn else samples)

    def _state(self, feed: Feed) -> Iterator[Tensor]:
        """Yield the tensors that a step changes; of the network only its buffers, since the weights are frozen."""
        program = self.objective.program
        of_program = [] if program is None else program.tensors()
        buffers = list(self.frozen.buffers())
        return tensors_of(self.vectors, buffers, of_program, feed.step, self.steps_done, self.total, self.optimizer)

    def snapshot(self) -> Snapshot:
        """Copy the vectors, and the buffers that belong to them, to the CPU."""
        learned = {name: value.detach().cpu().clone() for name, value in self.vectors.items()}
        return learned, {name: value.detach().cpu().clone() for name, value in self.frozen.named_buffers()}

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that the next epoch starts from, by name."""
        tensors = self._restored_tensors()
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        return tensors

    def _restored_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `restore` overwrites, by name: the counter of steps, vectors and buffers."""
        tensors = {"turn": self.steps_done}
        tensors |= {f"vectors.{name}": value.detach() for name, value in self.vectors.items()}
        return tensors | {f"buffers.{name}": value for name, value in self.frozen.named_buffers()}

    @torch.no_grad()
    def restore(self, state: SearchState) -> None:
        """Load the state of a search after an epoch, random generators included."""
        optimizer_state: dict[int, dict[str, Tensor]] = {}
        tensors = self._restored_tensors()
        expected = dict(tensors)
        for index, vector in enumerate(self.vectors.values()):
            expected |= {f"optimizer.{index}.{key}": vector for key in ("exp_avg", "exp_avg_sq")}
            expected[f"optimizer.{index}.step"] = torch.zeros(())
        check_like(state.changing, expected)
        for name, tensor in state.changing.items():
            if name in tensors:
                tensors[name].copy_(tensor)
            else:
                _, number, key = name.split(".")
                optimizer_state.setdefault(int(number), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": optimizer_state})
        set_random_state(self.device, state.random)

    def _learn(self, feed: Feed, size: int) -> None:
        """Take one optimizer step on a batch."""
        inputs, targets = feed.batch(size)
        shares = assign_samples(size, self.objective.members, self.steps_done, self.device)
        cost, gradients = self.objective.gradients(inputs, targets, shares)
        for vector, gradient in zip(self.vectors.values(), gradients, strict=True):
            vector.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.total.add_(cost)
        self.steps_done.add_(1)
        feed.step.add_(1)

    @torch.no_grad()
    def _measure(self, feed: Feed, size: int) -> None:
        """Add the mean loss over the members, each on its share of the batch."""
        inputs, targets = feed.batch(size)
        rows = assign_samples(size, self.objective.members, feed.step, self.device).flatten()
        self.total.add_(self.objective.losses(select_rows(inputs, rows), targets[rows]).mean() * size)
        feed.step.add_(1)
