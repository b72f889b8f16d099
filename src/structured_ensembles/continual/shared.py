"""SharedBackbone: one backbone whose neurons belong to tasks; what the structured and the pruning learner stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph, trace
from structured_ensembles.continual.freezing import past_entries, write_back
from structured_ensembles.continual.heads import TaskNetwork
from structured_ensembles.continual.masks import Owners
from structured_ensembles.extraction import extract
from structured_ensembles.networks.copying import clone_of
from structured_ensembles.networks.initialization import draw_weights
from structured_ensembles.networks.resizing import Axis, Kept, shrink
from structured_ensembles.scaling import check_prunable
from structured_ensembles.selection import Subnet

BACKBONE = "backbone."  # where a `TaskNetwork` has its backbone
Chosen = Mapping[str, Sequence[int]]  # neurons by group


@dataclass(frozen=True)
class Part:
    """What was cut out of the backbone for a task, with its head.

    kept: its neurons. past: which entries of its backbone belong to past neurons.
    """

    network: TaskNetwork
    kept: Kept
    past: Mapping[str, Tensor]


class SharedBackbone:
    """A backbone, its channels, and who owns them.

    seal: see `freezing.write_back`.
    """

    def __init__(self, backbone: nn.Module, seal: bool) -> None:
        self.backbone = backbone
        self.seal = seal
        self.owners = Owners({})
        self._graphs: dict[int, ChannelGraph] = {}  # by the number of classes of the head

    def copy(self) -> SharedBackbone:
        """Copy it, with tensors of its own."""
        copied = SharedBackbone(clone_of(self.backbone), self.seal)
        copied.owners, copied._graphs = self.owners, dict(self._graphs)  # which nothing changes in place
        return copied

    def graph(self, head: nn.Module, classes: int, example: Tensor) -> ChannelGraph:
        """The channels of the backbone under a head of so many classes; those of the head itself are fixed."""
        if classes not in self._graphs:
            network = TaskNetwork(self.backbone, head)
            self._graphs[classes] = _backbone_channels(trace(network, example, coupled=True))
        graph = self._graphs[classes]
        check_prunable(graph)
        if not self.owners.groups:
            self.owners = Owners.none(graph.prunable)
        return graph

    @property
    def axes(self) -> dict[str, tuple[Axis, ...]]:
        """Of the tensors of the backbone, by their names in it."""
        graph = next(iter(self._graphs.values()))
        return {name.removeprefix(BACKBONE): axes for name, axes in graph.axes.items() if name.startswith(BACKBONE)}

    def network(self, stage: int, head: nn.Module) -> TaskNetwork:
        """The network of the task at `stage`, cut out of the backbone, with its head."""
        return TaskNetwork(shrink(self.backbone, self.axes, self.owners.used(stage)), head)

    def cut(self, network: TaskNetwork, graph: ChannelGraph, chosen: Chosen) -> Part:
        """Cut the past and the chosen neurons out of a network like the shared one, and the head to what they feed."""
        kept = {name: tuple(sorted({*self._past(name), *chosen.get(name, ())})) for name in graph.prunable}
        small = extract(network, graph, Subnet(tuple((name, graph.prunable[name], kept[name]) for name in kept)))
        assert isinstance(small, TaskNetwork)
        return Part(small, kept, past_entries(small.backbone, self.axes, self.owners, kept))

    def copy_into(self, backbone: nn.Module, part: Part) -> None:
        """Write what the new neurons of a part have learned into a whole backbone."""
        write_back(backbone, part.network.backbone, self.axes, self.owners, part.kept, part.past, self.seal)

    def commit(self, part: Part, stage: int, chosen: Chosen) -> None:
        """Keep what the chosen neurons have learned; they belong to `stage` from now on."""
        self.copy_into(self.backbone, part)
        self.owners = self.owners.give(stage, chosen)

    def redraw(self, seed: int) -> None:
        """Draw the weights of the free neurons anew."""
        fresh = clone_of(self.backbone)
        draw_weights(fresh, seed)
        everything = {name: tuple(range(len(own))) for name, own in self.owners.groups.items()}
        past = past_entries(fresh, self.axes, self.owners, everything)
        write_back(self.backbone, fresh, self.axes, self.owners, everything, past, seal=False)

    def _past(self, group: str) -> tuple[int, ...]:
        return tuple(torch.nonzero(self.owners.groups[group] >= 0).flatten().tolist())


def _backbone_channels(graph: ChannelGraph) -> ChannelGraph:
    """The graph with the groups of the head fixed: they belong to one task anyway."""
    own = {group.name for group in graph.groups if not group.name.startswith(BACKBONE)}

    def without(axis: Axis) -> Axis:
        return tuple(span._replace(group=None) if span.group in own else span for span in axis)

    return replace(
        graph,
        groups=tuple(
            replace(group, reason=group.reason or "belongs to the head") if group.name in own else group
            for group in graph.groups
        ),
        axes={name: tuple(map(without, axes)) for name, axes in graph.axes.items()},
        outputs={name: output for name, output in graph.outputs.items() if name.startswith(BACKBONE)},
        magnitudes={name: value for name, value in graph.magnitudes.items() if name not in own},
    )
