"""judge_trained(): tell a network that is already trained for the data from one that is not.

A network counts as trained if three things hold on validation samples (with training samples where they are few):
- It is right more often than always naming the most frequent class, by a one-sided exact binomial test at the level
  `LEVEL`. In a regression its R² is positive by an F test at the same level, and at least `MIN_R2`.
- Its probabilities are good, too: the cross-entropy is below `MAX_SURPRISE` of that of the class frequencies.
- It is far better than copies of it with newly drawn weights. The random features of an untrained network separate some
  classes, and by luck its outputs match them: that beats chance significantly, and means nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from scipy import special
from torch import Tensor, nn

from structured_ensembles.common.devices import Device, fork_generators, pick_device
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.processes import decide_in_first_process
from structured_ensembles.data import Data
from structured_ensembles.data.splits import Batch, take_samples
from structured_ensembles.examination.pretrained import (
    MAX_SURPRISE,
    MIN_LEAD,
    REDRAWN_COPIES,
    SAMPLES,
    compute_odds,
    compute_outputs,
    samples_for_trial,
)
from structured_ensembles.networks.copying import clone_model, copy_for_trial
from structured_ensembles.networks.initialization import draw_weights

LEVEL = 1e-6  # of the tests
ENOUGH = 100  # validation samples to judge by them alone
MIN_R2 = 0.5  # untrained networks with one to fifty inputs had up to 0.46, three of eight hundred more


class Judgement(NamedTuple):
    """Decision whether a network counts as trained, and the reason, in words that end a sentence."""

    trained: bool
    reason: str


def judge_trained(model: nn.Module, data: Data, device: Device = "auto") -> Judgement:
    """Tell whether `model` is already trained for `data`, whose normalisation must be settled; see above.

    Of several processes, the first decides. The model is not changed.
    """
    return decide_in_first_process(lambda: _judge(model, data, pick_device(device, model)))


def count_outputs(model: nn.Module, data: Data) -> int:
    """Return the number of outputs of a model for one sample; 0 if it cannot run on the data."""
    shape = output_shape(model, data)
    return shape[-1] if shape else 0


def output_shape(model: nn.Module, data: Data) -> tuple[int, ...] | None:
    """Return the shape of a model's outputs for a few samples, (samples, …); None if it cannot run on the data."""
    try:
        inputs, _ = samples_for_trial(data, 2)
        return tuple(compute_outputs(copy_for_trial(model), data, inputs).shape)
    except Exception:  # training explains better why a model does not fit the data
        return None


def _judge(model: nn.Module, data: Data, device: torch.device) -> Judgement:
    """Compare a network with chance, and with copies of it that have newly drawn weights."""
    try:
        with fork_generators(device):
            (inputs, targets), kind = _samples(data)
            network = copy_for_trial(model).to(device)
            targets = targets.cpu()
            outputs = compute_outputs(network, data, inputs)
            if data.task == "classification" and outputs.shape[-1] != data.num_classes:
                outputs_found, classes = counted(outputs.shape[-1], "output"), counted(data.num_classes, "class")
                return Judgement(False, f"it has {outputs_found}, the data {classes} (see with_head)")
            score, reason = _score(outputs, targets), _reason_against(outputs, targets)
            count = len(targets)
            name = f"of {count} {kind} right" if data.task == "classification" else "of the variance explained"
            if reason is not None:
                return Judgement(False, f"{score:.1%} {name}: {reason}")
            for number in range(REDRAWN_COPIES):
                redrawn = clone_model(network)
                draw_weights(redrawn, number)
                if _same_weights(redrawn, network):  # it has no `reset_parameters` to draw new ones with
                    break
                luck = _score(compute_outputs(redrawn, data, inputs), targets)
                if compute_odds(max(score, 0.0), count) < MIN_LEAD * compute_odds(max(luck, 0.0), count):
                    return Judgement(False, f"{score:.1%} {name}: with newly drawn weights it has {luck:.1%}")
    except Exception:  # training explains better why a model does not fit the data
        return Judgement(False, "it cannot be evaluated on the data")
    return Judgement(True, f"{score:.1%} {name}, {_describe_chance(targets)}")


def _samples(data: Data) -> tuple[Batch, str]:
    """Return validation samples if there are enough, otherwise training samples too; and what they are."""
    if data.validation is not None and len(data.validation) >= ENOUGH:
        return take_samples(data.validation, SAMPLES), "validation samples"
    return samples_for_trial(data), "samples"


def _score(outputs: Tensor, targets: Tensor) -> float:
    """Compute the accuracy; for a regression R², which is negative if the mean of the targets is a better guess.

    Networks of a regression may have been trained on standardised targets (see `Units`): the better R² of both counts.
    """
    if not targets.is_floating_point():
        return float((outputs.argmax(-1) == targets).double().mean())
    values, truth = (tensor.double().reshape(len(tensor), -1) for tensor in (outputs, targets))
    values = values[:, : truth.shape[1]]  # a Gaussian head has the means first
    centred = truth - truth.mean(0)
    total, deviation = centred.square().sum(), centred.square().mean().sqrt()
    if float(total) == 0:
        return 0.0
    errors = torch.stack([values - truth, values * deviation - centred])
    return float((1 - errors.square().sum((1, 2)) / total).max())


def _reason_against(outputs: Tensor, targets: Tensor) -> str | None:
    """Say why outputs (samples, …) are no better than chance; None if they are."""
    count, score = len(targets), _score(outputs, targets)
    if not math.isfinite(score):
        return "its outputs are not finite"
    if targets.is_floating_point():
        statistic = score * (count - 2) / (1 - score) if score < 1 else math.inf
        significant = score >= MIN_R2 and special.fdtrc(1, max(count - 2, 1), statistic) < LEVEL
        return None if significant else f"an R² below {MIN_R2}, or of too few samples"
    shares = targets.bincount().double() / count
    chance = float(shares.max())
    if special.bdtrc(round(score * count) - 1, count, chance) >= LEVEL:
        return f"not clearly above chance ({chance:.1%})"
    surprise = float(F.cross_entropy(outputs.double(), targets)) / -float(torch.special.xlogy(shares, shares).sum())
    return None if surprise < MAX_SURPRISE else "its probabilities are no better than the class frequencies"


def _describe_chance(targets: Tensor) -> str:
    """Say what a network without knowledge would reach."""
    if targets.is_floating_point():
        return "which the mean explains none of"
    return f"{float(targets.bincount().max() / len(targets)):.1%} by chance"


def _same_weights(first: nn.Module, second: nn.Module) -> bool:
    """Tell whether two networks have equal parameters."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)
