"""Teaching: members learn from the probabilities of a trained network or ensemble, beside the labels.

Knowledge distillation (Hinton, Vinyals and Dean 2015) with a consistent teacher (Beyer et al. 2022), which sees every
batch as the member does: cropped, flipped, blended. With a member's logits z and the label y of a sample, the teacher's
probabilities p, its share w and the temperature T:

    loss = (1 − w) · cross-entropy(z, y) + w · T² · KL(p(T) ‖ softmax(z / T)),   p(T) ∝ p^(1/T)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.checks import check_number, check_type, to_python_number
from structured_ensembles.common.inputs import Inputs, map_inputs, move_inputs
from structured_ensembles.data import Data, Normalization
from structured_ensembles.data.kinds import Normalizations
from structured_ensembles.data.losses import Loss, label_probabilities, smoothed_cross_entropy
from structured_ensembles.data.splits import take_samples
from structured_ensembles.networks.copying import clone_model, dtype_of
from structured_ensembles.prediction.combination import combine_logs, member_outputs
from structured_ensembles.storage.fingerprints import digest_module

SAMPLES = 8  # on which a teacher is tried before training
Normalized = Normalization | Normalizations | None


@dataclass(frozen=True)
class Teacher:
    """A trained network or ensemble, and how members learn from it: `train(…, teacher=Teacher(ensemble, share=0.5))`.

    network: a classifier that returns logits (batch, classes), or an `Ensemble`, whose calibrated probabilities teach.
        It is copied, and never changes. A network gets the data as members do, normalised; an ensemble as it was
        trained.
    share: of the teacher in the loss, from 0 to 1; the labels have the rest.
    temperature: 1 teaches the probabilities as they are; higher ones give more weight to the small ones.

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
        if not self.temperature:
            raise ValueError("temperature must be above 0, not 0")


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
        """Copy the networks to the device, frozen, and try them on samples of the data."""
        assert data.num_classes is not None, "teachers are for classification"
        applied = data.normalization
        expected = applied if self.normalization == "data" else self.normalization
        if applied != expected and Normalizations in (type(applied), type(expected)):
            raise ValueError(
                "teacher was trained with another normalisation of its several inputs: give data the same, by "
                "normalization="
            )
        copies = nn.ModuleList(map(clone_model, self.networks)).eval().requires_grad_(False).to(device)
        if device.type == "cuda":  # the layout of the batches there
            copies.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        teaching = Teaching(copies, self, applied, expected, data.num_classes)
        _try_on(teaching, data, device)
        return teaching


@dataclass(frozen=True)
class Teaching:
    """Lessons that are ready to be given: networks are copies on the device, in evaluation mode.

    normalization: of the inputs as members get them. expected: as the networks do. classes: of the data.
    """

    networks: nn.ModuleList
    lessons: Lessons
    normalization: Normalized
    expected: Normalized
    classes: int

    def add_to(self, targets: Tensor, inputs: Inputs) -> Tensor:
        """Return the labels and the teacher's softened probabilities of a batch: (batch, 2, classes).

        targets: labels (batch,), or probabilities (batch, classes) of blended samples. inputs: as members get them.
        """
        taught = (self.log_probabilities(inputs) / self.lessons.temperature).softmax(-1)
        known = targets if targets.is_floating_point() else label_probabilities(targets, self.classes, taught.dtype)
        return torch.stack([known.to(taught.dtype), taught], dim=1)

    @torch.no_grad()
    def log_probabilities(self, inputs: Inputs) -> Tensor:
        """Return logarithms of the teacher's calibrated probabilities up to a constant of the sample: (batch, classes).

        Of a teacher that knows more classes than the data have, those that they have.
        """
        outputs = torch.cat([member_outputs(network, self._convert(inputs)) for network in self.networks])
        logits = outputs[..., : self.classes].to(torch.promote_types(outputs.dtype, torch.float32))
        return combine_logs(logits) / self.lessons.calibration

    def loss(self, smoothing: float) -> Loss:
        """Return the loss of members that learn from this teacher. smoothing: of the labels."""
        lessons = self.lessons
        return partial(taught_cross_entropy, share=lessons.share, temperature=lessons.temperature, smoothing=smoothing)

    def _convert(self, inputs: Inputs) -> Any:
        """Copy inputs in the dtype of the teacher's networks, normalised as these expect."""
        dtype = dtype_of(self.networks)
        if self.normalization != self.expected and isinstance(inputs, Tensor):
            raw = inputs.to(dtype)
            raw = self.normalization.undo(raw) if isinstance(self.normalization, Normalization) else raw
            return self.expected(raw) if isinstance(self.expected, Normalization) else raw
        return map_inputs(lambda x: x.to(dtype, copy=True) if x.is_floating_point() else x.clone(), inputs)


def taught_cross_entropy(
    outputs: Tensor, targets: Tensor, share: float, temperature: float, smoothing: float = 0.0
) -> Tensor:
    """Compute the loss of this module's docstring, a mean over samples; outputs: (batch, classes or more).

    targets: (batch, 2, classes) of `Teaching.add_to`; or labels (batch,), as in validation, where nobody teaches.
    """
    if targets.dim() == 1:
        return smoothed_cross_entropy(outputs, targets, smoothing)
    labels, taught = targets.unbind(1)
    labels_loss = smoothed_cross_entropy(outputs, labels, smoothing)
    taught = F.pad(taught, (0, outputs.shape[1] - taught.shape[1]))
    divergence = F.kl_div((outputs / temperature).log_softmax(-1), taught, reduction="batchmean")
    return (1 - share) * labels_loss + share * temperature**2 * divergence


def _try_on(teaching: Teaching, data: Data, device: torch.device) -> None:
    """Raise a ValueError unless a teacher gives logits for every class, and the same ones each time."""
    inputs, _ = take_samples(data.train, SAMPLES)
    prepared = data.prepare(move_inputs(inputs, device), dtype_of(teaching.networks))
    with torch.no_grad():
        outputs = member_outputs(teaching.networks[0], prepared)
    if outputs.dim() != 3 or outputs.shape[-1] < teaching.classes:
        raise ValueError(
            f"teacher must return logits (batch, {teaching.classes}), one for every class of data, not outputs of "
            f"shape {tuple(outputs.shape[1:])}"
        )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        first, second = (teaching.log_probabilities(prepared) for _ in range(2))
    if not torch.equal(first, second):
        raise ValueError(
            "teacher must predict the same each time, but it draws random numbers in evaluation mode, such as "
            "MC-Dropout does"
        )
