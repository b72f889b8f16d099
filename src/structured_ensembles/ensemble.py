"""Ensemble: several networks that predict together, and know what they do not know."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from structured_ensembles.checks import check_choice, check_type
from structured_ensembles.copying import device_of, dtype_of, evaluation_mode
from structured_ensembles.data import Data, Normalization
from structured_ensembles.data.arrays import as_inputs, stack_samples
from structured_ensembles.data.dataset import Task, prepared
from structured_ensembles.data.kinds import Kinds, Normalizations
from structured_ensembles.data.splits import as_batch
from structured_ensembles.history import History
from structured_ensembles.inputs import check_ids, check_several, check_shape, embedding_size, shape_is_blamed
from structured_ensembles.replays import Replays
from structured_ensembles.scaling import one_tensor
from structured_ensembles.selection import Subnet
from structured_ensembles.several import Inputs, Shape, batch_from, batch_size, call, is_several, moved, pieces
from structured_ensembles.units import Units

Combine = Literal["mean", "logits", "vote"]
COMBINE = ("mean", "logits", "vote")


@dataclass(frozen=True)
class Uncertainty:
    """How unsure an ensemble is of each sample, shapes (samples,).

    entropy: of the mean prediction, in nats. mutual_information: the part of it that comes from the members'
        disagreement.
    disagreement: the share of pairs of members that name different classes.
    """

    entropy: Tensor
    mutual_information: Tensor
    disagreement: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.to_dict()[name]

    def to_dict(self) -> dict[str, Tensor]:
        return dict(vars(self))


class Ensemble(nn.Module):
    """Networks with the same inputs and outputs.

    networks: the members. One network may stand for several, see `member_outputs`.
    subnets: what each was cut out of the base network, where it was.
    classes, task, normalization: of the data they were trained on; `train` fills them in.
    threshold: an entropy above which a prediction is better discarded; `train` sets it from the validation split.
    units: of a regression's members, which may give values of mean 0 and deviation 1; what the ensemble gives is always
        as the targets are. `train` decides.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        *,
        subnets: Sequence[Subnet] | None = None,
        classes: Sequence[str] = (),
        task: Task = "classification",
        normalization: Normalization | Normalizations | None = None,
        threshold: float | None = None,
        units: Units | None = None,
    ) -> None:
        super().__init__()
        if isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList):
            raise TypeError("networks must be a list of networks, not one of them: Ensemble([network])")
        networks = list(networks)
        if not networks:
            raise ValueError("networks must hold at least one network")
        for network in networks:
            check_type("each of networks", network, nn.Module)
        if subnets is not None and len(subnets) != len(networks):
            raise ValueError(f"there are {len(subnets)} subnets for {len(networks)} networks")
        self.members = nn.ModuleList(networks)
        self.subnets = None if subnets is None else tuple(subnets)
        self.classes = tuple(classes)
        self.task: Task = task
        self.normalization = normalization
        self.threshold = threshold
        self.units = units
        self.input_shape: Any = None  # of one input, a tuple of sizes; of several, a tuple or dict of such
        self.input_kinds: Kinds | None = None  # what each of several inputs holds
        self.ids = False  # whether inputs are whole numbers, such as tokens
        self.id_limit: Any = None  # they must be below; of several inputs, one or None for each
        self.target_shape: tuple[int, ...] | None = None  # of one target of a regression
        self.history: History | None = None  # of its training
        self.replays = Replays()

    def __len__(self) -> int:
        return sum(getattr(member, "num_members", 1) for member in self.members)

    def forward(self, *x: Any, **named: Any) -> Tensor:
        """Inputs as users have them, pixels in [0,1] or uint8, (batch, …), to outputs (members, batch, classes).

        Several inputs come as a tuple or a dict, or as the arguments that the members take.
        On a GPU, without gradients, members run side by side, and shapes that come often do so as a CUDA graph.
        """
        inputs = batch_from(x, named)
        outputs = self.replays.outputs(self, inputs)
        if outputs is None:
            prepared = self.prepare(inputs)
            outputs = torch.cat([member_outputs(member, prepared) for member in self.members])
        return outputs if self.units is None else self.units.restored(outputs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.units is not None:
            destination[f"{prefix}units"] = torch.tensor([self.units.deviation, *self.units.mean], dtype=torch.double)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        found = state_dict.pop(f"{prefix}units", None)
        self.units = None if found is None else Units(tuple(found[1:].tolist()), float(found[0]))
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _apply(self, fn: Any, recurse: bool = True) -> Ensemble:
        """Weights move to another place, device or type."""
        self.replays.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return]

    def prepare(self, x: Inputs) -> Any:
        """Inputs as the members get them: floats, normalised; or ids."""
        return prepared(x, dtype_of(self), self.normalization, self.ids, self.input_kinds)

    def adopt(self, data: Data) -> None:
        """Take over what a saved ensemble must know of its data: classes, task, normalisation, shapes, range of ids."""
        self.classes, self.task, self.normalization = data.classes, data.task, data.normalization
        self.input_shape, self.ids, self.target_shape = data.shape, data.ids, data.target_shape
        self.input_kinds = data.kinds if is_several(self.input_shape) else None
        known = self.ids or self.input_kinds is not None
        self.id_limit = embedding_size(self.members[0], data) if known else None
        if data.task != "regression":
            self.units = None

    # Prediction -----------------------------------------------------------------------------------------------------

    def logits(self, x: Any, batch_size: int = 512) -> Tensor:
        """Outputs (members, samples, classes) for arrays, tensors, datasets or loaders, in evaluation mode.

        x: for networks of several inputs a tuple or dict of arrays, or a dataset or loader of such.
        """
        with torch.inference_mode(), evaluation_mode(self):
            outputs = [self._outputs(batch) for batch in _batches(x, batch_size, self.ids, self.input_shape)]
        return torch.cat(outputs, dim=1).clone()

    def predict_proba(self, x: Any, combine: Combine = "mean", batch_size: int = 512) -> Tensor:
        """Probabilities (samples, classes): the mean of the members' probabilities, of their logits, or their votes."""
        check_choice("combine", combine, COMBINE)
        self._check_classification("predict_proba")
        return combined(self.logits(x, batch_size), combine)

    def predict(self, x: Any, combine: Combine = "mean", batch_size: int = 512) -> Tensor:
        """Labels (samples,); for regression the mean of the members' values, in the shape of the targets."""
        if self.task == "regression":
            return self._like_targets(self.logits(x, batch_size).mean(0))
        return self.predict_proba(x, combine, batch_size).argmax(-1)

    def uncertainty(self, x: Any, batch_size: int = 512) -> Uncertainty:
        """How unsure the ensemble is of each sample."""
        self._check_classification("uncertainty")
        return uncertainty_of(self.logits(x, batch_size))

    def spread(self, x: Any, batch_size: int = 512) -> Tensor:
        """For regression: the standard deviation of the members' values, in the shape of the targets."""
        return self._like_targets(self.logits(x, batch_size).std(0, correction=0))

    def _outputs(self, x: Any) -> Tensor:
        """Of a batch (samples, …) such as it was trained on: (members, samples, …), on the CPU."""
        if not isinstance(x, Tensor) or is_several(self.input_shape):
            check_several(x, self.input_shape, self.input_kinds, self.id_limit)
        else:
            check_shape(x, self.input_shape, self.ids)
        if self.ids and isinstance(x, Tensor):
            check_ids(x, self.id_limit)
        with shape_is_blamed(x, self.input_shape, self.ids):
            return self(moved(x, device_of(self))).cpu()  # type: ignore[no-any-return]

    def _like_targets(self, values: Tensor) -> Tensor:
        """Values of samples (samples, …) in the shape that targets have, if they are as many."""
        shape = None if self.target_shape is None else (len(values), *self.target_shape)
        return values if shape is None or math.prod(shape) != values.numel() else values.reshape(shape)

    def _check_classification(self, method: str) -> None:
        if self.task != "classification":
            raise ValueError(f"{method} is for classification; for regression there are predict and spread")

    # Size and storage -----------------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def overhead(self, base: nn.Module) -> float:
        """Its trainable parameters over those of one base network."""
        own, one = (sum(p.numel() for p in module.parameters() if p.requires_grad) for module in (self, base))
        if one == 0:
            raise ValueError("base must have parameters that require gradients, but has none")
        return own / one

    def save(self, path: str | Path, dtype: Literal["float32", "float16", "int8"] = "float32") -> int:
        """Write one safetensors file; returns its size in bytes. See `artifact.save`."""
        from structured_ensembles.artifact import save

        return save(self, path, dtype)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None, trust_code: bool = False) -> Ensemble:
        """Read a file that `save` wrote; no pickle. See `artifact.load`."""
        from structured_ensembles.artifact import load

        return load(path, model, trust_code)


def member_outputs(network: nn.Module, inputs: Inputs) -> Tensor:
    """What the members that `network` stands for make of inputs (batch, …): shape (members, batch, …).

    Most networks are one member. One that has a number `num_members` returns the outputs of all of them, stacked; in
    training it may return fewer, such as one, if that is how it learns.
    """
    outputs = one_tensor(call(network, inputs))
    return outputs if hasattr(network, "num_members") else outputs[None]


def combined(logits: Tensor, combine: Combine = "mean") -> Tensor:
    """Probabilities (samples, classes) of an ensemble from its members' logits (members, samples, classes)."""
    if combine == "mean":
        return logits.softmax(-1).mean(0)
    if combine == "logits":
        return logits.mean(0).softmax(-1)
    return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype).mean(0)


def uncertainty_of(logits: Tensor) -> Uncertainty:
    """From the members' logits (members, samples, classes)."""
    probabilities = logits.softmax(-1)
    entropy = entropy_of(probabilities.mean(0))
    members = len(logits)
    votes = nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).sum(0)  # (samples, classes)
    agreeing = (votes * (votes - 1)).sum(-1) / max(members * (members - 1), 1)
    disagreement = 1 - agreeing if members > 1 else torch.zeros_like(entropy)
    information = (entropy - entropy_of(probabilities).mean(0)).clamp_min(0)
    return Uncertainty(entropy, information, disagreement)


def entropy_of(probabilities: Tensor) -> Tensor:
    """In nats, over the last dimension."""
    return -torch.special.xlogy(probabilities, probabilities).sum(-1)


def _batches(x: Any, size: int, ids: bool, shape: Shape | None) -> Iterator[Any]:
    if isinstance(x, DataLoader):
        yield from (_without_targets(batch, shape) for batch in x)
    elif hasattr(x, "batches"):  # a split of `Data`
        for inputs, _ in x.batches(size):
            yield inputs
    else:
        inputs = stack_samples("x", x)[0] if isinstance(x, Dataset) else as_inputs("x", x, ids)
        if batch_size(inputs) == 0:
            raise ValueError("x has no samples")
        yield from pieces(inputs, size)


def _without_targets(batch: Any, shape: Shape | None) -> Any:
    """The inputs of what a loader gives: (inputs, targets), a dict with or without "labels", or inputs alone."""
    if not is_several(shape):
        return batch[0] if isinstance(batch, list | tuple) else batch
    if isinstance(batch, Mapping):
        return {name: own for name, own in batch.items() if name != "labels"}
    with suppress(TypeError):
        inputs, _ = as_batch(batch)
        if not isinstance(inputs, Tensor):
            return inputs
    return tuple(batch) if isinstance(batch, list) else batch  # a list of tensors, of as many inputs
