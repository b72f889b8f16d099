"""PruningLearner: CLNP, Continual Learning via Neural Pruning (Golkar et al. 2019).

A task trains all free neurons, with an L1 penalty. Then the least active of them are pruned, by a threshold that is
raised until the validation accuracy would drop by more than a margin. The remaining neurons belong to the task: their
incoming weights are frozen, connections from other neurons into them are cut, and the others are reinitialised.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor, nn

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.common.checks import check_share
from structured_ensembles.continual.fitting import fold_seed
from structured_ensembles.continual.freezing import freeze
from structured_ensembles.continual.heads import TaskNetwork
from structured_ensembles.continual.learner import Common
from structured_ensembles.continual.owning import NONE_FREE, OwningLearner
from structured_ensembles.continual.shared import TaskSubnetwork
from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.predictions import gather_predictions
from structured_ensembles.networks.copying import clone_model

# Thresholds of the sweep, as shares of the activity of a layer's most active neuron.
THRESHOLDS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, *(step / 20 for step in range(2, 20)))


class PruningLearner(OwningLearner):
    """Learner that keeps the active neurons of each task.

    margin: how much validation accuracy pruning may cost. strength: of the L1 penalty on the weights.
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
        del self.settings["seal"]  # CLNP always seals

    def _learn(self, number: int, data: Data, head: nn.Module) -> tuple[nn.Module, list[float]]:
        network = TaskNetwork(self.backbone, head)
        graph = self.shared.trace(head, self._example(data.shape))
        free = self.shared.owners.free()
        if not free:
            warnings.warn(
                f"task {number} gets no neuron, as {NONE_FREE}: it learns only a head on past neurons", stacklevel=3
            )
        subnetwork = self.shared.cut(network, graph, free)
        restore = freeze(subnetwork.network.backbone, subnetwork.past)
        weights = [
            weight for weight in subnetwork.network.backbone.parameters() if weight.dim() > 1 and weight.requires_grad
        ]

        def penalty() -> Tensor:
            return self.strength * torch.stack([weight.abs().sum() for weight in weights]).sum()

        losses = self._fit(
            subnetwork.network, data, number, after_step=restore, penalty=penalty if weights and self.strength else None
        )
        trained = TaskNetwork(
            clone_model(self.backbone), subnetwork.network.head
        )  # it has all neurons, so its head is complete
        self.shared.copy_into(trained.backbone, subnetwork)
        chosen, subnetwork = self._prune(trained, graph, data, free)
        self._commit(number, subnetwork, chosen)
        self.shared.redraw(fold_seed(self.seed, number, 3))
        return subnetwork.network.head, losses

    def _prune(
        self, trained: TaskNetwork, graph: ChannelGraph, data: Data, free: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, tuple[int, ...]], TaskSubnetwork]:
        """Prune the least active free neurons; return the others, and the network of them and the past neurons."""
        activity = measure_activity(trained, graph, data, self.device) if free else {}
        chosen = dict(free)
        subnetwork = self.shared.cut(trained, graph, chosen)
        needed = self._accuracy(subnetwork, data) - self.margin
        for threshold in THRESHOLDS if free else ():
            fewer = {name: _select_active(activity[name], neurons, threshold) for name, neurons in free.items()}
            if fewer == chosen:
                continue  # nothing more is pruned than by the threshold before
            candidate = self.shared.cut(trained, graph, fewer)
            if self._accuracy(candidate, data) < needed:
                break
            chosen, subnetwork = fewer, candidate
        return chosen, subnetwork

    def _accuracy(self, subnetwork: TaskSubnetwork, data: Data) -> float:
        """Measure the accuracy on the validation split, or on the training split if there is none."""
        split = data.train if data.validation is None else data.validation
        logits, targets = gather_predictions(Ensemble([subnetwork.network], normalization=data.normalization), split)
        return float((logits[0].argmax(-1) == targets).double().mean())


def _select_active(activity: Tensor, free: tuple[int, ...], threshold: float) -> tuple[int, ...]:
    """Select the free neurons above the threshold, at least the most active of them."""
    free_activity = activity[list(free)]
    kept = free_activity > threshold * activity.max()
    kept[free_activity.argmax()] = True
    return tuple(channel for channel, keep in zip(free, kept.tolist(), strict=True) if keep)


@torch.no_grad()
def measure_activity(network: nn.Module, graph: ChannelGraph, data: Data, device: torch.device) -> dict[str, Tensor]:
    """Measure the mean absolute activation of every neuron over the training split, where layers read it: (size,)."""
    totals: dict[str, Tensor] = {}
    readers = {name for group in graph.groups if group.prunable for name in group.consumers}
    handles = []

    def watch(name: str, layer: nn.Module) -> None:
        linear = isinstance(layer, nn.Linear)

        def add_activity(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            channels = inputs[0].movedim(-1 if linear else 1, 0).flatten(1).abs()
            totals[name] = totals.get(name, 0) + channels.sum(1) * (len(inputs[0]) / channels.shape[1])

        handles.append(layer.register_forward_pre_hook(add_activity))

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
    activities: dict[str, list[Tensor]] = {name: [] for name in graph.prunable}
    for name, total in totals.items():
        layer = network.get_submodule(name)
        transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
        dim = 0 if transposed or getattr(layer, "groups", 1) > 1 else 1
        axis, means = graph.axes[f"{name}.weight"][dim], total.cpu() / len(data.train)
        for span, span_means in zip(axis, means.split([span.size * span.block for span in axis]), strict=True):
            if span.group is not None:
                activities[span.group].append(span_means.view(span.size, span.block).mean(1))
    return {
        name: torch.stack(means_of_readers).mean(0) if means_of_readers else graph.magnitudes[name]
        for name, means_of_readers in activities.items()
    }
