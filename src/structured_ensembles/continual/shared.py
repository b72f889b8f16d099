"""SharedBackbone: one backbone whose neurons belong to tasks, as the structured and the pruning learner use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph, trace
from structured_ensembles.continual.freezing import find_past_entries, write_back
from structured_ensembles.continual.heads import TaskNetwork
from structured_ensembles.continual.masks import Owners
from structured_ensembles.extraction import extract
from structured_ensembles.networks.copying import clone_model
from structured_ensembles.networks.initialization import draw_weights
from structured_ensembles.networks.resizing import Attributes, Axis, Kept, Span, shrink
from structured_ensembles.scaling import check_prunable
from structured_ensembles.selection import Subnet

BACKBONE = "backbone."  # where a `TaskNetwork` has its backbone
Neurons = Mapping[str, Sequence[int]]  # neurons by group


@dataclass(frozen=True)
class TaskSubnetwork:
    """Network extracted from the backbone for a task, with its head.

    kept: its neurons. past: masks of the entries of its backbone that belong to past neurons.
    """

    network: TaskNetwork
    kept: Kept
    past: Mapping[str, Tensor]


class SharedBackbone:
    """Backbone with its channels and their owners.

    seal: see `freezing.write_back`. axes: of the backbone's tensors, by their names in it. attributes: the sizes that
        its layers keep as numbers. Both are known once it was traced.
    """

    def __init__(self, backbone: nn.Module, seal: bool) -> None:
        self.backbone = backbone
        self.seal = seal
        self.owners = Owners({})
        self.axes: Mapping[str, tuple[Axis, ...]] = {}
        self.attributes: Attributes = {}

    def copy(self) -> SharedBackbone:
        """Copy it, tensors included."""
        copied = SharedBackbone(clone_model(self.backbone), self.seal)
        # Shared: they are never changed in place.
        copied.owners, copied.axes, copied.attributes = self.owners, self.axes, self.attributes
        return copied

    def trace(self, head: nn.Module, example: Tensor) -> ChannelGraph:
        """Trace the channels of the backbone under a head, whose own are fixed.

        Before every task, since the graph has magnitudes of the weights, which the tasks before have changed.
        """
        graph = _fix_head_channels(trace(TaskNetwork(self.backbone, head), example, coupled=True, graphs=False))
        check_prunable(graph)
        self.axes = {
            name.removeprefix(BACKBONE): axes for name, axes in graph.axes.items() if name.startswith(BACKBONE)
        }
        self.attributes = {
            (name.removeprefix(BACKBONE), attribute): axis
            for (name, attribute), axis in graph.attributes.items()
            if name.startswith(BACKBONE)
        }
        if not self.owners.groups:
            self.owners = Owners.none(graph.prunable)
        return graph

    def network(self, stage: int, head: nn.Module) -> TaskNetwork:
        """Extract the network of the task at `stage` from the backbone, with its head."""
        return TaskNetwork(shrink(self.backbone, self.axes, self.owners.used(stage), self.attributes), head)

    def cut(self, network: TaskNetwork, graph: ChannelGraph, chosen: Neurons) -> TaskSubnetwork:
        """Extract past and chosen neurons from a network of the same structure; shrink the head's inputs to them."""
        kept = {name: tuple(sorted({*self._past(name), *chosen.get(name, ())})) for name in graph.prunable}
        extracted = extract(network, graph, Subnet(tuple((name, graph.prunable[name], kept[name]) for name in kept)))
        assert isinstance(extracted, TaskNetwork)
        return TaskSubnetwork(extracted, kept, find_past_entries(extracted.backbone, self.axes, self.owners, kept))

    def copy_into(self, backbone: nn.Module, subnetwork: TaskSubnetwork) -> None:
        """Write the trained new neurons of a subnetwork into a full backbone."""
        write_back(
            backbone, subnetwork.network.backbone, self.axes, self.owners, subnetwork.kept, subnetwork.past, self.seal
        )

    def commit(self, subnetwork: TaskSubnetwork, stage: int, chosen: Neurons) -> None:
        """Store the chosen, trained neurons and make `stage` their owner."""
        self.copy_into(self.backbone, subnetwork)
        self.owners = self.owners.give(stage, chosen)

    def redraw(self, seed: int) -> None:
        """Reinitialise the weights of the free neurons, but not those that no task may train."""
        fresh = clone_model(self.backbone)
        draw_weights(fresh, seed)
        for name, parameter in self.backbone.named_parameters():
            if not parameter.requires_grad:
                fresh.get_parameter(name).data.copy_(parameter)
        all_neurons = {name: tuple(range(len(owners))) for name, owners in self.owners.groups.items()}
        past = find_past_entries(fresh, self.axes, self.owners, all_neurons)
        write_back(self.backbone, fresh, self.axes, self.owners, all_neurons, past, seal=False)

    def _past(self, group: str) -> tuple[int, ...]:
        """Return the neurons of a group that a task owns."""
        return tuple(torch.nonzero(self.owners.groups[group] >= 0).flatten().tolist())


def _fix_head_channels(graph: ChannelGraph) -> ChannelGraph:
    """Return the graph with the groups of the head fixed, as they belong to one task."""
    head_groups = {group.name for group in graph.groups if not group.name.startswith(BACKBONE)}

    def without_head(axis: Axis) -> Axis:
        return tuple(
            Span(None, span.size, span.block) if span.group in head_groups else span for span in axis
        )  # trace does not nest groups here

    return replace(
        graph,
        groups=tuple(
            replace(group, reason=group.reason or "belongs to the head") if group.name in head_groups else group
            for group in graph.groups
        ),
        axes={name: tuple(map(without_head, axes)) for name, axes in graph.axes.items()},
        outputs={name: output for name, output in graph.outputs.items() if name.startswith(BACKBONE)},
        magnitudes={name: value for name, value in graph.magnitudes.items() if name not in head_groups},
    )
