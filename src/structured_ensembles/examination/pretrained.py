"""find_normalization(): the normalisation that a pretrained network expects.

A network that was trained on pixels in [0,1] is no better than chance on pixels of mean 0 and deviation 1. So it is
evaluated on some samples with each of the usual normalisations. An untrained network may beat chance, too: its random
features separate some classes, and by luck its outputs match them. So a network counts as trained only if its
probabilities are good as well, and if it is far better than copies of it with newly drawn weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.devices import Device, device_of, fork_generators, pick_device
from structured_ensembles.common.inputs import (
    Inputs,
    call,
    clone_inputs,
    join_batches,
    move_inputs,
    select_rows,
    split_batch,
)
from structured_ensembles.common.processes import gather, rank
from structured_ensembles.data import Data, Normalization
from structured_ensembles.data.normalization import normalization_for
from structured_ensembles.data.splits import Batch, sample_shapes, take_samples
from structured_ensembles.networks.copying import clone_model, copy_for_trial, dtype_of
from structured_ensembles.networks.initialization import draw_weights

SAMPLES = 512  # that a network is evaluated on
BATCH = 128
MIN_DEVIATIONS = 5  # of a binomial, by which the accuracy must exceed chance
MIN_GAIN = 1.5  # ratio of the odds of being right to those with the current normalisation
MAX_SURPRISE = 0.8  # cross-entropy over the entropy of the class frequencies; untrained networks are above
MIN_LEAD = 3.0  # ratio of the odds of being right to those of the best copy with newly drawn weights
REDRAWN_COPIES = 8  # made only if the other conditions hold


def find_normalization(model: nn.Module, data: Data, device: Device = "auto") -> Data:
    """Return the data with the normalisation that `model` was clearly trained with, or unchanged.

    A warning says which. Nothing happens if the user chose a normalisation, or if the inputs are not normalised. Of
    several processes, the first decides. The model is not changed.
    """
    if data.normalization_settled:
        return data
    better = gather(_find_better(model, data, pick_device(device, model)) if rank() == 0 else None)[0]
    if better is None:
        return replace(data, normalization_settled=True)
    choice, normalization, gain = better
    if rank() == 0:
        warnings.warn(
            f"the model was trained on inputs as {choice} gives them ({gain}): it gets such inputs. Give Data "
            f"{choice}, or another choice, to decide it yourself",
            stacklevel=4,
        )
    return replace(data, normalization=normalization, normalization_settled=True)


def _find_better(model: nn.Module, data: Data, device: torch.device) -> tuple[str, Normalization | None, str] | None:
    """Return the argument for `Data`, its normalisation and the gain in words; None if no other is clearly better."""
    candidates = dict(_candidates(data))
    if not candidates:
        return None
    inputs, targets = samples_for_trial(data)
    try:
        with fork_generators(device):
            network = copy_for_trial(model).to(device)
            current, count = _score(compute_outputs(network, data, inputs), targets), len(targets)
            normalized = {name: replace(data, normalization=candidate) for name, candidate in candidates.items()}
            outputs = {name: compute_outputs(network, variant, inputs) for name, variant in normalized.items()}
            scores = {name: _score(values, targets) for name, values in outputs.items()}
            name = max(scores, key=scores.__getitem__)
            best = scores[name]
            gained = compute_odds(best, count) >= MIN_GAIN * compute_odds(current, count)
            if not gained or not _above_chance(outputs[name], targets, best):
                return None
            for number in range(REDRAWN_COPIES):
                redrawn = clone_model(network)
                draw_weights(redrawn, number)
                untrained = _score(compute_outputs(redrawn, normalized[name], inputs), targets)
                if compute_odds(best, count) < MIN_LEAD * compute_odds(untrained, count):
                    return None
    except Exception:  # training explains better why a model does not fit the data
        return None
    measure = "samples right" if data.task == "classification" else "variance explained"
    return name, candidates[name], f"{best:.1%} of {measure}, otherwise {current:.1%}"


def samples_for_trial(data: Data, count: int = SAMPLES) -> Batch:
    """Return validation samples, and training samples if those are few: a trained network is good at both."""
    held_out = None if data.validation is None else take_samples(data.validation, count)
    if held_out is not None and len(held_out[1]) == count:
        return held_out
    training = take_samples(data.train, count)
    if held_out is None:
        return training
    if sample_shapes(held_out) != sample_shapes(training):  # such as images that a loader crops for training only
        return held_out
    inputs, targets = join_batches([held_out[0], training[0]]), torch.cat([held_out[1], training[1]])
    return select_rows(inputs, slice(count)), targets[:count]


def _candidates(data: Data) -> Iterator[tuple[str, Normalization | None]]:
    """Yield the other usual normalisations of such inputs, each with the argument of `Data` that asks for it."""
    if data.ids:
        return
    inputs, _ = take_samples(data.train, 1)
    if not isinstance(inputs, Tensor):  # several inputs are normalised by their dtypes alone
        return
    if inputs.dtype == torch.uint8:
        yield "normalization='none'", normalization_for("none", inputs)
        yield "normalization=(0.5, 0.5)", normalization_for((0.5, 0.5), inputs)
        if data.normalization is not None:
            yield "normalization='unit'", None
        if inputs.dim() == 4 and inputs.shape[1] == 3:
            yield "normalization='imagenet'", normalization_for("imagenet", inputs)
    elif data.normalization is not None:
        yield "standardize=False", None


@torch.no_grad()
def compute_outputs(network: nn.Module, data: Data, inputs: Inputs) -> Tensor:
    """Run a network on stored inputs (samples, …); return (samples, …) on the CPU, averaged over its members if any."""
    device, dtype = device_of(network), dtype_of(network)
    batches = [
        call(network, clone_inputs(data.prepare(move_inputs(batch, device), dtype)))
        for batch in split_batch(inputs, BATCH)
    ]
    outputs = torch.cat(batches, dim=1).mean(0) if hasattr(network, "num_members") else torch.cat(batches)
    return outputs.double().cpu()


def _score(outputs: Tensor, targets: Tensor) -> float:
    """Compute the accuracy; for a regression the squared correlation of outputs and targets."""
    if not targets.is_floating_point():
        return float((outputs.argmax(-1) == targets.cpu()).double().mean())
    values, truth = (tensor.double().reshape(len(tensor), -1) for tensor in (outputs, targets.cpu()))
    if values.shape != truth.shape:  # such as the outputs of a Gaussian head
        return 0.0
    values, truth = values - values.mean(0), truth - truth.mean(0)
    scale = (values.square().sum(0) * truth.square().sum(0)).sqrt()
    correlation = ((values * truth).sum(0) / scale).nan_to_num(0).clamp(0, 1)
    return float(correlation.square().mean())


def _above_chance(outputs: Tensor, targets: Tensor, score: float) -> bool:
    """Tell whether a score is significant, and logits (samples, classes) predict better than class frequencies."""
    count = len(targets)
    if targets.is_floating_point():
        return score * count > MIN_DEVIATIONS**2
    shares = targets.cpu().bincount().double() / count
    chance = float(shares.max())  # the accuracy of always predicting the most frequent class
    if chance == 1:
        return False
    surprise = float(F.cross_entropy(outputs, targets.cpu())) / -float(torch.special.xlogy(shares, shares).sum())
    return score - chance > MIN_DEVIATIONS * math.sqrt(chance * (1 - chance) / count) and surprise < MAX_SURPRISE


def compute_odds(score: float, count: int) -> float:
    """Compute the odds of being right; finite even if all samples are."""
    return (score * count + 0.5) / (count - score * count + 0.5)
