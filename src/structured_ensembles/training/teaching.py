"""Teaching: members learn from the probabilities of a trained network or ensemble, beside the labels.

Knowledge distillation (Hinton, Vinyals and Dean 2015) with a consistent teacher (Beyer et al. 2022), which sees every
batch as the member does: cropped, flipped, blended. With a member's logits z and the label y of a sample, the teacher's
probabilities p, its share w and the temperature T:

    loss = (1 − w) · cross-entropy(z, y) + w · T² · KL(p(T) ‖ softmax(z / T)),   p(T) ∝ p^(1/T)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.checks import check_number, check_type, to_python_number
from structured_ensembles.common.devices import seed_generators
from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import Inputs, map_inputs, move_inputs, tensors_in
from structured_ensembles.cuda.capture import log_fallback
from structured_ensembles.data import Data, Normalization
from structured_ensembles.data.kinds import Normalizations
from structured_ensembles.data.losses import Loss, Reduction, label_probabilities, smoothed_cross_entropy
from structured_ensembles.data.splits import take_samples
from structured_ensembles.networks.copying import clone_model, dtype_of
from structured_ensembles.prediction.combination import combine_logs, member_outputs
from structured_ensembles.storage.fingerprints import digest_module

SAMPLES = 8  # on which a teacher is tried before training
TEMPERATURES = (0.01, 100.0)  # outside of them, float32 rounds T² · KL to zero or to noise
CLOSE = 1e-2  # difference of log-probabilities that may come from rounding, on a GPU that adds in another order
Normalized = Normalization | Normalizations | None


@dataclass(frozen=True)
class Teacher:
    """A trained network or ensemble, and how members learn from it: `train(…, teacher=Teacher(ensemble, share=0.5))`.

    network: a classifier that returns logits (batch, classes), or an `Ensemble`, whose calibrated probabilities teach.
        It is copied, and never changes. A network gets the data as members do, normalised; an ensemble as it was
        trained.
    share: of the teacher in the loss, from 0 to 1; the labels have the rest.
    temperature: from 0.01 to 100. 1 teaches the probabilities as they are; higher ones give more weight to the small
        ones.

    The defaults have the lowest validation NLL of three shares and three temperatures in benchmarks/teaching.py:
    an MLP, 2,000 digits of MNIST, taught by a deep ensemble of four, three seeds; docs/how-to/teacher.md has the
    figures. Nothing is recorded yet on other data.
    """

    network: nn.Module
    share: float = 0.5
    temperature: float = 2.0

    def __post_init__(self) -> None:
        check_type("network", self.network, nn.Module, "a teacher is a trained network or Ensemble")
        for name in ("share", "temperature"):
            object.__setattr__(self, name, to_python_number(getattr(self, name)))
            check_number(name, getattr(self, name))
        if self.share > 1:
            raise ValueError(f"share must be at most 1, not {self.share!r}")
        lowest, highest = TEMPERATURES
        if not lowest <= self.temperature <= highest:
            raise ValueError(f"temperature must be from {lowest:g} to {highest:g}, not {self.temperature!r}")


@dataclass(frozen=True)
class Lessons:
    """A teacher with its networks taken out of it: what a run's identity and its engines need.

    calibration: the temperature of the teacher's own probabilities. normalization: what its networks expect; "data":
    the same as the members.
    """

    networks: Sequence[nn.Module]
    calibration: float
    normalization: Normalized | Literal["data"]
    share: float
    temperature: float

    def identity(self) -> dict[str, Any]:
        """Return what influences a run, as JSON values: see `resuming.identity`."""
        expected = self.normalization
        return {
            "share": self.share,
            "temperature": self.temperature,
            "calibration": self.calibration,
            "normalization": expected if expected is None or expected == "data" else expected.to_json(),
            **digest_module(nn.ModuleList(self.networks)),
        }

    def prepare(self, data: Data, device: torch.device) -> Teaching:
        """Copy the networks to the device, frozen, and try them on samples of the data.

        Raises a ValueError or TypeError for what cannot teach members by these data.
        """
        assert data.num_classes is not None, "teachers are for classification"
        applied = data.normalization
        expected = applied if self.normalization == "data" else self.normalization
        if applied != expected and Normalizations in (type(applied), type(expected)):
            raise ValueError(
                "teacher was trained with another normalisation of its several inputs: give data the same, by "
                "normalization="
            )
        try:
            copies = nn.ModuleList(map(clone_model, self.networks)).eval().requires_grad_(False).to(device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # such as of a scripted network, or one without weights
            raise ValueError(f"teacher cannot be copied: {first_line(error)}") from error
        teaching = Teaching(copies, self, applied, expected, data.num_classes)
        inputs = data.prepare(move_inputs(take_samples(data.train, SAMPLES)[0], device), torch.float32)
        _check_outputs(teaching, inputs)
        return _store_channels_last(teaching, inputs)


@dataclass(frozen=True)
class Teaching:
    """Copies of a teacher's networks on the device, frozen and in evaluation mode, which give its lessons.

    normalization: of the inputs as members get them. expected: as the networks do. classes: of the data. order: in
    which the networks get images, and have the weights of convolutions.
    """

    networks: nn.ModuleList
    lessons: Lessons
    normalization: Normalized
    expected: Normalized
    classes: int
    order: torch.memory_format = torch.contiguous_format

    def add_to(self, targets: Tensor, inputs: Inputs) -> Tensor:
        """Return the labels and the teacher's softened probabilities of a batch: (batch, 2, classes).

        targets: labels (batch,), or probabilities (batch, classes) of blended samples. inputs: as members get them.
        """
        taught = (self.log_probabilities(inputs) / self.lessons.temperature).softmax(-1)
        known = targets if targets.is_floating_point() else label_probabilities(targets, self.classes, taught.dtype)
        return torch.stack([known.to(taught.dtype), taught], dim=1)

    def log_probabilities(self, inputs: Inputs) -> Tensor:
        """Return logarithms of the teacher's calibrated probabilities up to a constant of the sample: (batch, classes).

        Of a teacher that knows more classes than the data have, those that they have.
        """
        logits = self.logits(inputs)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return combine_logs(logits)[:, : self.classes] / self.lessons.calibration

    @torch.no_grad()
    def logits(self, inputs: Inputs) -> Tensor:
        """Return the logits of all networks: (networks, batch, classes or more). inputs: as members get them."""
        return torch.cat([member_outputs(network, self._convert(inputs)) for network in self.networks])

    def loss(self, smoothing: float) -> Loss:
        """Return the loss of members that learn from this teacher. smoothing: of the labels."""
        lessons = self.lessons
        return partial(taught_cross_entropy, share=lessons.share, temperature=lessons.temperature, smoothing=smoothing)

    def _convert(self, inputs: Inputs) -> Any:
        """Copy inputs in the dtype and order of the teacher's networks, normalised as these expect."""
        if isinstance(inputs, Tensor) and inputs.is_floating_point() and self.normalization != self.expected:
            # Columns may be larger than half precision can hold before they are normalised.
            inputs = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
            inputs = self.normalization.undo(inputs) if isinstance(self.normalization, Normalization) else inputs
            inputs = self.expected(inputs) if isinstance(self.expected, Normalization) else inputs
        return map_inputs(self._copy, inputs)

    def _copy(self, x: Tensor) -> Tensor:
        """Copy one input in the dtype and order of the teacher's networks."""
        dtype = dtype_of(self.networks) if x.is_floating_point() else x.dtype
        return x.to(dtype, copy=True, memory_format=self.order if x.dim() == 4 else torch.contiguous_format)


def taught_cross_entropy(
    outputs: Tensor,
    targets: Tensor,
    share: float,
    temperature: float,
    smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the loss of this module's docstring; outputs: (batch, classes or more).

    targets: (batch, 2, classes) of `Teaching.add_to`; or labels (batch,), as in validation, where nobody teaches.
    reduction: over the samples; "none" gives the loss of each, (batch,).
    """
    if targets.dim() == 1:
        return smoothed_cross_entropy(outputs, targets, smoothing, reduction)
    labels, taught = targets.unbind(1)
    labels_loss = smoothed_cross_entropy(outputs, labels, smoothing, reduction)
    taught = F.pad(taught, (0, outputs.shape[1] - taught.shape[1]))
    divergence = F.kl_div((outputs / temperature).log_softmax(-1), taught, reduction="none").sum(-1)
    divergence = divergence.mean() if reduction == "mean" else divergence
    return (1 - share) * labels_loss + share * temperature**2 * divergence


def _check_outputs(teaching: Teaching, inputs: Inputs) -> None:
    """Raise an error unless a teacher gives logits for every class, and the same ones each time.

    inputs: samples as members get them.
    """
    device = tensors_in(inputs)[0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_generators(0, device)
        try:
            logits = teaching.logits(inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError  # TypeError: outputs are not one tensor
            raise kind(f"teacher fails on samples of data: {first_line(error)}") from error
        if logits.dim() != 3 or logits.shape[-1] < teaching.classes:
            raise ValueError(
                f"teacher must return logits (batch, {teaching.classes}), one for every class of data, not outputs of "
                f"shape {tuple(logits.shape[1:])}"
            )
        first, second = (teaching.log_probabilities(inputs) for _ in range(2))
    if first.softmax(-1).isnan().any():
        raise ValueError("teacher must give a probability to every class, but on samples of data it gives NaN")
    if not torch.allclose(first, second, rtol=CLOSE, atol=CLOSE):
        raise ValueError(
            "teacher must predict the same each time, but it draws random numbers in evaluation mode, such as "
            "MC-Dropout does"
        )


def _store_channels_last(teaching: Teaching, inputs: Inputs) -> Teaching:
    """Return a teacher with the weights of convolutions stored channels last, if it runs so on samples.

    One that flattens by `view` does not: it stays as it is.
    """
    networks = teaching.networks
    if not any(parameter.dim() == 4 for parameter in networks.parameters()):
        return teaching
    reordered = replace(teaching, order=torch.channels_last)
    try:
        networks.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        reordered.logits(inputs)
    except Exception as error:
        networks.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        log_fallback(f"the teacher's convolutions stay channels first, slower: {first_line(error)}")
        return teaching
    return reordered
