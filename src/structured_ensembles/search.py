"""learn_scales(): train N scaling vectors per group on the frozen, untrained network (Algorithm 1, steps 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.common.checks import check_choice, check_number, check_type, check_whole, checked_seed
from structured_ensembles.common.devices import Device, pick_device, seed_generators
from structured_ensembles.common.inputs import Inputs, moved, rows_of
from structured_ensembles.common.processes import add_up, average_buffers, rank, world
from structured_ensembles.common.progress import progress
from structured_ensembles.cuda.capture import Step, captured_if_possible
from structured_ensembles.cuda.state import tensors_of
from structured_ensembles.data import Data
from structured_ensembles.data.dataset import check_data
from structured_ensembles.data.dealing import deal
from structured_ensembles.data.drawing import fold
from structured_ensembles.data.feeds import Feed, feed_for
from structured_ensembles.data.losses import Loss, learned_units, loss_for, member_losses
from structured_ensembles.diversity import Diversity, mmd_penalty, overlap_penalty, terms_for
from structured_ensembles.examination.pretrained import fitted_normalization
from structured_ensembles.networks.copying import dtype_of, shadow_of
from structured_ensembles.resuming.identity import RunFile
from structured_ensembles.resuming.search_checkpoint import (
    SearchState,
    load_search,
    random_states,
    save_search,
    set_random_state,
)
from structured_ensembles.scaling import Initial, Placement, Scales, rows_stay_apart, scaled
from structured_ensembles.storage.container import refused


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
    checkpoint: RunFile | None = None,
    quiet: bool = False,
) -> Scales:
    """Learn the members' scaling vectors; the model itself is not changed.

    Every batch is dealt out to the members. The weights stay frozen, normalisation runs on batch statistics; the
    vectors of the epoch with the best validation loss are returned (of the last one, if `data` has no validation
    split).

    strength, diversity: λ and the kind of the penalty that keeps members apart: the paper's "mmd", our "overlap" (the
        correlation of the members' saliencies; about three times the cost), or None.
    initial, placement: how the vectors are drawn, and what they scale, see `Scales`.
    loss: a function of (outputs, targets) that averages over samples; by default cross-entropy, or the squared error
        for regression, in the units of `train`.
    checkpoint: a file to write after every epoch; if it is there already, the search goes on from it, to the same
        vectors.
    """
    check_walk(model, graph, data)
    data = fitted_normalization(model, data, device)
    seed = checked_seed(seed)
    scales = Scales.draw(graph, members, initial, placement, seed)
    check_choice("diversity", diversity, (*get_args(Diversity), None))
    for name, value, least in (("epochs", epochs, 0), ("batch_size", batch_size, 1)):
        check_whole(name, value, least)
    for name, number in (("strength", strength), ("rate", rate)):
        check_number(name, number)
    check_task(graph, data)

    device = pick_device(device, model)
    shadow = shadow_of(model).to(device)
    dtype = dtype_of(shadow)
    vectors = {name: value.to(device, dtype, copy=True).requires_grad_() for name, value in scales.vectors.items()}
    steps = data.num_batches("train", batch_size)
    # Adam moves an entry by about its rate per step, so that this bounds the entries for the whole search.
    reach = rate * steps * epochs
    terms = {
        name: terms_for(float(value.detach().abs().max()) + reach, value.shape[1]) for name, value in vectors.items()
    }
    penalty = diversity if members > 1 else None
    together = rows_stay_apart(shadow, graph, placement, moved(data.example(dtype=dtype), device))
    units = learned_units([shadow], data, loss)
    search = _Search(shadow, vectors, loss_for(data, loss, units), members, strength, penalty, terms, rate)
    training = feed_for(data.train, data, batch_size, device, dtype=dtype)
    validation = None
    if data.validation is not None:
        validation = feed_for(data.validation, data, batch_size, device, dtype=dtype)

    best, kept = math.inf, _snapshot(vectors, shadow)
    history: list[dict[str, float]] = []
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        scaled(shadow, graph, vectors, placement, together) as search.run,
        progress("search", epochs * steps, quiet) as advance,
    ):
        seed_generators(fold((seed, 3)), device)  # for dropout
        if checkpoint is not None and (earlier := load_search(checkpoint)):
            with refused(f"{checkpoint.path} does not fit this search; delete it to start anew"):
                kept = _split_snapshot(earlier.kept, kept)
                search.restore(earlier)
            best, history = earlier.best, list(map(dict, earlier.history))
            for _ in range(len(history) * steps):
                advance()
        for epoch in range(len(history), epochs):
            figures = {"epoch": epoch, "loss": search.epoch(training, (seed, epoch), learn=True, advance=advance)}
            if not math.isfinite(figures["loss"]):
                raise FloatingPointError(
                    f"the search's loss became {figures['loss']} in epoch {epoch + 1}: look for extremes in `data`, "
                    f"or lower `rate` ({rate:g}) or `strength` ({strength:g})"
                )
            if validation is not None:
                figures["validation_loss"] = search.epoch(validation, None, learn=False)
            history.append(figures)
            if validation is None or figures["validation_loss"] < best:
                best, kept = figures.get("validation_loss", best), _snapshot(vectors, shadow)
            if checkpoint is not None:
                state = SearchState(search.changing(), _joined_snapshot(kept), best, random_states(device), history)
                save_search(checkpoint, state)
    learned, statistics = kept
    return Scales(learned, placement, statistics, tuple(history))


class _Search:
    """What the search minimises, the members' losses and the penalty on their likeness, and its steps."""

    def __init__(
        self,
        shadow: nn.Module,
        vectors: dict[str, Tensor],
        loss: Loss,
        members: int,
        strength: float,
        diversity: Diversity | None,
        terms: dict[str, int],
        rate: float,
    ) -> None:
        self.shadow, self.vectors, self.loss, self.members = shadow, vectors, loss, members
        self.run: Callable[[Inputs], Tensor] = shadow
        self.strength, self.diversity, self.terms = strength, diversity, terms
        self.device = next(iter(vectors.values())).device
        kernels: dict[str, Any] = {"fused": True, "capturable": True} if self.device.type == "cuda" else {}
        self.optimizer = torch.optim.Adam(vectors.values(), lr=rate, **kernels)
        self.turn = torch.zeros(1, dtype=torch.int64, device=self.device)  # counts the steps of the whole search
        self.total = torch.zeros((), device=self.device, dtype=torch.float64)
        self.steps: dict[tuple[bool, int], Step] = {}

    def epoch(
        self, feed: Feed, seed: tuple[int, int] | None, learn: bool, advance: Callable[[], None] = lambda: None
    ) -> float:
        """One pass over a split; returns the mean loss. On a GPU, a step is a CUDA graph, captured once."""
        self.total.zero_()
        self.shadow.train(learn)
        batches = samples = 0
        for size in feed.epoch(seed):
            step: Step = partial(self._learn if learn else self._measure, feed, size)
            if (learn, size) not in self.steps and not feed.irregular:
                alone = world() == 1  # a graph would have to hold the messages between processes
                whole = partial(captured_if_possible, step, self.device, partial(self._state, feed), "the search")
                self.steps[learn, size] = whole(modules=[self.shadow]) if alone else step
            (step if feed.irregular else self.steps[learn, size])()
            batches, samples = batches + 1, samples + size
            advance()
        if learn:
            average_buffers(list(self.shadow.buffers()))
        return float(self.total) / (batches if learn else samples)

    def _state(self, feed: Feed) -> Iterator[Tensor]:
        """Yield all that a step changes: of the network only the statistics, since its weights are frozen."""
        return tensors_of(self.vectors, self.shadow.buffers(), feed.step, self.turn, self.total, self.optimizer)

    def changing(self) -> dict[str, Tensor]:
        """Copy every tensor that the next epoch begins with, by name, to the CPU."""
        tensors = {"turn": self.turn}
        tensors |= {f"vectors.{name}": value for name, value in self.vectors.items()}
        tensors |= {f"buffers.{name}": value for name, value in self.shadow.named_buffers()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        return {name: value.detach().cpu().clone() for name, value in tensors.items()}

    @torch.no_grad()
    def restore(self, state: SearchState) -> None:
        """Go back to where a search was after an epoch, the random generator included."""
        optimizer: dict[int, dict[str, Tensor]] = {}
        places = {"turn": self.turn}
        places |= {f"vectors.{name}": value for name, value in self.vectors.items()}
        places |= {f"buffers.{name}": value for name, value in self.shadow.named_buffers()}
        expected = dict(places)
        for index, vector in enumerate(self.vectors.values()):
            expected |= {f"optimizer.{index}.{key}": vector for key in ("exp_avg", "exp_avg_sq")}
            expected[f"optimizer.{index}.step"] = torch.zeros(())
        _check_like(state.changing, expected)
        for name, tensor in state.changing.items():
            if name in places:
                places[name].copy_(tensor)
            else:
                _, number, key = name.split(".")
                optimizer.setdefault(int(number), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": optimizer})
        set_random_state(self.device, state.random)

    def _learn(self, feed: Feed, size: int) -> None:
        inputs, targets = feed.batch(size)
        cost, derivatives = self._derive(inputs, targets)
        for vector, derivative in zip(self.vectors.values(), derivatives, strict=True):
            vector.grad = derivative
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.total.add_(cost)
        self.turn.add_(1)
        feed.step.add_(1)

    @torch.no_grad()
    def _measure(self, feed: Feed, size: int) -> None:
        """Mean loss over the members, each on its share of the batch."""
        inputs, targets = feed.batch(size)
        dealt = deal(size, self.members, feed.step, self.device).flatten()
        self.total.add_(self._losses(rows_of(inputs, dealt), targets[dealt]).mean() * size)
        feed.step.add_(1)

    def _derive(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The cost of a batch that is dealt out to the members, and its derivatives.

        Where there are several processes, each takes its part of every member's share, and the derivatives add up. (The
        penalty "overlap" is then a mean over the processes: each sees the saliencies of its own part.)
        """
        dealt = deal(len(targets), self.members, self.turn, self.device)  # (members, share)
        own = dealt[:, rank() :: world()]
        part = own.shape[1] / dealt.shape[1]
        leaves = list(self.vectors.values())
        cost = self._penalty() / world()
        if own.shape[1]:
            dealt_to_members = own.flatten()
            losses = self._losses(rows_of(inputs, dealt_to_members), targets[dealt_to_members])
            if self.diversity == "overlap" and self.strength:
                slopes = torch.autograd.grad(losses.sum(), leaves, create_graph=True)
                cost = cost + self.strength * part * overlap_penalty([slope.abs() for slope in slopes])
            cost = cost + part * losses.mean()
        derivatives = [derivative.contiguous() for derivative in torch.autograd.grad(cost, leaves)]
        cost = cost.detach()
        add_up([cost, *derivatives])
        return cost, derivatives

    def _losses(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """The loss of each member, shape (members,), on rows grouped by member."""
        return member_losses(self.loss, self.run(inputs), targets, self.members)

    def _penalty(self) -> Tensor:
        if self.diversity == "mmd" and self.strength:
            return self.strength * mmd_penalty(self.vectors, self.terms)
        return torch.stack([0 * vector.sum() for vector in self.vectors.values()]).sum()


def check_walk(model: nn.Module, graph: ChannelGraph, data: Data) -> None:
    check_type("model", model, nn.Module)
    check_type("graph", graph, ChannelGraph, "trace(model, example) gives one")
    check_data(data)


def check_task(graph: ChannelGraph, data: Data) -> None:
    """Whether the network's outputs can be compared with the targets, as far as can be told before any work."""
    if data.task == "classification" and graph.output_shape and data.num_classes > graph.output_shape[-1]:
        raise ValueError(
            f"data has {data.num_classes} classes, but the model has {graph.output_shape[-1]} outputs: it needs one "
            "for each class, also for two classes and a loss of your own"
        )


def _snapshot(vectors: dict[str, Tensor], shadow: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """True copies, on the CPU, of the vectors and of the statistics that belong to them."""
    learned = {name: value.detach().cpu().clone() for name, value in vectors.items()}
    return learned, {name: value.detach().cpu().clone() for name, value in shadow.named_buffers()}


def _joined_snapshot(snapshot: tuple[dict[str, Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """A snapshot as one dict, as a checkpoint has it."""
    learned, statistics = snapshot
    named = {f"statistics.{name}": value for name, value in statistics.items()}
    return {f"vectors.{name}": value for name, value in learned.items()} | named


def _split_snapshot(
    joined: Mapping[str, Tensor], like: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inverse of `_joined_snapshot`, in the order of the snapshot `like`, which a file does not keep."""
    _check_like(joined, _joined_snapshot(like))
    learned, statistics = like
    found = {name: joined[f"vectors.{name}"] for name in learned}
    return found, {name: joined[f"statistics.{name}"] for name in statistics}


def _check_like(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless a checkpoint has exactly the tensors of this search, in their shapes and types."""
    for name in sorted({*tensors, *expected}):
        if name not in tensors or name not in expected:
            raise ValueError(f"{name} is missing, or unknown")
        found, own = tensors[name], expected[name]
        if found.shape != own.shape or found.dtype != own.dtype or found.isnan().any():
            raise ValueError(f"{name} has another shape or type, or NaN")
        if name.endswith(".step") and not 0 <= float(found) < 2**53:
            raise ValueError(f"{name} cannot be {float(found)}")
