"""Target scaling: a regression's networks learn targets of mean 0 and deviation 1; the ensemble converts them back.

A network starts with outputs around zero. From there, prices of a hundred thousand are out of its optimizer's reach. So
it learns them less their mean, divided by their deviation. A network that was trained to give such prices keeps giving
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.devices import device_of, make_constant
from structured_ensembles.common.gaussian import moments
from structured_ensembles.common.inputs import Inputs, call, clone_inputs, move_inputs, select_rows
from structured_ensembles.common.processes import gather
from structured_ensembles.data import Data
from structured_ensembles.data.splits import Batch, Split, TensorSplit
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.networks.modes import evaluation_mode

OUTPUT_SAMPLES = 64  # samples from which the scale of a network's outputs is measured
TARGET_SAMPLES = 512  # samples of a loader from which mean and deviation of the targets are measured
MARGIN = 4  # by how much the outputs must be nearer to mean 0 and deviation 1 than to the targets'


@dataclass(frozen=True)
class Units:
    """Mean and deviation that standardise the targets.

    mean: for each value of a target, or one for all. deviation: one for all, so that the squared error of standardised
        targets is that of the targets up to a factor.
    """

    mean: tuple[float, ...]
    deviation: float

    def standardize(self, targets: Tensor) -> Tensor:
        """Standardise targets (…, values)."""
        return (targets - self._mean(targets)) / self.deviation

    def restore(self, outputs: Tensor) -> Tensor:
        """Convert outputs (…, values) to the units of the targets; at least in float32, as float16 ends at 65,504."""
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return outputs * self.deviation + self._mean(outputs)

    def _mean(self, like: Tensor) -> Tensor | float:
        """Return the mean in a form that broadcasts against a tensor."""
        return self.mean[0] if len(self.mean) == 1 else make_constant(self.mean, like.device, like.dtype)

    def to_json(self) -> list[Any]:
        """Encode as a list for JSON."""
        return [list(self.mean), self.deviation]

    @classmethod
    def from_json(cls, value: list[Any] | None) -> Units | None:
        """Restore what `to_json` wrote; None stays None."""
        return None if value is None else cls(tuple(map(float, value[0])), float(value[1]))


def restore_outputs(outputs: Tensor, units: Units | None, gaussian: bool) -> Tensor:
    """Convert members' outputs (members, batch, values) to the units of the targets, where there are `units`.

    gaussian: the outputs are those of Gaussian heads; they become (members, batch, 2 * values), means and deviations.
    """
    if gaussian:
        means, deviations = moments(outputs)
        if units is not None:
            means, deviations = units.restore(means), deviations * units.deviation
        return torch.cat((means, deviations), -1)
    return outputs if units is None else units.restore(outputs)


def fit_units(networks: Sequence[nn.Module], data: Data, gaussian: bool = False) -> Units | None:
    """Return the units of a regression's training targets; None if the networks' outputs are like the targets already.

    gaussian: whether the networks have Gaussian heads, whose means are in these units.
    Processes may have drawn different weights: the first one decides.
    """
    return gather(_choose_units(networks, data, gaussian))[0]  # type: ignore[no-any-return]


def _choose_units(networks: Sequence[nn.Module], data: Data, gaussian: bool) -> Units | None:
    """Measure the targets, and choose their units unless the outputs are nearer to the targets."""
    if data.task != "regression":
        return None
    inputs, targets = _read_samples(data.train)
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
    return None if _distance(units.standardize(outputs)) < _distance(outputs) + MARGIN else units


def _read_samples(split: Split) -> tuple[Inputs, Tensor]:
    """Return the inputs of a few samples, and the targets of all samples in memory, or of a loader's first ones."""
    if isinstance(split, TensorSplit):
        return select_rows(split.inputs, split.index[:OUTPUT_SAMPLES]), split.targets[split.index].double()
    batches: list[Batch] = []
    for batch in split.batches(TARGET_SAMPLES, seed=(0,)):
        batches.append(batch)
        if sum(len(targets) for _, targets in batches) >= TARGET_SAMPLES:
            break
    return select_rows(batches[0][0], slice(OUTPUT_SAMPLES)), torch.cat([targets for _, targets in batches]).double()


def _distance(values: Tensor) -> float:
    """Measure how far the columns of values (samples, values) are from mean 0 and deviation 1, on average."""
    mean, deviation = values.mean(0), values.std(0, correction=0)
    if not bool((deviation > 0).all()) or not bool(mean.isfinite().all()):
        return math.inf  # a network whose outputs are constant or not finite
    return float((mean.square() + deviation.log().square()).mean())


@torch.no_grad()
def _outputs(networks: Sequence[nn.Module], data: Data, inputs: Inputs) -> Tensor:
    """Return the outputs of all networks in evaluation mode, (networks * samples, …)."""
    all_outputs = []
    for network in networks:
        with evaluation_mode(network):
            batch = data.prepare(move_inputs(inputs, device_of(network)), dtype_of(network))
            outputs = call(network, clone_inputs(batch))
        if isinstance(outputs, Tensor):
            all_outputs.append(outputs.flatten(0, 1) if hasattr(network, "num_members") else outputs)
    return torch.cat(all_outputs).double() if all_outputs else torch.zeros(0)
