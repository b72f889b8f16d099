"""extract(): cut a sub-network out of a network."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from structured_ensembles.channels import ChannelGraph, check_traced, example_inputs, trace
from structured_ensembles.common.checks import check_flags, check_seed, check_type
from structured_ensembles.common.plurals import counted
from structured_ensembles.networks.graph_network import GraphNetwork
from structured_ensembles.networks.initialization import draw_weights
from structured_ensembles.networks.provenance import copy_origin, record_base_shapes
from structured_ensembles.networks.resizing import kept_size, shrink
from structured_ensembles.selection import Subnet

SMALL_OUTPUTS = 0.1  # warn if members' outputs are expected to start below this share of the full network's


def extract(
    model: nn.Module,
    graph: ChannelGraph,
    subnet: Subnet,
    *,
    reinit: bool = False,
    seed: int = 0,
    rescale: bool = False,
) -> nn.Module:
    """Build the network that has only the channels of `subnet`: an ordinary module with its own copy of the weights.

    Its outputs are those of `model` with the outgoing weights of every other channel set to zero, unless `rescale`. The
    model is not changed. If the subnet lacks channels that the model's code relies on, the result runs the model's
    exported graph instead of its code, see networks/graph_network.py. A ValueError is raised if the code branches on a
    size, so that it does something else with as many channels as the subnet keeps.

    reinit: draw new weights instead of inheriting the model's: by its own `reset_parameters()` if it has one, else by
        that of each layer; with `seed`.
    rescale: multiply the inherited weights of every linear layer and convolution that lost inputs by
        √(full fan-in / kept fan-in); biases and norms stay as they are. Weights were drawn for the full fan-in:
        without norms, activations shrink from layer to layer (logits of a VGG11 at prune=0.8 from a deviation
        of 5 to 0.0009), and training starts far behind a network of that size with newly drawn weights.
    """
    check_type("model", model, nn.Module)
    check_type("graph", graph, ChannelGraph, "trace(model, example) gives one")
    seed = check_seed(seed)
    check_rescale(rescale, reinit)
    check_type("subnet", subnet, Subnet, "select(graph, …) gives a list of them")
    for name, size, kept in subnet.groups:
        if graph.prunable.get(name) != size:
            raise ValueError(
                f"subnet does not belong to this graph: it has no prunable group {name!r} of {counted(size, 'channel')}"
            )
        if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < size:
            raise ValueError(f"subnet keeps channels {kept} of {name!r}: they must be ascending, from 0 to {size - 1}")
    check_traced(model, graph)
    _check_code(graph, subnet)
    small = shrink(model, graph.axes, subnet.kept, graph.attributes)
    if reinit:
        draw_weights(small, seed)
    if rescale:
        with torch.no_grad():
            for name, share in kept_fan_in(model, graph, subnet.counts).items():
                small.get_submodule(name).weight.mul_(share**-0.5)  # type: ignore[operator, union-attr]
    return make_graph_network(model, graph, subnet, small) if is_cut_in_graph(graph, subnet) else small


def _check_code(graph: ChannelGraph, subnet: Subnet) -> None:
    """Raise a ValueError if the network's code does something else with as many channels as the subnet keeps."""
    cut = {name: len(kept) for name, size, kept in subnet.groups if len(kept) < size}
    failure = graph.trial.failure(cut) if graph.trial is not None and cut else None
    if failure is not None:
        raise ValueError(
            "the model's code does something else with as many channels as subnet keeps, so that the extracted network "
            f"would not be a part of the model: {failure}. Another share of channels (prune) may be possible"
        )


def is_cut_in_graph(graph: ChannelGraph, subnet: Subnet) -> bool:
    """Tell whether a subnet lacks channels that the network's code cannot lose, but its exported graph can."""
    in_graph = {group.name for group in graph.groups if group.prunable and group.in_code is not None}
    return any(name in in_graph and len(kept) < size for name, size, kept in subnet.groups)


def make_graph_network(model: nn.Module, graph: ChannelGraph, subnet: Subnet, small: nn.Module) -> GraphNetwork:
    """Make the network that runs the exported graph of `model`, cut to the subnet, with the weights of `small`."""
    graphs = {training: template.cut(subnet.counts) for training, template in graph.templates.items()}
    network = GraphNetwork(small, graphs[False], graphs[True], {"subnet": subnet.to_json(), **graph.origin})
    record_base_shapes(network, model)
    copy_origin(network, model)
    return network


def rebuild_graph_network(base: nn.Module, record: Mapping[str, Any]) -> GraphNetwork:
    """Cut a network in its graph once more, by the record of one that was; raise a ValueError if they do not fit.

    base: the full network, or another one that was cut from it with as many channels of each group.
    record: `GraphNetwork.record`, as read from a file.
    """
    subnet = Subnet.from_json(record["subnet"])
    if isinstance(base, GraphNetwork):
        if Subnet.from_json(base.record["subnet"]).counts != subnet.counts:
            raise ValueError("the given member has other numbers of channels: give the full network as model=")
        return GraphNetwork(base, base.graphs[False], base.graphs[True], record)
    if record.get("example") is None:
        raise ValueError(
            "the file does not say on what inputs its network was traced: give one of its members as model="
        )
    options = {name: record["options"][name] for name in ("coupled", "approximate", "nested", "graphs")}
    graph = trace(base, example_inputs(record["example"]), **options)
    network = extract(base, graph, subnet)
    if not isinstance(network, GraphNetwork):
        raise ValueError("the network's code can be cut, but the file has one that was cut in its graph")
    return network


def kept_fan_in(model: nn.Module, graph: ChannelGraph, counts: Mapping[str, int]) -> dict[str, float]:
    """Compute the kept share of the fan-in of every linear layer and convolution that loses inputs, by name.

    counts: how many channels of each group are left. A depthwise convolution loses filters, but no inputs of a filter.
    """
    shares = {}
    for name, module in model.named_modules():
        axes = graph.axes.get(f"{name}.weight" if name else "weight")
        if axes is None or not isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            continue
        input_axis = axes[0 if isinstance(module, nn.modules.conv._ConvTransposeNd) else 1]
        share = kept_size(input_axis, counts) / kept_size(input_axis, {})
        if share < 1:
            shares[name] = share
    return shares


def check_rescale(rescale: bool, reinit: bool) -> None:
    """Raise an error unless both are True or False, or if there are no inherited weights to rescale."""
    check_flags(rescale=rescale, reinit=reinit)
    if rescale and reinit:
        raise ValueError(
            "rescale=True must not be given together with reinit=True: it is for inherited weights, and new ones are "
            "drawn for the fan-in that is left"
        )


def warn_of_small_outputs(model: nn.Module, graph: ChannelGraph, subnets: Sequence[Subnet]) -> None:
    """Warn, once for all members, if inherited weights make their outputs start far below the full network's.

    A layer that keeps a share of its inputs, with no norm behind it, is expected to scale its output by the root of the
    share.
    """
    output_scales = [_expected_scale(model, graph, subnet.counts) for subnet in subnets]
    if min(output_scales) < SMALL_OUTPUTS:
        warnings.warn(
            "the members inherit weights that were drawn for more inputs, and no norm follows the layers that "
            f"were cut: their outputs start at about {min(output_scales):.1g} of the full network's. rescale=True "
            "makes up for it, reinit=True draws new weights",
            stacklevel=3,
        )


def _expected_scale(model: nn.Module, graph: ChannelGraph, counts: Mapping[str, int]) -> float:
    """Estimate the scale of a member's outputs, relative to the full network's."""
    shares = kept_fan_in(model, graph, counts)
    return math.prod(share**0.5 for name, share in shares.items() if name in graph.unnormalized)
