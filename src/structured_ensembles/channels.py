"""trace(): which channels exist in a model, and every parameter axis each of them indexes.

The model's exported graph (`torch.export`, ATen operations) is followed operation by operation. Channels that have to
be kept or dropped together form a group; a group is offered for pruning only where the extracted network will compute
exactly what the full one computes without those channels, and every other group carries the reason why it is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves

from structured_ensembles.common.checks import check_type
from structured_ensembles.common.tables import text_table
from structured_ensembles.networks.copying import check_copyable
from structured_ensembles.networks.resizing import Axis, Span, kept_size, resize
from structured_ensembles.tracing.fake_model import Ghost, asks_for_its_mode, first_line
from structured_ensembles.tracing.layout import ChannelSet, Layout, channel_sets, fix, resolve
from structured_ensembles.tracing.trial import (
    ASSUMES,
    Counts,
    blame_module,
    blame_step,
    differences,
    find_failing,
    running_module,
    trial_counts,
)
from structured_ensembles.tracing.walk import Step, Walk

COUPLED = "coupled by a residual sum (trace(…, coupled=True) offers it)"


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that are kept or dropped one by one, in every layer that computes or reads them.

    name: the qualified name of the first layer that computes them (with `[start:stop]` where they are a part of its
        output).
    producers, consumers: the layers that compute them, and the layers that read them.
    reason: why the group cannot be pruned; None if it can.
    """

    name: str
    size: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    coupled: bool
    reason: str | None

    @property
    def prunable(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class Output:
    """A layer whose output scaling vectors scale.

    dim: the channel dimension of its output, counted from the end. axis: which groups its channels belong to.
    norm: the batch norm that alone reads the output, if there is one.
    """

    dim: int
    axis: Axis
    norm: str | None


@dataclass(frozen=True)
class ChannelGraph:
    """What `trace` found. `print(graph)` shows the groups as a table.

    groups: every group that some layer computes, in the order of the computation.
    axes: for every parameter and buffer, for each of its axes, the groups along it.
    outputs: the layers that compute prunable channels.
    parameters: which names in `axes` are parameters (the others are buffers).
    magnitudes: mean absolute weight of every channel of the prunable groups, when traced.
    output_shape: of the network's (first) output for the example.
    unnormalized: the layers whose output meets no normalisation before the next layer or the network's output.
    """

    groups: tuple[ChannelGroup, ...]
    axes: Mapping[str, tuple[Axis, ...]] = field(repr=False)
    outputs: Mapping[str, Output] = field(repr=False)
    parameters: frozenset[str] = field(repr=False)
    magnitudes: Mapping[str, Tensor] = field(repr=False, compare=False)
    output_shape: tuple[int, ...]
    unnormalized: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def prunable(self) -> dict[str, int]:
        """The groups that can be pruned: name and size."""
        return {group.name: group.size for group in self.groups if group.prunable}

    def num_parameters(self, counts: Mapping[str, int] | None = None) -> int:
        """How many parameters the network has when `counts[group]` channels of each group are left."""
        total = 0
        for name in self.parameters:
            entries = 1
            for axis in self.axes[name]:
                entries *= kept_size(axis, counts or {})
            total += entries
        return total

    def __getitem__(self, name: str) -> ChannelGroup:
        return next(group for group in self.groups if group.name == name)

    def __str__(self) -> str:
        rows = [
            (
                group.name,
                str(group.size),
                _shortened(group.producers),
                _shortened(group.consumers),
                group.reason or "yes",
            )
            for group in self.groups
        ]
        channels = sum(self.prunable.values())
        summary = f"{len(self.prunable)} of {len(self.groups)} groups can be pruned: {channels:,} channels"
        return text_table(("group", "size", "computed by", "read by", "prunable"), rows) + "\n" + summary


def trace(model: nn.Module, example: Any, coupled: bool = False) -> ChannelGraph:
    """Find the channels of `model` that can be removed, by following it on `example`.

    model: any module that `torch.export` can follow. It is not changed, whatever its mode, device or dtype; it is
        traced as it runs in evaluation mode (and in training mode too where that uses further parameters).
    example: an input batch such as the model takes; if it takes several, a tuple of positional or a dict of keyword
        arguments. Only shapes and dtypes matter.
    coupled: also offer the groups that residual sums couple; their producers then share one scaling vector.
    """
    check_type("model", model, nn.Module)
    inputs = example if isinstance(example, tuple | dict) else (example,)
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(inputs)):
        kind = type(example).__name__
        raise TypeError(f"example must be a tensor, or a tuple or dict of what the model takes, not {kind}")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise ValueError("model has lazy layers without weights: run it once before tracing")
    check_copyable(model)
    ghost = Ghost.of(model, inputs)
    walk = Walk(ghost.model)
    followed = _follow(walk, ghost)
    steps = [step for own in followed.values() for step in own]
    while True:
        offered, graph = _graph_of(walk, model, coupled)
        if all(_holds(graph, offered, counts, walk, ghost, followed) for counts in trial_counts(list(offered), steps)):
            return graph


def _follow(walk: Walk, ghost: Ghost) -> dict[bool, list[Step]]:
    """Follow the model in evaluation mode, and in training mode if that may be another network; the steps to try."""
    try:
        followed = {False: walk.follow(ghost.export(ghost.model))}
    except Exception as error:
        hint = " (Token ids stay whole numbers in Data.from_arrays(…, ids=True).)" if "indices" in str(error) else ""
        raise ValueError(
            f"the model cannot be followed on an example of shape {ghost.shapes}: either `example` is not what it "
            f"takes, or torch.export cannot follow its code. It says: {first_line(error)}{hint}"
        ) from error
    unused = {name for name, _ in ghost.model.named_parameters()} - walk.used  # auxiliary heads and the like
    if unused or asks_for_its_mode(ghost.model):
        try:
            steps = walk.follow(ghost.export(ghost.model, training=True))
            if unused:
                followed[True] = steps  # further layers, which the trial has to see
        except Exception as error:  # then nobody knows what training mode does to the channels
            for producer in walk.producers:
                fix(producer.channels, f"the model cannot be followed in training mode ({first_line(error)})")
    return followed


def _holds(
    graph: ChannelGraph,
    offered: dict[ChannelSet, str],
    counts: Counts,
    walk: Walk,
    ghost: Ghost,
    followed: dict[bool, list[Step]],
) -> bool:
    """Whether the model does what was predicted on fewer channels; if not, the channels to blame are fixed."""
    candidates = list(offered)

    def smaller(chosen: Iterable[ChannelSet]) -> nn.Module:
        return resize(ghost.model, graph.axes, {offered[channels]: counts[channels] for channels in chosen})

    for training, steps in followed.items() if candidates else ():
        small = smaller(candidates)
        with running_module(small) as running:
            try:
                tried = Walk(small).follow(ghost.export(small, training))
            except Exception as error:  # the model's own code fails, in whatever way it likes
                failing = find_failing(candidates, partial(_failure, ghost, smaller, training))
                for channels in failing:
                    channels.fixed = f"{ASSUMES}: {first_line(error)}"
                if not failing:
                    blame_module(walk, running[-1], candidates, first_line(error))
                return False
        found = differences(steps, tried, counts)
        for step in found:
            blame_step(walk, steps, step, candidates)
        if found:
            return False
    return True


def _failure(
    ghost: Ghost, smaller: Callable[[Iterable[ChannelSet]], nn.Module], training: bool, chosen: Iterable[ChannelSet]
) -> str | None:
    return ghost.failure(smaller(chosen), training)


def _graph_of(walk: Walk, model: nn.Module, coupled: bool) -> tuple[dict[ChannelSet, str], ChannelGraph]:
    """Name the groups; returns the prunable ones' channel sets with their names, and the graph."""
    names: dict[ChannelSet, str] = {}
    producers: dict[ChannelSet, list[int]] = {}
    for number, producer in enumerate(walk.producers):
        parts, start = channel_sets(producer.channels), 0
        for run in resolve(producer.channels):
            whole = producer.module if len(parts) == 1 else f"{producer.module}[{start}:{start + run.extent}]"
            names.setdefault(run.channels, whole)
            start += run.extent
        for channels in parts:
            producers.setdefault(channels, []).append(number)
    consumers: dict[ChannelSet, list[str]] = {}
    for module, layout in walk.consumers:
        for channels in channel_sets(layout):
            consumers.setdefault(channels, []).append(module)

    groups, offered = [], {}
    for channels, name in names.items():
        reason = channels.fixed
        if reason is None and channels.coupled and not coupled:
            reason = COUPLED
        if reason is None and channels.size == 1:
            reason = "a single channel"
        if reason is None:
            offered[channels] = name
        modules = tuple(dict.fromkeys(walk.producers[number].module for number in producers[channels]))
        readers = tuple(dict.fromkeys(consumers.get(channels, [])))
        groups.append(ChannelGroup(name, channels.size, modules, readers, channels.coupled, reason))

    def axis(layout: Layout, wanted: Mapping[ChannelSet, str] = offered) -> Axis:
        return tuple(Span(wanted.get(run.channels), run.channels.size, run.block) for run in resolve(layout))

    axes = {name: tuple(axis(dim) for dim in value.dims) for name, value in walk.parameters.items()}
    outputs = {}
    for number, producer in enumerate(walk.producers):
        scaled = {channels: name for channels, name in offered.items() if number in channels.heads}
        spans = axis(producer.channels, scaled)
        if any(span.group for span in spans):
            outputs[producer.module] = Output(producer.dim, spans, producer.norm)
    graph = ChannelGraph(
        groups=tuple(groups),
        axes=axes,
        outputs=outputs,
        parameters=frozenset(name for name, _ in model.named_parameters()),
        magnitudes=_magnitudes(model, outputs),
        output_shape=walk.output_shape or (),
        unnormalized=frozenset(producer.module for producer in walk.producers if not producer.normalized),
    )
    return offered, graph


def _magnitudes(model: nn.Module, outputs: Mapping[str, Output]) -> dict[str, Tensor]:
    """Mean absolute weight of each channel, averaged over the layers that compute it; one vector (size,) per group."""
    found: dict[str, list[Tensor]] = {}
    for module, output in outputs.items():
        layer = model.get_submodule(module)
        weight: Tensor = layer.weight.detach()  # type: ignore[union-attr, assignment, operator]
        own = 1 if isinstance(layer, nn.modules.conv._ConvTransposeNd) else 0
        others = [dim for dim in range(weight.dim()) if dim != own]
        norms = torch.linalg.vector_norm(weight, 1, dim=others).cpu() / (weight.numel() / weight.shape[own])
        pieces = norms.split([span.size * span.block for span in output.axis])
        for span, piece in zip(output.axis, pieces, strict=True):
            if span.group is not None:
                found.setdefault(span.group, []).append(piece.reshape(span.size, span.block).mean(1))
    return {group: torch.stack(parts).mean(0) for group, parts in found.items()}


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else "") if names else "–"
