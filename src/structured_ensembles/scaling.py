"""Scales: N vectors per channel group, and running a model under them.

Member i of the ensemble sees the output of every prunable layer multiplied, channel by channel, with its own vector.
All members run in one pass: the rows of a batch are grouped by member, and each group meets its member's vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph, Output
from structured_ensembles.common.checks import check_choice, check_whole
from structured_ensembles.common.inputs import Inputs, batch_size, call, joined, one_tensor, pieces, tensors_in
from structured_ensembles.common.tables import text_table
from structured_ensembles.data.drawing import stream
from structured_ensembles.networks.copying import dtype_of

Initial = Literal["N(0,1)", "N(0,2)", "N(0,5)", "U(0,1)", "U(-1,1)"]
Placement = Literal["output", "norm"]


@dataclass(frozen=True)
class Scales:
    """The scaling vectors of an ensemble.

    vectors: for each prunable group, shape (members, size).
    placement: what they scale: the layer's "output", or the "norm" that follows it (the output where there is none).
    statistics: the model's buffers as the search left them (normalisation statistics under the scales).
    history: one dictionary of figures per epoch of the search.
    """

    vectors: Mapping[str, Tensor]
    placement: Placement = "output"
    statistics: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    history: Sequence[Mapping[str, float]] = field(default=(), repr=False)

    def __str__(self) -> str:
        rows = [
            (name, f"{own.shape[1]:,}", *(f"{float(value):.3f}" for value in (own.min(), own.mean(), own.max())))
            for name, own in self.vectors.items()
        ]
        table = text_table(("group", "neurons", "least", "mean", "greatest"), rows)
        return f"{table}\n{self.members} scaling vectors for each group, on its {self.placement}"

    @property
    def members(self) -> int:
        return len(next(iter(self.vectors.values())))

    @classmethod
    def draw(
        cls,
        graph: ChannelGraph,
        members: int = 5,
        initial: Initial = "N(0,1)",
        placement: Placement = "output",
        seed: int = 0,
    ) -> Scales:
        """Random vectors; in N(0,5) the second number is the standard deviation."""
        check_whole("members", members)
        check_choice("initial", initial, get_args(Initial))
        check_choice("placement", placement, get_args(Placement))
        check_prunable(graph)
        generator = torch.Generator().manual_seed(stream(seed, "scales"))
        first, second = (float(number) for number in initial[2:-1].split(","))
        vectors = {}
        for name, size in graph.prunable.items():
            if initial.startswith("N"):
                vectors[name] = first + second * torch.randn(members, size, generator=generator)
            else:
                vectors[name] = first + (second - first) * torch.rand(members, size, generator=generator)
        return cls(vectors, placement)


@contextmanager
def scaled(
    model: nn.Module, graph: ChannelGraph, vectors: Mapping[str, Tensor], placement: Placement, together: bool = True
) -> Iterator[Callable[[Inputs], Tensor]]:
    """While this lasts, `model` runs under the vectors: its batches have the rows of member 0 first, then those of 1, …

    The number of rows must be a multiple of the number of members. Gradients reach the vectors. Gives the function that
    runs such a batch: in one pass, or not `together`, in one for each member, see `rows_stay_apart`.
    """
    members = len(next(iter(vectors.values())))
    turn = slice(None)  # whose vectors are used
    handles = []
    for name, output in graph.outputs.items():
        site = output.norm if placement == "norm" and output.norm is not None else name

        def scale(
            _module: nn.Module, _inputs: Any, result: Tensor, output: Output = output, site: str = site
        ) -> Tensor:
            if not isinstance(result, Tensor):
                kind = type(result).__name__
                raise TypeError(f"{site} returns a {kind}: a layer whose channels are chosen must return a tensor")
            return scale_rows(result, _along(output, vectors)[turn], output.dim)

        handles.append(model.get_submodule(site).register_forward_hook(scale))

    def run(rows: Inputs) -> Tensor:
        nonlocal turn
        if together:
            return _outputs(model, rows)
        parts = []
        for member, own in enumerate(pieces(rows, batch_size(rows) // members)):
            turn = slice(member, member + 1)
            parts.append(_outputs(model, own))
        turn = slice(None)
        return torch.cat(parts)

    try:
        yield run
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def rows_stay_apart(model: nn.Module, graph: ChannelGraph, placement: Placement, example: Inputs) -> bool:
    """Whether members can share a batch: in every scaled layer its rows come first, and in their order.

    A network that puts time before the batch, or runs two views of it one after the other, would mix up members.
    example: a few inputs (batch, …). Tried in evaluation mode; the model must be one that may be changed.
    """
    generator, device = torch.Generator().manual_seed(0), tensors_in(example)[0].device
    vectors = {
        name: (0.5 + torch.rand(2, size, generator=generator)).to(device, dtype_of(model))
        for name, size in graph.prunable.items()
    }
    model.eval()
    found = []
    for together in (True, False):
        with scaled(model, graph, vectors, placement, together) as run:
            try:
                found.append(run(joined([example, example])))
            except RuntimeError:
                if not together:
                    raise
                return False
    difference, size = (found[0] - found[1]).abs().max(), found[1].abs().max()
    return bool(difference <= 0.03 * size)  # rounding, in whatever precision; the vectors differ by half


def _outputs(model: nn.Module, rows: Inputs) -> Tensor:
    return one_tensor(call(model, rows))


def scale_rows(result: Tensor, factors: Tensor, dim: int) -> Tensor:
    """Multiply rows grouped by member, (members * rows, …), with `factors` (members, channels) along `dim`."""
    return (result.unflatten(0, (len(factors), -1)) * per_member(factors, result, dim)).flatten(0, 1)


def per_member(vectors: Tensor, like: Tensor, dim: int) -> Tensor:
    """Vectors (members, channels) in the shape that meets `like`, unflattened to (members, rows, …), along `dim`."""
    shape = [1] * (like.dim() + 1)
    shape[0], shape[dim] = vectors.shape
    return vectors.view(shape)


def _along(output: Output, vectors: Mapping[str, Tensor]) -> Tensor:
    """The vectors along a layer's output, shape (members, channels); one where the layer has other channels too."""
    example = next(iter(vectors.values()))
    pieces = []
    for span in output.axis:
        if span.group is None:
            pieces.append(example.new_ones(len(example), span.size * span.block))
        else:
            vector = vectors[span.group]
            pieces.append(vector if span.block == 1 else vector.repeat_interleave(span.block, dim=1))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def check_prunable(graph: ChannelGraph) -> None:
    if not graph.prunable:
        reasons = Counter(group.reason for group in graph.groups)
        listed = "; ".join(f"{reason} ({number} groups)" for reason, number in reasons.most_common(3))
        raise ValueError(f"the network has no prunable channels; print(trace(…)) shows why. Mostly: {listed}")
