"""fitted_normalization(): find the normalisation that a pretrained network expects.

A network that somebody trained on pixels in [0,1] guesses when it is given pixels of mean 0 and deviation 1. So some
samples are shown to it in the ways that are usual. An untrained network may be right more often than chance, too: its
features separate classes, and luck names them. So it counts as trained only if its probabilities are good as well, and
if it is far better than copies of it whose weights are drawn anew.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.devices import Device, device_of, pick_device
from structured_ensembles.common.inputs import Inputs, call, cloned, moved, pieces
from structured_ensembles.common.processes import gather, rank
from structured_ensembles.data import Data, Normalization
from structured_ensembles.data.normalization import normalization_for
from structured_ensembles.data.splits import Batch, take_samples
from structured_ensembles.networks.copying import bystander_of, clone_of, dtype_of
from structured_ensembles.networks.initialization import draw_weights

SAMPLES = 512  # that a network is tried on, in batches of
BATCH = 128
MIN_DEVIATIONS = 5  # by which the accuracy must be above chance, of a binomial
MIN_GAIN = 1.5  # least ratio of the odds of being right to those with the data's own normalisation
MAX_SURPRISE = 0.8  # cross-entropy over that of the classes' frequencies; no untrained network is below
MIN_LEAD = 3.0  # least ratio of the odds of being right to those of the best copy with weights drawn anew
REDRAWN_COPIES = 8  # only made if the rest holds


def fitted_normalization(model: nn.Module, data: Data, device: Device = "auto") -> Data:
    """Return the data with the normalisation that `model` was clearly trained with, or as they are.

    A warning says what was found. Nothing happens where the user chose a normalisation, or inputs stay as they are. Of
    several processes the first decides. The model is not changed.
    """
    if data.normalization_settled:
        return data
    found = gather(_found(model, data, pick_device(device, model)) if rank() == 0 else None)[0]
    if found is None:
        return replace(data, normalization_settled=True)
    choice, normalization, told = found
    if rank() == 0:
        warnings.warn(
            f"the model was trained on inputs as {choice} gives them ({told}): it gets such inputs. Give Data "
            f"{choice}, or another choice, to decide it yourself",
            stacklevel=4,
        )
    return replace(data, normalization=normalization, normalization_settled=True)


def _found(model: nn.Module, data: Data, device: torch.device) -> tuple[str, Normalization | None, str] | None:
    """Return the argument for `Data`, its normalisation and the gain in words; None if the model seems untrained."""
    others = dict(_candidates(data))
    if not others:
        return None
    inputs, targets = _samples_for_trial(data)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            network = bystander_of(model).to(device)
            own, count = _score(_outputs(network, data, inputs), targets), len(targets)
            ways = {name: replace(data, normalization=other) for name, other in others.items()}
            outputs = {name: _outputs(network, way, inputs) for name, way in ways.items()}
            scores = {name: _score(given, targets) for name, given in outputs.items()}
            name = max(scores, key=scores.__getitem__)
            best = scores[name]
            if _odds(best, count) < MIN_GAIN * _odds(own, count) or not _above_chance(outputs[name], targets, best):
                return None
            for number in range(REDRAWN_COPIES):
                redrawn = clone_of(network)
                draw_weights(redrawn, number)
                if _odds(best, count) < MIN_LEAD * _odds(_score(_outputs(redrawn, ways[name], inputs), targets), count):
                    return None
    except Exception:  # a model that does not fit the data: the walk itself says it better
        return None
    measure = "samples right" if data.task == "classification" else "variance explained"
    return name, others[name], f"{best:.1%} of {measure}, otherwise {own:.1%}"


def _samples_for_trial(data: Data) -> Batch:
    """Return validation samples, and training samples if these are few: a trained network knows either."""
    held_out = None if data.validation is None else take_samples(data.validation, SAMPLES)
    if held_out is not None and len(held_out[1]) == SAMPLES:
        return held_out
    parts = [*([] if held_out is None else [held_out]), take_samples(data.train, SAMPLES)]
    inputs, targets = (torch.cat(own)[:SAMPLES] for own in zip(*parts, strict=True))
    return inputs, targets


def _candidates(data: Data) -> Iterator[tuple[str, Normalization | None]]:
    """Yield other usual normalisations of such inputs, each after the argument of `Data` that asks for it."""
    if data.ids:
        return
    inputs, _ = take_samples(data.train, 1)
    if not isinstance(inputs, Tensor):  # of several inputs, each is as its type says
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
def _outputs(network: nn.Module, data: Data, inputs: Inputs) -> Tensor:
    """Run a network on stored inputs (samples, …); return (samples, …) on the CPU, the mean over its members."""
    device, dtype = device_of(network), dtype_of(network)
    parts = [call(network, cloned(data.prepare(moved(part, device), dtype))) for part in pieces(inputs, BATCH)]
    outputs = torch.cat(parts, dim=1).mean(0) if hasattr(network, "num_members") else torch.cat(parts)
    return outputs.double().cpu()


def _score(outputs: Tensor, targets: Tensor) -> float:
    """Compute the accuracy; for a regression the share of the variance that a line through the outputs explains."""
    if not targets.is_floating_point():
        return float((outputs.argmax(-1) == targets.cpu()).double().mean())
    values, truth = (own.double().reshape(len(own), -1) for own in (outputs, targets.cpu()))
    if values.shape != truth.shape:  # such as those of a Gaussian head
        return 0.0
    values, truth = values - values.mean(0), truth - truth.mean(0)
    scale = (values.square().sum(0) * truth.square().sum(0)).sqrt()
    correlation = ((values * truth).sum(0) / scale).nan_to_num(0).clamp(0, 1)
    return float(correlation.square().mean())


def _above_chance(outputs: Tensor, targets: Tensor, score: float) -> bool:
    """Tell whether a score is significant, and logits (samples, classes) beat the classes' frequencies."""
    count = len(targets)
    if targets.is_floating_point():
        return score * count > MIN_DEVIATIONS**2
    shares = targets.cpu().bincount().double() / count
    chance = float(shares.max())  # always to name the most frequent class
    if chance == 1:
        return False
    surprise = float(F.cross_entropy(outputs, targets.cpu())) / -float(torch.special.xlogy(shares, shares).sum())
    return score - chance > MIN_DEVIATIONS * math.sqrt(chance * (1 - chance) / count) and surprise < MAX_SURPRISE


def _odds(score: float, count: int) -> float:
    """Compute the odds of being right; finite also if all samples are."""
    return (score * count + 0.5) / (count - score * count + 0.5)
