"""Scales: the members' scaling vectors for each channel group, and running a model under them.

Member i of the ensemble sees the output of every prunable layer multiplied, channel by channel, with its own vector.
All members run in one pass: the rows of a batch are grouped by member, and multiplied with that member's vectors.
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
from structured_ensembles.common.inputs import (
    Inputs,
    batch_size,
    call,
    check_one_tensor,
    join_batches,
    split_batch,
    tensors_in,
)
from structured_ensembles.common.member_rows import scale_rows
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.tables import text_table
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.networks.resizing import Axis, NestedSpan

Initial = Literal["N(0,1)", "N(0,2)", "N(0,5)", "U(0,1)", "U(-1,1)", "N(1,0.1)"]  # the last for trained networks
Placement = Literal["output", "norm"]


@dataclass(frozen=True)
class Scales:
    """The scaling vectors of an ensemble.

    vectors: for each prunable group, shape (members, size).
    placement: what they scale: the layer's "output", or the "norm" that follows it (the output where there is none).
    statistics: the model's buffers after the search (batch norm's running statistics under the scales).
    history: one dictionary of figures per epoch of the search.
    """

    vectors: Mapping[str, Tensor]
    placement: Placement = "output"
    statistics: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    history: Sequence[Mapping[str, float]] = field(default=(), repr=False)

    def __str__(self) -> str:
        rows = [
            (
                name,
                f"{vector.shape[1]:,}",
                *(f"{float(value):.3f}" for value in (vector.min(), vector.mean(), vector.max())),
            )
            for name, vector in self.vectors.items()
        ]
        table = text_table(("group", "neurons", "least", "mean", "greatest"), rows)
        return f"{table}\n{self.members} scaling vectors for each group, on its {self.placement}"

    @property
    def members(self) -> int:
        """Return the number of members."""
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
        """Draw random vectors; in N(0,5) the second number is the standard deviation.

        A trained network survives "N(1,0.1)": its channels are scaled by about 1.
        """
        check_whole("members", members)
        check_settings(initial, placement)
        check_prunable(graph)
        generator = torch.Generator().manual_seed(derive_seed(seed, "scales"))
        first, second = (float(number) for number in initial[2:-1].split(","))
        vectors = {}
        for name, size in graph.prunable.items():
            if initial.startswith("N"):
                vectors[name] = first + second * torch.randn(members, size, generator=generator)
            else:
                vectors[name] = first + (second - first) * torch.rand(members, size, generator=generator)
        return cls(vectors, placement)


@contextmanager
def apply_scales(
    model: nn.Module, graph: ChannelGraph, vectors: Mapping[str, Tensor], placement: Placement, together: bool = True
) -> Iterator[Callable[[Inputs], Tensor]]:
    """Run `model` under the vectors while this lasts; yields a function that runs a batch.

    The batch has the rows of member 0 first, then those of member 1, …; their number must be a multiple of the number
    of members. Gradients reach the vectors.
    together: run all members in one pass; else in one pass per member, see `can_share_batches`.
    """
    members = len(next(iter(vectors.values())))
    active = slice(None)  # the members whose vectors are used
    handles = []
    for layer, output in scaled_layers(graph, placement):

        def scale(module: nn.Module, _inputs: Any, result: Any, output: Output = output, layer: str = layer) -> Any:
            if isinstance(module, nn.RNNBase):
                return _scale_recurrent(result, factors_along(output.axis, vectors)[active])
            if not isinstance(result, Tensor):
                returned = type(result).__name__
                raise TypeError(f"{layer} returns a {returned}: a layer whose channels are scaled must return a tensor")
            return scale_rows(result, factors_along(output.axis, vectors)[active], output.dim)

        handles.append(model.get_submodule(layer).register_forward_hook(scale))

    def run(rows: Inputs) -> Tensor:
        nonlocal active
        if together:
            return _run_model(model, rows)
        outputs = []
        for member, member_rows in enumerate(split_batch(rows, batch_size(rows) // members)):
            active = slice(member, member + 1)
            outputs.append(_run_model(model, member_rows))
        active = slice(None)
        return torch.cat(outputs)

    try:
        yield run
    finally:
        for handle in handles:
            handle.remove()


def scaled_layers(graph: ChannelGraph, placement: Placement) -> list[tuple[str, Output]]:
    """List the layers that vectors scale, by name, and what is scaled."""
    return [
        (output.norm if placement == "norm" and output.norm is not None else name, output)
        for name, output in graph.outputs.items()
    ]


@torch.no_grad()
def can_share_batches(model: nn.Module, graph: ChannelGraph, placement: Placement, example: Inputs) -> bool:
    """Tell whether members can share a batch: in every scaled layer its rows are the first axis, in their order.

    A network that puts time before the batch, or runs two views of it one after the other, would mix up members.
    example: a few inputs (batch, …). The model is tried in evaluation mode, and stays in it.
    """
    generator, device = torch.Generator().manual_seed(0), tensors_in(example)[0].device
    vectors = {
        name: (0.5 + torch.rand(2, size, generator=generator)).to(device, dtype_of(model))
        for name, size in graph.prunable.items()
    }
    model.eval()
    outputs = []
    for together in (True, False):
        with apply_scales(model, graph, vectors, placement, together) as run:
            try:
                outputs.append(run(join_batches([example, example])))
            except RuntimeError:
                if not together:
                    raise
                return False
    difference, size = (outputs[0] - outputs[1]).abs().max(), outputs[1].abs().max()
    return bool(difference <= 0.03 * size)  # rounding is below that in any precision; mixed-up members differ by half


def _run_model(model: nn.Module, rows: Inputs) -> Tensor:
    """Return the output of the model, which must be one tensor."""
    return check_one_tensor(call(model, rows))


def _scale_recurrent(result: tuple[Tensor, Any], factors: Tensor) -> tuple[Tensor, Any]:
    """Scale the outputs and the last hidden state of a recurrent layer; the state between its steps is not scaled.

    result: outputs (rows, steps, directions · units), rows grouped by member, and the hidden state
        (layers · directions, rows, units), or a pair of it and an LSTM's cell state.
    factors: (members, directions · units).
    """
    outputs, state = result
    hidden, *cell = state if isinstance(state, tuple) else (state,)
    members, units = len(factors), hidden.shape[-1]
    per_direction = factors.unflatten(1, (-1, units)).transpose(0, 1).unsqueeze(2)  # (directions, members, 1, units)
    grouped = hidden.reshape(-1, len(per_direction), members, hidden.shape[1] // members, units)
    hidden = (grouped * per_direction).reshape(hidden.shape)
    return scale_rows(outputs, factors, -1), (hidden, *cell) if isinstance(state, tuple) else hidden


def factors_along(axis: Axis, vectors: Mapping[str, Tensor]) -> Tensor:
    """Return the factors along an axis, (members, positions): those of its groups, multiplied where they are nested."""
    example = next(iter(vectors.values()))
    segments = []
    for span in axis:
        if span.group is None or span.group not in vectors:
            segment = example.new_ones(len(example), span.size * span.block)
        else:
            vector = vectors[span.group]
            segment = vector if span.block == 1 else vector.repeat_interleave(span.block, dim=1)
        if isinstance(span, NestedSpan):
            segment = segment * factors_along(span.within, vectors).repeat(1, span.size)
        segments.append(segment)
    return segments[0] if len(segments) == 1 else torch.cat(segments, dim=1)


def check_settings(initial: Initial, placement: Placement) -> None:
    """Raise a ValueError unless these are known."""
    check_choice("initial", initial, get_args(Initial))
    check_choice("placement", placement, get_args(Placement))


def check_scales(scales: Scales, graph: ChannelGraph) -> None:
    """Raise a ValueError unless the vectors are those of the graph's prunable groups, for equally many members."""
    check_choice("placement of scales", scales.placement, get_args(Placement))
    shapes = {name: tuple(vector.shape) for name, vector in scales.vectors.items()}
    members = next((shape[0] for shape in shapes.values() if shape), 0)
    if members == 0 or shapes != {name: (members, size) for name, size in graph.prunable.items()}:
        raise ValueError("scales do not belong to this graph: its prunable groups are others")


def check_prunable(graph: ChannelGraph) -> None:
    """Raise a ValueError, with the most common reasons, if the graph has no prunable channels."""
    if not graph.groups:
        raise ValueError(
            "the network has no prunable channels: no layers were found in its graph. Their code may run inside of "
            "torch.autocast (precision= of Execution does that for the whole network), or compute with bare parameters"
        )
    if not graph.prunable:
        reasons = Counter(group.reason for group in graph.groups)
        listed = "; ".join(f"{reason} ({counted(number, 'group')})" for reason, number in reasons.most_common(3))
        raise ValueError(f"the network has no prunable channels; print(trace(…)) shows why. Mostly: {listed}")
