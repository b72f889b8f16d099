"""MC-Dropout (Gal and Ghahramani 2016): dropout stays on in prediction, and every draw of it is a member.

Predictions are repeatable: whether an element is dropped follows from the seed, the layer, the number of the sample,
the position of the element and the contents of the input, by a hash. So an input gets the same answer in whatever batch
it comes, other inputs get other draws, and no random state is read or changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.checks import check_share, check_whole, checked_seed
from structured_ensembles.common.devices import Device
from structured_ensembles.common.inputs import Inputs, batch_from, call, joined, one_tensor, tensors_in
from structured_ensembles.data import Data
from structured_ensembles.data.losses import Loss
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import examined
from structured_ensembles.methods.layers import called_layers, layer_of
from structured_ensembles.networks.conversions import rebuilds
from structured_ensembles.networks.copying import clone_of, dtype_of
from structured_ensembles.networks.provenance import remember_origin
from structured_ensembles.resuming.identity import open_folder
from structured_ensembles.train import train
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import OnEpoch
from structured_ensembles.training.recipe import recipe_for


def mc_dropout(
    model: nn.Module,
    data: Data,
    members: int = 5,
    *,
    recipe: Recipe | None = None,
    execution: Execution | None = None,
    device: Device = "auto",
    seed: int = 0,
    folder: str | Path | None = None,
    on_epoch: OnEpoch | None = None,
    quiet: bool = False,
    loss: Loss | None = None,
    loss_name: str | None = None,
    probability: float = 0.25,
) -> Ensemble:
    """One network of the model's size, which starts from its weights. The model is not changed.

    members: how many samples a prediction draws.
    probability: of an element of the output of a hidden linear layer or convolution to be dropped.
    """
    seed, recipe, execution = checked_seed(seed), recipe_for(data.task, recipe), execution_or_default(execution)
    data = examined(model, data, device)
    layers = called_layers(model, data.example(dtype=dtype_of(model))).hidden
    network = DropoutNetwork(model, layers, members, probability, seed)
    what = {"members": members, "seed": seed, "probability": probability}
    run = open_folder(
        folder, "mc-dropout", model, data, recipe=recipe, execution=execution, loss=loss, loss_name=loss_name, **what
    )
    ensemble = Ensemble([network])
    checkpoint = run.file("checkpoint.safetensors")
    train(
        ensemble,
        data,
        recipe,
        device,
        seed,
        execution=execution,
        loss=loss,
        checkpoint=checkpoint,
        on_epoch=on_epoch,
        quiet=quiet,
    )
    return ensemble


class DropoutNetwork(nn.Module):
    """A copy of `model` with dropout behind each of `layers` (qualified names), which stands for `members` samples."""

    def __init__(
        self, model: nn.Module, layers: Sequence[str], members: int, probability: float = 0.25, seed: int = 0
    ) -> None:
        super().__init__()
        check_whole("members", members)
        check_share("probability", probability)
        if not layers:
            raise ValueError("model has no hidden linear layer or convolution whose output could be dropped")
        self.network = clone_of(model)
        self.num_members, self.probability, self.seed, self.layers = members, probability, seed, tuple(layers)
        for number, name in enumerate(self.layers):
            layer = layer_of(self.network, name)
            layer.sampled_dropout = SampledDropout(probability, number)
            layer.register_forward_hook(_drop)
        remember_origin(self, model)

    @property
    def conversion(self) -> dict[str, Any]:
        """Return how it was made, as JSON has it; see `networks.conversions`."""
        arguments = {"members": self.num_members, "probability": self.probability, "seed": self.seed}
        return {"method": "mc_dropout", **arguments, "layers": list(self.layers)}

    def forward(self, *x: Tensor, **named: Tensor) -> Tensor:
        """(batch, …) to (members, batch, classes); in training one draw of dropout, (1, batch, classes)."""
        inputs = batch_from(x, named)
        if self.training:
            return one_tensor(call(self.network, inputs))[None]
        members = self.num_members
        keys = _sample_keys(inputs, members, self.seed)
        dropouts = [part for part in self.network.modules() if isinstance(part, SampledDropout)]
        for dropout in dropouts:
            dropout.keys, dropout.calls = keys, 0
        try:
            return one_tensor(call(self.network, joined([inputs] * members))).unflatten(0, (members, -1))
        finally:
            for dropout in dropouts:
                dropout.keys, dropout.calls = None, 0

    def extra_repr(self) -> str:
        return f"members={self.num_members}, probability={self.probability}, seed={self.seed}"


@rebuilds("mc_dropout")
def _rebuilt(base: nn.Module, arguments: Mapping[str, Any], _tensors: Mapping[str, Tensor]) -> nn.Module:
    """Convert the base network of a file again; dropout has no tensors that could tell more."""
    return DropoutNetwork(base, **arguments)


class SampledDropout(nn.Module):
    """Dropout: by the random state in training, by a hash of `keys` in evaluation.

    keys: one for each sample and row, (members * batch,) int32; `DropoutNetwork` sets them for the time of a pass.
    calls: how often the layer was called in this pass, so that no two calls drop the same elements.
    """

    def __init__(self, probability: float, number: int) -> None:
        super().__init__()
        self.probability, self.number = probability, number
        self.keys: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """(members * batch, …) to the same shape."""
        if self.training:
            return F.dropout(x, self.probability)
        if self.keys is None:
            raise RuntimeError("call the DropoutNetwork, not the network inside it: it decides what is dropped")
        # One row of positions per key, also where the model has folded other dimensions into that of the batch.
        positions = torch.arange(x.numel() // len(self.keys), dtype=torch.int32, device=x.device)
        salt = _as_int32(self.number * 0x9E3779B9 + self.calls * 0x85EBCA6B)
        self.calls += 1
        hashed = mixed(self.keys[:, None] + mixed(positions + salt))
        hashed &= MAXIMUM
        kept = (hashed >= int(self.probability * MAXIMUM)).to(x.dtype)
        return x * kept.view(x.shape) / (1 - self.probability)


def _drop(layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return layer.sampled_dropout(output)  # type: ignore[operator]


MAXIMUM = 2**31 - 1


def mixed(x: Tensor) -> Tensor:
    """A hash of int32 numbers in which every bit depends on every bit (lowbias32, by Chris Wellons).

    Integers wrap around on every device, so that all agree.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        shifted = x >> shift  # the only new memory, which costs more than the arithmetic
        shifted &= 2 ** (32 - shift) - 1
        shifted ^= x
        shifted *= _as_int32(factor)
        x = shifted
    return x


def _sample_keys(inputs: Inputs, members: int, seed: int) -> Tensor:
    """A number for each sample of each row, (members * batch,) int32, from the row's contents."""
    first, *others = map(_contents, tensors_in(inputs))
    contents = first
    for own in others:
        contents = own + mixed(contents)
    samples = torch.arange(members, dtype=torch.int32, device=contents.device)
    return mixed(contents + mixed(mixed(samples) + _as_int32(seed))[:, None]).flatten()


def _contents(x: Tensor) -> Tensor:
    """Hash each row: (batch,) int32."""
    rows = x.detach().reshape(len(x), -1)
    # To eight bits, which devices that normalise pixels with other rounding errors still agree on.
    bits = (rows.bfloat16().view(torch.int16) if rows.is_floating_point() else rows).to(torch.int32)
    positions = torch.arange(bits.shape[1], dtype=torch.int32, device=x.device)
    return mixed(bits + mixed(positions)).sum(1, dtype=torch.int32)


def _as_int32(number: int) -> int:
    """The number modulo 2^32, between -2^31 and 2^31."""
    return (number + 2**31) % 2**32 - 2**31
