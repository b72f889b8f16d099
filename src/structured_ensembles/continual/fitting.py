"""fit(): the training loop of one task, which all learners share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.devices import seed_generators
from structured_ensembles.common.inputs import move_inputs
from structured_ensembles.common.progress import progress
from structured_ensembles.common.threads import warn_of_slowness
from structured_ensembles.cuda.capture import Step, captured_if_possible
from structured_ensembles.cuda.channels_last import channels_last_on_cpu
from structured_ensembles.cuda.state import tensors_of
from structured_ensembles.data import Data
from structured_ensembles.data.augmentation import resolve_augmentation
from structured_ensembles.data.drawing import fold
from structured_ensembles.data.feeds import feed_for
from structured_ensembles.data.splits import IndexedSplit
from structured_ensembles.training import Recipe
from structured_ensembles.training.optimizers import optimizer_for, rate_factors


def fit(
    network: nn.Module,
    data: Data,
    recipe: Recipe,
    seed: tuple[int, ...],
    device: torch.device,
    *,
    after_step: Callable[[], None] | None = None,
    penalty: Callable[[], Tensor] | None = None,
    description: str = "train",
    quiet: bool = False,
) -> list[float]:
    """Train `network` in place with the cross-entropy, for all epochs of the recipe; return the mean loss per epoch.

    The optimizer is new, and all random numbers follow from `seed`. after_step: called after every optimizer step.
    penalty: added to the loss.
    """
    cuda = device.type == "cuda"
    if device.type == "cpu":
        warn_of_slowness()
    rates = {factor: torch.tensor(recipe.rate * factor, device=device) for factor in rate_factors(recipe)}
    optimizer = optimizer_for(recipe, network, rates if cuda else None)
    augmentation = (
        resolve_augmentation(recipe.augmentation, data.shape, data.task)
        if isinstance(data.train, IndexedSplit)
        else "none"
    )
    dtype = next(network.parameters()).dtype
    # Even batches: a last batch of a few samples would spoil the statistics of batch norm at the end of every epoch.
    feed = feed_for(data.train, data, recipe.batch_size, device, augmentation=augmentation, dtype=dtype, even=True)
    total = torch.zeros((), device=device)

    def step(size: int) -> None:
        inputs, targets = feed.batch(size)
        cross_entropy = F.cross_entropy(network(inputs), targets)
        loss = cross_entropy if penalty is None else cross_entropy + penalty()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if after_step is not None:
            after_step()
        total.add_(cross_entropy.detach())
        feed.step.add_(1)

    state = partial(tensors_of, network, optimizer, feed.step, total)
    steps: dict[int, Step] = {}  # by batch size; on a GPU, CUDA graphs
    num_batches = data.num_batches("train", recipe.batch_size)
    losses = []
    example = move_inputs(data.example(dtype=dtype), device)
    with (
        torch.random.fork_rng(devices=[device] if cuda else []),
        channels_last_on_cpu(network, example),
        progress(description, recipe.epochs * num_batches, quiet) as advance,
    ):
        seed_generators(fold_seed(*seed), device)  # dropout
        network.train()
        for epoch in range(recipe.epochs):
            total.zero_()
            for size in feed.epoch((*seed, epoch)):
                if size not in steps and not feed.irregular:
                    steps[size] = captured_if_possible(
                        partial(step, size), device, state, description, modules=[network]
                    )
                (partial(step, size) if feed.irregular else steps[size])()
                advance()
            losses.append(float(total) / num_batches)
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"the loss became {losses[-1]} in epoch {epoch + 1}: look for extreme values in the task's data, "
                    f"or lower `rate` ({recipe.rate:g})"
                )
    network.eval()
    return losses


def fold_seed(*numbers: int) -> int:
    """Combine a learner's seed with numbers, such as a task's, into a seed of 31 bits."""
    return fold(numbers) >> 32
