"""The units of a regression: networks learn values of mean 0 and deviation 1, users have prices, degrees or metres.

A network starts with outputs around zero. From there, prices of a hundred thousand are out of its optimizer's reach. So
it learns them in units of their deviation, from their mean; the ensemble gives them back as they were. A network that
gives such prices already, since it was trained to, goes on doing so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.devices import constant, device_of
from structured_ensembles.common.inputs import Inputs, call, cloned, moved, rows_of
from structured_ensembles.common.processes import gather
from structured_ensembles.data import Data
from structured_ensembles.data.splits import Batch, Split, TensorSplit
from structured_ensembles.networks.copying import dtype_of, evaluation_mode

LOOKED_AT = 64  # samples that tell what units a network's outputs have
STREAMED = 512  # samples of a loader that tell what the targets are like
WORTHWHILE = 4  # how much nearer they must be to mean 0 and deviation 1 than to the targets'


@dataclass(frozen=True)
class Units:
    """What is zero, for each value of a target (or one for all), and what is one: the same for all values.

    So the squared error in these units is that of the targets, but for a factor.
    """

    mean: tuple[float, ...]
    deviation: float

    def standard(self, targets: Tensor) -> Tensor:
        """Targets (…, values) as a network learns them."""
        return (targets - self._mean(targets)) / self.deviation

    def restored(self, outputs: Tensor) -> Tensor:
        """A network's outputs (…, values) as the targets are; not in half precision, which ends at 65,504."""
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return outputs * self.deviation + self._mean(outputs)

    def _mean(self, like: Tensor) -> Tensor | float:
        return self.mean[0] if len(self.mean) == 1 else constant(self.mean, like.device, like.dtype)

    def to_json(self) -> list[Any]:
        return [list(self.mean), self.deviation]

    @classmethod
    def from_json(cls, value: list[Any] | None) -> Units | None:
        """The inverse of `to_json`; None stays None."""
        return None if value is None else cls(tuple(map(float, value[0])), float(value[1]))


def units_for(networks: Sequence[nn.Module], data: Data, gaussian: bool = False) -> Units | None:
    """The units of a regression's training targets; None where the networks have those of the targets already.

    gaussian: whether the networks have Gaussian heads, whose means are in these units.
    Of several processes, which may have drawn other weights, the first decides.
    """
    return gather(_units(networks, data, gaussian))[0]  # type: ignore[no-any-return]


def _units(networks: Sequence[nn.Module], data: Data, gaussian: bool) -> Units | None:
    if data.task != "regression":
        return None
    inputs, targets = _looked_at(data.train)
    outputs = _outputs(networks, data, inputs)
    if gaussian and outputs.dim():
        outputs = outputs.chunk(2, -1)[0]
    by_value = targets.dim() == 2 and outputs.shape[1:] == targets.shape[1:]
    mean = targets.mean(0) if by_value else targets.mean().expand(1)
    deviation = float((targets - mean).square().mean().sqrt())
    if not math.isfinite(deviation) or deviation == 0:
        return None
    units = Units(tuple(mean.tolist()), deviation)
    if not by_value:
        outputs = outputs.reshape(-1, 1)
    return None if _distance(units.standard(outputs)) < _distance(outputs) + WORTHWHILE else units


def _looked_at(split: Split) -> tuple[Inputs, Tensor]:
    """Inputs of a few samples, and targets: of all samples in memory, or of those that a loader gives first."""
    if isinstance(split, TensorSplit):
        return rows_of(split.inputs, split.index[:LOOKED_AT]), split.targets[split.index].double()
    batches: list[Batch] = []
    for batch in split.batches(STREAMED, seed=(0,)):
        batches.append(batch)
        if sum(len(targets) for _, targets in batches) >= STREAMED:
            break
    return rows_of(batches[0][0], slice(LOOKED_AT)), torch.cat([targets for _, targets in batches]).double()


def _distance(values: Tensor) -> float:
    """Measure how far the columns of values (samples, values) are from mean 0 and deviation 1, on average."""
    mean, deviation = values.mean(0), values.std(0, correction=0)
    if not bool((deviation > 0).all()) or not bool(mean.isfinite().all()):
        return math.inf  # a network that knows nothing yet
    return float((mean.square() + deviation.log().square()).mean())


@torch.no_grad()
def _outputs(networks: Sequence[nn.Module], data: Data, inputs: Inputs) -> Tensor:
    """Of all networks, shape (networks * samples, …)."""
    found = []
    for network in networks:
        with evaluation_mode(network):
            prepared = data.prepare(moved(inputs, device_of(network)), dtype_of(network))
            outputs = call(network, cloned(prepared))
        if isinstance(outputs, Tensor):
            found.append(outputs.flatten(0, 1) if hasattr(network, "num_members") else outputs)
    return torch.cat(found).double() if found else torch.zeros(0)
