"""trace(): which channels exist in a model, and every parameter axis each of them indexes.

The model's exported graph (`torch.export`, ATen operations) is followed operation by operation. Channels that must be
kept or dropped together form a group. A group is offered for pruning only if the extracted network will compute exactly
what the full one computes without those channels; every other group carries the reason why it is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from structured_ensembles.common.checks import check_choice, check_flags, check_type
from structured_ensembles.common.exports import exclusive_export, without_garbage_collection
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.tables import text_table
from structured_ensembles.networks.copyable import check_copyable
from structured_ensembles.networks.resizing import Attributes, Axis, channel_indices, groups_along, kept_size
from structured_ensembles.tracing.code_trial import CodeTrial
from structured_ensembles.tracing.fake_model import FakeModel
from structured_ensembles.tracing.grouping import NamedSet, axis_of
from structured_ensembles.tracing.layout import ChannelSet, Layout, channel_sets
from structured_ensembles.tracing.offers import Offers, find_offers
from structured_ensembles.tracing.templates import Template
from structured_ensembles.tracing.walk import Walk

Nested = Literal["finest", "all"]
LARGEST_SIZE = 2**40  # of a dimension of an example
DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


@dataclass(frozen=True)
class ChannelGroup:
    """A set of channels, each of which is kept or dropped in all layers that compute or read it.

    name: the qualified name of the first layer that computes them, with `[start:stop]` if they are a slice of its
        output.
    producers, consumers: the layers that compute them, and the layers that read them.
    reason: why the group cannot be pruned; None if it can.
    in_code: why cutting the group means cutting the network's graph instead of its code; None if the code can be cut.
    products: the modules that sum over products of two activations with these channels, such as queries and keys.
    approximate: whether a norm or a mean runs over the channels, so that removing some changes the others.
    """

    name: str
    size: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    coupled: bool
    reason: str | None
    in_code: str | None = None
    approximate: bool = False
    products: tuple[str, ...] = ()

    @property
    def prunable(self) -> bool:
        """Tell whether channels of the group can be removed."""
        return self.reason is None


@dataclass(frozen=True)
class Output:
    """Output of a layer that scaling vectors multiply.

    dim: the channel dimension, counted from the end. axis: which groups the channels belong to.
    norm: the name of the batch norm that reads the output, if nothing else does.
    """

    dim: int
    axis: Axis
    norm: str | None


@dataclass(frozen=True)
class ChannelGraph:
    """Result of `trace`: the channel groups of a model. `print(graph)` shows them as a table.

    groups: every group that some layer computes, in the order of computation.
    axes: for every parameter and buffer, for each of its axes, the groups along it.
    outputs: the layers that compute prunable channels.
    parameters: which names in `axes` are parameters (the others are buffers).
    magnitudes: mean absolute weight of every channel of the prunable groups, at the time of tracing.
    output_shape: shape of the network's (first) output for the example.
    unnormalized: the layers whose output passes no norm layer before the next layer or the network's output.
    attributes: sizes that layers keep as numbers which their tensors do not tell, such as the groups of a convolution.
    origin: the example's shapes and dtypes and the options of `trace`, as JSON values.
    templates: the network's graphs in evaluation mode (False) and training mode (True), if some group is cut in them.
    trial: tries the network's code with any numbers of channels, if it is the code that is cut.
    """

    groups: tuple[ChannelGroup, ...]
    axes: Mapping[str, tuple[Axis, ...]] = field(repr=False)
    outputs: Mapping[str, Output] = field(repr=False)
    parameters: frozenset[str] = field(repr=False)
    magnitudes: Mapping[str, Tensor] = field(repr=False, compare=False)
    output_shape: tuple[int, ...]
    unnormalized: frozenset[str] = field(default=frozenset(), repr=False)
    attributes: Attributes = field(default_factory=dict, repr=False)
    origin: Mapping[str, Any] = field(default_factory=dict, repr=False)
    templates: Mapping[bool, Template] = field(default_factory=dict, repr=False, compare=False)
    trial: CodeTrial | None = field(default=None, repr=False, compare=False)

    @property
    def prunable(self) -> dict[str, int]:
        """Return the sizes of the groups that can be pruned, by name."""
        return {group.name: group.size for group in self.groups if group.prunable}

    def num_parameters(self, counts: Mapping[str, int] | None = None) -> int:
        """Count the parameters of the network when `counts[group]` channels of each group are left."""
        total = 0
        for name in self.parameters:
            elements = 1
            for axis in self.axes[name]:
                elements *= kept_size(axis, counts or {})
            total += elements
        return total

    def __getitem__(self, name: str) -> ChannelGroup:
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"there is no group {name!r}: print(graph) lists all of them")

    def __str__(self) -> str:
        rows = [
            (
                group.name,
                str(group.size),
                _shorten(group.producers),
                _shorten((*group.consumers, *(f"{module} (product)" for module in group.products))),
                group.reason or _format_prunable(group),
            )
            for group in self.groups
        ]
        channels = sum(self.prunable.values())
        summary = f"{len(self.prunable)} of {counted(len(self.groups), 'group')} can be pruned"
        summary += f": {counted(channels, 'channel')}"
        if any(group.prunable and group.in_code for group in self.groups):
            summary += "\nmembers run the network's exported graph where a group is cut in it"
        return text_table(("group", "size", "computed by", "read by", "prunable"), rows) + "\n" + summary


def trace(
    model: nn.Module,
    example: Any,
    coupled: bool = False,
    approximate: bool = False,
    nested: Nested = "finest",
    graphs: bool = True,
) -> ChannelGraph:
    """Find the channels of `model` that can be removed, by following it on `example`.

    model: any module that `torch.export` can export, in any mode, on any device, of any dtype. It is not changed. It is
        traced in evaluation mode (and in training mode too if that uses further parameters).
    example: a batch of inputs; for a model with several inputs, a tuple of positional or a dict of keyword arguments.
        Only shapes and dtypes matter.
    coupled: also offer the groups that residual sums couple; their producers then share one scaling vector.
    approximate: also offer the groups over which a layer norm, a group norm or a mean runs. Removing one of their
        channels changes the others, so that a member is no longer exactly a part of the network: for trained networks
        whose members are tuned afterwards.
    nested: of channels in groups (grouped convolutions, the features of attention heads), offer the "finest": the
        larger of the two numbers, so that half of the channels are left at prune=0.5; or "all": whole groups or heads
        and the channels within them, of which a quarter is left then.
    graphs: also offer groups that the model's code cannot lose, as it relies on their sizes, but its exported graph
        can; members are then networks that run that graph.
    """
    check_type("model", model, nn.Module)
    check_flags(coupled=coupled, approximate=approximate, graphs=graphs)
    check_choice("nested", nested, get_args(Nested))
    inputs = example if isinstance(example, tuple | dict) else (example,)
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(inputs)):
        name = type(example).__name__
        raise TypeError(f"example must be a tensor, or a tuple or dict of what the model takes, not {name}")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise ValueError("model has lazy layers without weights: run it once before tracing")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "model has parameters on the meta device, which have no values: make it on a real device, or call "
            "model.to_empty(device='cpu') and load its weights"
        )
    check_copyable(model)
    with exclusive_export(), without_garbage_collection():
        offers = find_offers(FakeModel.of(model, inputs), coupled, approximate, nested == "all", graphs)
    options = {"coupled": coupled, "approximate": approximate, "nested": nested, "graphs": graphs}
    return _build_graph(model, offers, {"example": describe_inputs(inputs), "options": options})


def check_traced(model: nn.Module, graph: ChannelGraph) -> None:
    """Raise a ValueError unless the parameters of `model` have the names and shapes of those that were traced."""
    for name, parameter in model.named_parameters():
        expected = [sum(span.size * span.block for span in axis) for axis in graph.axes.get(name, ())]
        if list(parameter.shape) != expected:
            raise ValueError(f"graph was traced from another model: {name} has shape {tuple(parameter.shape)} here")


def describe_inputs(inputs: Any) -> Any:
    """Write the shapes and dtypes of inputs as JSON values, for `example_inputs`; None for inputs of another kind."""
    values = inputs.values() if isinstance(inputs, dict) else inputs
    if not all(isinstance(value, Tensor) for value in values):
        return None
    described = [[list(value.shape), str(value.dtype).removeprefix("torch.")] for value in values]
    return dict(zip(inputs, described, strict=True)) if isinstance(inputs, dict) else described


def example_inputs(described: Any) -> Any:
    """Make inputs of the shapes and dtypes that `describe_inputs` wrote, on the meta device: without memory.

    Raises a ValueError for anything else, such as a value of a forged file.
    """
    values = list(described.values()) if isinstance(described, dict) else described
    try:
        tensors = []
        for shape, dtype in values:
            if not all(type(size) is int and 0 <= size < LARGEST_SIZE for size in shape) or len(shape) > 16:
                raise ValueError(f"no shape of an input: {shape!r:.100}")
            tensors.append(torch.empty(shape, dtype=DTYPES[dtype], device="meta"))
    except (TypeError, KeyError, RuntimeError) as error:
        raise ValueError(f"these are no shapes and dtypes of inputs: {described!r:.100}") from error
    return dict(zip(described, tensors, strict=True)) if isinstance(described, dict) else tuple(tensors)


def _build_graph(model: nn.Module, offers: Offers, origin: Mapping[str, Any]) -> ChannelGraph:
    """Write what was found about channel sets as groups by name."""
    walk, offered = offers.walk, offers.names
    consumers, products = _modules_by_set(walk.consumers), _modules_by_set(walk.products)
    axes = {name: tuple(axis_of(dim, offered) for dim in value.dims) for name, value in walk.parameters.items()}
    outputs = {}
    for number, producer in enumerate(walk.producers):
        scaled = {channels: name for channels, name in offered.items() if number in channels.heads}
        axis = axis_of(producer.channels, scaled)
        if producer.scaled and groups_along(axis):
            outputs[producer.module] = Output(producer.dim, axis, producer.norm)
    return ChannelGraph(
        groups=tuple(_make_group(named, walk, consumers, products) for named in offers.sets),
        axes=axes,
        outputs=outputs,
        parameters=frozenset(name for name, _ in model.named_parameters()),
        magnitudes=_magnitudes(model, axes, offers),
        output_shape=offers.output_shape,
        unnormalized=frozenset(producer.module for producer in walk.producers if not producer.normalized),
        attributes={key: axis_of(layout, offered) for key, layout in walk.attributes.items()},
        origin=origin,
        templates=offers.templates,
        trial=offers.trial,
    )


ModulesBySet = dict[ChannelSet, tuple[str, ...]]


def _modules_by_set(pairs: Sequence[tuple[str, Layout]]) -> ModulesBySet:
    """Collect the modules that are named with each channel set, without repetition."""
    modules: dict[ChannelSet, list[str]] = {}
    for module, layout in pairs:
        for channels in channel_sets(layout):
            modules.setdefault(channels, []).append(module)
    return {channels: tuple(dict.fromkeys(names)) for channels, names in modules.items()}


def _make_group(named: NamedSet, walk: Walk, consumers: ModulesBySet, products: ModulesBySet) -> ChannelGroup:
    """Describe a channel set by the names of layers."""
    return ChannelGroup(
        name=named.name,
        size=named.size,
        producers=tuple(dict.fromkeys(walk.producers[number].module for number in named.producers)),
        consumers=consumers.get(named.channels, ()),
        coupled=named.channels.coupled,
        reason=named.reason,
        in_code=named.channels.in_code,
        approximate=named.channels.mixed is not None,
        products=products.get(named.channels, ()),
    )


def _magnitudes(model: nn.Module, axes: Mapping[str, Sequence[Axis]], offers: Offers) -> dict[str, Tensor]:
    """Average the absolute weights of each channel over the layers that compute it; one vector (size,) per group."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sizes = {name: channels.size for channels, name in offers.names.items()}
    magnitudes: dict[str, list[Tensor]] = {}
    for producer in offers.walk.producers:
        if producer.weight is None:
            continue
        weight, weight_axes = parameters[producer.weight].detach(), axes[producer.weight]
        # The groups of a grouped transposed convolution are not along the dimension of its output channels.
        dims = sorted(range(weight.dim()), key=lambda dim: dim != producer.weight_dim)
        for group in groups_along(axis_of(producer.channels, offers.names)):
            dim = next((dim for dim in dims if group in groups_along(weight_axes[dim])), None)
            if dim is not None:
                magnitudes.setdefault(group, []).append(
                    _mean_per_channel(weight, dim, channel_indices(weight_axes[dim], group), sizes[group])
                )
    return {group: torch.stack(magnitudes[group]).mean(0) for group in offers.names.values()}


def _mean_per_channel(weight: Tensor, dim: int, indices: np.ndarray, size: int) -> Tensor:
    """Average the absolute weights of each channel, (size,); `indices` has the channel of each position of `dim`."""
    other_dims = [candidate for candidate in range(weight.dim()) if candidate != dim]
    norms = torch.linalg.vector_norm(weight, 1, dim=other_dims) if other_dims else weight.abs()
    means = norms.cpu() / (weight.numel() / weight.shape[dim])
    channels = torch.from_numpy(indices)
    counts = torch.bincount(channels[channels >= 0], minlength=size)
    return torch.zeros(size, dtype=means.dtype).index_add_(0, channels[channels >= 0], means[channels >= 0]) / counts


def _format_prunable(group: ChannelGroup) -> str:
    """Say how a prunable group is cut."""
    answer = "yes" if group.in_code is None else "yes, in the graph"
    return f"{answer}, not exact" if group.approximate else answer


def _shorten(names: Sequence[str]) -> str:
    """Join the first two names and the number of the others."""
    return ", ".join(names[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else "") if names else "–"
