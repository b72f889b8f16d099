"""trace(): which channels exist in a model, and every parameter axis each of them indexes.

The model's exported graph (`torch.export`, ATen operations) is followed operation by operation. Channels that must be
kept or dropped together form a group. A group is offered for pruning only if the extracted network will compute exactly
what the full one computes without those channels; every other group carries the reason why it is fixed.
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
from structured_ensembles.tracing.fake_model import FakeModel, first_line, reads_training_flag
from structured_ensembles.tracing.layout import ChannelSet, Layout, channel_sets, fix, resolve
from structured_ensembles.tracing.trial import (
    ASSUMES,
    Counts,
    blame_module,
    blame_step,
    differences,
    find_failing,
    track_running_module,
    trial_counts,
)
from structured_ensembles.tracing.walk import Step, Walk

COUPLED = "coupled by a residual sum (trace(…, coupled=True) offers it)"


@dataclass(frozen=True)
class ChannelGroup:
    """A set of channels, each of which is kept or dropped in all layers that compute or read it.

    name: the qualified name of the first layer that computes them, with `[start:stop]` if they are a slice of its
        output.
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
        return next(group for group in self.groups if group.name == name)

    def __str__(self) -> str:
        rows = [
            (
                group.name,
                str(group.size),
                _shorten(group.producers),
                _shorten(group.consumers),
                group.reason or "yes",
            )
            for group in self.groups
        ]
        channels = sum(self.prunable.values())
        summary = f"{len(self.prunable)} of {len(self.groups)} groups can be pruned: {channels:,} channels"
        return text_table(("group", "size", "computed by", "read by", "prunable"), rows) + "\n" + summary


def trace(model: nn.Module, example: Any, coupled: bool = False) -> ChannelGraph:
    """Find the channels of `model` that can be removed, by following it on `example`.

    model: any module that `torch.export` can export, in any mode, on any device, of any dtype. It is not changed. It is
        traced in evaluation mode (and in training mode too if that uses further parameters).
    example: a batch of inputs; for a model with several inputs, a tuple of positional or a dict of keyword arguments.
        Only shapes and dtypes matter.
    coupled: also offer the groups that residual sums couple; their producers then share one scaling vector.
    """
    check_type("model", model, nn.Module)
    inputs = example if isinstance(example, tuple | dict) else (example,)
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(inputs)):
        name = type(example).__name__
        raise TypeError(f"example must be a tensor, or a tuple or dict of what the model takes, not {name}")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise ValueError("model has lazy layers without weights: run it once before tracing")
    check_copyable(model)
    fake = FakeModel.of(model, inputs)
    walk = Walk(fake.model)
    steps_by_mode = _follow(walk, fake)
    steps = [step for mode_steps in steps_by_mode.values() for step in mode_steps]
    while True:
        offered, graph = _build_graph(walk, model, coupled)
        trials = trial_counts(list(offered), steps)
        if all(_trial_holds(graph, offered, counts, walk, fake, steps_by_mode) for counts in trials):
            return graph


def _follow(walk: Walk, fake: FakeModel) -> dict[bool, list[Step]]:
    """Follow the model in evaluation mode, and in training mode if it may differ; return the steps to try, by mode."""
    try:
        steps_by_mode = {False: walk.follow(fake.export(fake.model))}
    except Exception as error:
        hint = " (Token ids stay whole numbers in Data.from_arrays(…, ids=True).)" if "indices" in str(error) else ""
        raise ValueError(
            f"the model cannot be followed on an example of shape {fake.shapes}: either `example` is not what it "
            f"takes, or torch.export cannot follow its code. It says: {first_line(error)}{hint}"
        ) from error
    unused = {name for name, _ in fake.model.named_parameters()} - walk.used  # auxiliary heads, for example
    if unused or reads_training_flag(fake.model):
        try:
            steps = walk.follow(fake.export(fake.model, training=True))
            if unused:
                steps_by_mode[True] = steps  # further layers, which the trial must include
        except Exception as error:  # training mode may do anything to the channels
            for producer in walk.producers:
                fix(producer.channels, f"the model cannot be followed in training mode ({first_line(error)})")
    return steps_by_mode


def _trial_holds(
    graph: ChannelGraph,
    offered: dict[ChannelSet, str],
    counts: Counts,
    walk: Walk,
    fake: FakeModel,
    steps_by_mode: dict[bool, list[Step]],
) -> bool:
    """Tell whether the model with fewer channels does what the layouts predict; if not, fix the channels to blame."""
    candidates = list(offered)

    def shrink(chosen: Iterable[ChannelSet]) -> nn.Module:
        return resize(fake.model, graph.axes, {offered[channels]: counts[channels] for channels in chosen})

    for training, steps in steps_by_mode.items() if candidates else ():
        small = shrink(candidates)
        with track_running_module(small) as running:
            try:
                trial = Walk(small).follow(fake.export(small, training))
            except Exception as error:  # the model's code may raise anything
                failing = find_failing(candidates, partial(_failure, fake, shrink, training))
                for channels in failing:
                    channels.fixed = f"{ASSUMES}: {first_line(error)}"
                if not failing:
                    blame_module(walk, running[-1], candidates, first_line(error))
                return False
        differing = differences(steps, trial, counts)
        for step in differing:
            blame_step(walk, steps, step, candidates)
        if differing:
            return False
    return True


def _failure(
    fake: FakeModel, shrink: Callable[[Iterable[ChannelSet]], nn.Module], training: bool, chosen: Iterable[ChannelSet]
) -> str | None:
    """Return the error of a model in which only the chosen sets have fewer channels; None if it runs."""
    return fake.failure(shrink(chosen), training)


def _build_graph(walk: Walk, model: nn.Module, coupled: bool) -> tuple[dict[ChannelSet, str], ChannelGraph]:
    """Name the groups; return the prunable channel sets with their names, and the graph."""
    names: dict[ChannelSet, str] = {}
    producers: dict[ChannelSet, list[int]] = {}
    for number, producer in enumerate(walk.producers):
        output_sets, start = channel_sets(producer.channels), 0
        for run in resolve(producer.channels):
            name = producer.module if len(output_sets) == 1 else f"{producer.module}[{start}:{start + run.extent}]"
            names.setdefault(run.channels, name)
            start += run.extent
        for channels in output_sets:
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

    def axis(layout: Layout, group_names: Mapping[ChannelSet, str] = offered) -> Axis:
        return tuple(Span(group_names.get(run.channels), run.channels.size, run.block) for run in resolve(layout))

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
    """Average the absolute weights of each channel over the layers that compute it; one vector (size,) per group."""
    magnitudes: dict[str, list[Tensor]] = {}
    for module, output in outputs.items():
        layer = model.get_submodule(module)
        weight: Tensor = layer.weight.detach()  # type: ignore[union-attr, assignment, operator]
        output_dim = 1 if isinstance(layer, nn.modules.conv._ConvTransposeNd) else 0
        other_dims = [dim for dim in range(weight.dim()) if dim != output_dim]
        norms = torch.linalg.vector_norm(weight, 1, dim=other_dims).cpu() / (weight.numel() / weight.shape[output_dim])
        span_norms = norms.split([span.size * span.block for span in output.axis])
        for span, values in zip(output.axis, span_norms, strict=True):
            if span.group is not None:
                magnitudes.setdefault(span.group, []).append(values.reshape(span.size, span.block).mean(1))
    return {group: torch.stack(vectors).mean(0) for group, vectors in magnitudes.items()}


def _shorten(names: Sequence[str]) -> str:
    """Join the first two names and the number of the others."""
    return ", ".join(names[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else "") if names else "–"
