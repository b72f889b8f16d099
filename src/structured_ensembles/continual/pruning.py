"""PruningLearner: CLNP, Continual Learning via Neural Pruning (Golkar et al. 2019).

A task trains all free neurons, with an L1 penalty. Then the least active of them are pruned, by a threshold that is
raised until the validation accuracy would drop by more than a margin. What is left belongs to the task: its incoming
weights are frozen, connections from the others into it are cut, and the others' weights are drawn anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.common.checks import check_share
from structured_ensembles.continual.fitting import derived
from structured_ensembles.continual.freezing import freeze
from structured_ensembles.continual.heads import TaskNetwork
from structured_ensembles.continual.learner import Common
from structured_ensembles.continual.owning import NONE_FREE, OwningLearner
from structured_ensembles.continual.shared import Part
from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.predictions import predictions
from structured_ensembles.networks.copying import clone_of

# Thresholds of the sweep, as shares of the activity of a layer's most active neuron.
THRESHOLDS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, *(step / 20 for step in range(2, 20)))


class PruningLearner(OwningLearner):
    """margin: how much validation accuracy pruning may cost. strength: of the L1 penalty on the weights.

    The other arguments are those of `Learner`.
    """

    method = "pruning"

    def __init__(
        self, backbone: nn.Module, margin: float = 0.01, strength: float = 1e-5, **common: Unpack[Common]
    ) -> None:
        for name, value in (("margin", margin), ("strength", strength)):
            check_share(name, value)
        super().__init__(backbone, **common)
        self.margin, self.strength = margin, strength
        self.settings |= {"margin": margin, "strength": strength}
        del self.settings["seal"]  # CLNP always cuts

    def _learn(self, number: int, data: Data, head: nn.Module) -> tuple[nn.Module, list[float]]:
        network = TaskNetwork(self.backbone, head)
        graph = self.shared.graph(head, data.num_classes, self._example(data.shape))
        free = self.shared.owners.free()
        if not free:
            warnings.warn(
                f"task {number} gets no neuron, as {NONE_FREE}: it learns a head on those of the past", stacklevel=3
            )
        part = self.shared.cut(network, graph, free)
        restore = freeze(part.network.backbone, part.past)
        weights = [weight for weight in part.network.backbone.parameters() if weight.dim() > 1 and weight.requires_grad]

        def penalty() -> Tensor:
            return self.strength * torch.stack([weight.abs().sum() for weight in weights]).sum()

        losses = self._fit(
            part.network, data, number, after_step=restore, penalty=penalty if weights and self.strength else None
        )
        trained = TaskNetwork(clone_of(self.backbone), part.network.head)  # all neurons are in it: its head is whole
        self.shared.copy_into(trained.backbone, part)
        chosen, part = self._pruned(trained, graph, data, free)
        self._take(number, part, chosen)
        self.shared.redraw(derived(self.seed, number, 3))
        return part.network.head, losses

    def _pruned(
        self, trained: TaskNetwork, graph: ChannelGraph, data: Data, free: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, tuple[int, ...]], Part]:
        """The free neurons that are worth keeping, and the network that has only them and the past."""
        activity = mean_activity(trained, graph, data, self.device) if free else {}
        chosen = dict(free)
        part = self.shared.cut(trained, graph, chosen)
        needed = self._accuracy(part, data) - self.margin
        for threshold in THRESHOLDS if free else ():
            fewer = {name: _active(activity[name], own, threshold) for name, own in free.items()}
            candidate = self.shared.cut(trained, graph, fewer)
            if self._accuracy(candidate, data) < needed:
                break
            chosen, part = fewer, candidate
        return chosen, part

    def _accuracy(self, part: Part, data: Data) -> float:
        """On the validation split; on the training split if there is none."""
        split = data.train if data.validation is None else data.validation
        logits, targets = predictions(Ensemble([part.network], normalization=data.normalization), split)
        return float((logits[0].argmax(-1) == targets).double().mean())


def _active(activity: Tensor, free: tuple[int, ...], threshold: float) -> tuple[int, ...]:
    """The free neurons above the threshold, and always the most active of them."""
    own = activity[list(free)]
    kept = own > threshold * activity.max()
    kept[own.argmax()] = True
    return tuple(channel for channel, keep in zip(free, kept.tolist(), strict=True) if keep)


@torch.no_grad()
def mean_activity(network: nn.Module, graph: ChannelGraph, data: Data, device: torch.device) -> dict[str, Tensor]:
    """The mean absolute activation of every neuron, where other layers read it, over the training split: (size,)."""
    totals: dict[str, Tensor] = {}
    readers = {name for group in graph.groups if group.prunable for name in group.consumers}
    handles = []

    def watch(name: str, layer: nn.Module) -> None:
        linear = isinstance(layer, nn.Linear)

        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            channels = inputs[0].movedim(-1 if linear else 1, 0).flatten(1).abs()
            totals[name] = totals.get(name, 0) + channels.sum(1) * (len(inputs[0]) / channels.shape[1])

        handles.append(layer.register_forward_pre_hook(add))

    layers = dict(network.named_modules())
    for name in readers:
        layer = layers.get(name)  # None: a weight that belongs to no layer
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
            watch(name, layer)
    network.eval()
    try:
        dtype = next(network.parameters()).dtype
        for inputs, _ in data.batches("train", 512, device=device, dtype=dtype):
            network(inputs)
    finally:
        for handle in handles:
            handle.remove()
    found: dict[str, list[Tensor]] = {name: [] for name in graph.prunable}
    for name, total in totals.items():
        layer = network.get_submodule(name)
        transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
        dim = 0 if transposed or getattr(layer, "groups", 1) > 1 else 1
        axis, means = graph.axes[f"{name}.weight"][dim], total.cpu() / len(data.train)
        for span, piece in zip(axis, means.split([own.size * own.block for own in axis]), strict=True):
            if span.group is not None:
                found[span.group].append(piece.view(span.size, span.block).mean(1))
    return {name: torch.stack(parts).mean(0) if parts else graph.magnitudes[name] for name, parts in found.items()}
