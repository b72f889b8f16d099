"""extract(): cut a sub-network out of a network."""

from torch import nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.checks import check_type, checked_seed
from structured_ensembles.initialization import draw_weights
from structured_ensembles.selection import Subnet
from structured_ensembles.shrinking import shrink


def extract(model: nn.Module, graph: ChannelGraph, subnet: Subnet, *, reinit: bool = False, seed: int = 0) -> nn.Module:
    """The network that has only the channels of `subnet`: an ordinary module with weights of its own.

    Its outputs are those of `model` with the outgoing weights of every other channel set to zero. The model is not
    changed.

    reinit: draw new weights instead of inheriting the model's: by its own `reset_parameters()` if it has one, else by
        that of each layer; with `seed`.
    """
    check_type("model", model, nn.Module)
    check_type("graph", graph, ChannelGraph, "trace(model, example) gives one")
    seed = checked_seed(seed)
    check_type("subnet", subnet, Subnet, "select(graph, …) gives a list of them")
    for name, size, kept in subnet.groups:
        if graph.prunable.get(name) != size:
            raise ValueError(
                f"subnet does not belong to this graph: it has no prunable group {name!r} of {size} channels"
            )
        if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < size:
            raise ValueError(f"subnet keeps channels {kept} of {name!r}: they must be ascending, from 0 to {size - 1}")
    for name, parameter in model.named_parameters():
        expected = [sum(span.size * span.block for span in axis) for axis in graph.axes.get(name, ())]
        if list(parameter.shape) != expected:
            raise ValueError(f"graph was traced from another model: {name} has shape {tuple(parameter.shape)} here")
    small = shrink(model, graph.axes, subnet.kept)
    if reinit:
        draw_weights(small, seed)
    return small
