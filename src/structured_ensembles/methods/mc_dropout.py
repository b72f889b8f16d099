"""MC-Dropout (Gal and Ghahramani 2016): dropout stays on in prediction, and every dropout mask is a member.

Predictions are repeatable: whether an element is dropped follows from the seed, the layer, the number of the sample,
the position of the element and the contents of the input, by a hash. So the prediction of an input does not depend on
its batch, other inputs get other masks, and no random state is read or changed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.common.checks import check_seed, check_share, check_whole
from structured_ensembles.common.devices import Device
from structured_ensembles.common.hashing import as_int32, mix_bits
from structured_ensembles.common.inputs import batch_from, call, check_one_tensor, join_batches
from structured_ensembles.data import Data
from structured_ensembles.data.losses import Loss
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import check_arguments, examine
from structured_ensembles.methods.layers import find_called_layers, get_layer
from structured_ensembles.methods.sample_keys import MAXIMUM, sample_keys
from structured_ensembles.networks.conversions import register_rebuilder
from structured_ensembles.networks.copying import clone_model, dtype_of
from structured_ensembles.networks.hooks import part_of_network
from structured_ensembles.networks.provenance import copy_origin
from structured_ensembles.resuming.folder import open_folder
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
    """Train a copy of the model with dropout, which starts from the model's weights. The model is not changed.

    members: how many dropout masks a prediction draws.
    probability: of an element of the output of a hidden linear layer or convolution to be dropped.
    """
    check_arguments(model, data, quiet=quiet)
    seed, recipe, execution = check_seed(seed), recipe_for(data.task, recipe), execution_or_default(execution)
    data = examine(model, data, device, loss)
    layers = find_called_layers(model, data.example(dtype=dtype_of(model))).hidden
    network = DropoutNetwork(model, layers, members, probability, seed)
    settings = {"members": members, "seed": seed, "probability": probability}
    run = open_folder(
        folder,
        "mc-dropout",
        model,
        data,
        recipe=recipe,
        execution=execution,
        loss=loss,
        loss_name=loss_name,
        **settings,
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
    """Copy of `model` with dropout after each of `layers` (qualified names), which predicts with `members` masks."""

    def __init__(
        self, model: nn.Module, layers: Sequence[str], members: int, probability: float = 0.25, seed: int = 0
    ) -> None:
        super().__init__()
        check_whole("members", members)
        check_share("probability", probability)
        if not layers:
            raise ValueError(
                "model has no hidden linear layer or convolution to add dropout to: use another method for it"
            )
        self.network = clone_model(model)
        self.num_members, self.probability, self.seed, self.layers = members, probability, seed, tuple(layers)
        for number, name in enumerate(self.layers):
            layer = get_layer(self.network, name)
            layer.sampled_dropout = SampledDropout(probability, number)
            layer.register_forward_hook(_drop)
        copy_origin(self, model)

    @property
    def conversion(self) -> dict[str, Any]:
        """Return the arguments that rebuild it from its base, for JSON; see `networks.conversions`."""
        arguments = {"members": self.num_members, "probability": self.probability, "seed": self.seed}
        return {"method": "mc_dropout", **arguments, "layers": list(self.layers)}

    def forward(self, *x: Tensor, **named_inputs: Tensor) -> Tensor:
        """Map (batch, …) to (members, batch, classes); in training with one dropout mask, (1, batch, classes)."""
        inputs = batch_from(x, named_inputs)
        if self.training:
            return check_one_tensor(call(self.network, inputs))[None]
        members = self.num_members
        _current.keys, _current.calls = sample_keys(inputs, members, self.seed), Counter()
        try:
            return check_one_tensor(call(self.network, join_batches([inputs] * members))).unflatten(0, (members, -1))
        finally:
            _current.keys = None

    def extra_repr(self) -> str:
        return f"members={self.num_members}, probability={self.probability}, seed={self.seed}"


@register_rebuilder("mc_dropout")
def _rebuild(base: nn.Module, arguments: Mapping[str, Any], _tensors: Mapping[str, Tensor]) -> nn.Module:
    """Rebuild the network of a file from its base; dropout has no tensors to check."""
    return DropoutNetwork(base, **arguments)


class _ForwardPass(threading.local):
    """Prediction of a `DropoutNetwork` in this thread; several threads may predict with one network.

    keys: one for each mask and row, (members * batch,) int32; None outside of a prediction.
    calls: of each layer so far, so that no two calls of a layer drop the same elements.
    """

    keys: Tensor | None = None
    calls: Counter[int]


_current = _ForwardPass()


class SampledDropout(nn.Module):
    """Dropout by the random state in training, and by a hash of the keys of a prediction in evaluation.

    number: of the layer among those with dropout.
    """

    def __init__(self, probability: float, number: int) -> None:
        super().__init__()
        self.probability, self.number = probability, number

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of x (members * batch, …); the shape stays."""
        if self.training:
            return F.dropout(x, self.probability)
        keys = _current.keys
        if keys is None:
            raise RuntimeError(
                "the network inside a DropoutNetwork has no dropout keys: call the DropoutNetwork itself"
            )
        # One row of positions per key, also where the model has folded other dimensions into the batch dimension.
        positions = torch.arange(x.numel() // len(keys), dtype=torch.int32, device=x.device)
        salt = as_int32(self.number * 0x9E3779B9 + _current.calls[self.number] * 0x85EBCA6B)
        _current.calls[self.number] += 1
        hashed = mix_bits(keys[:, None] + mix_bits(positions + salt))
        hashed &= MAXIMUM
        kept = (hashed >= int(self.probability * MAXIMUM)).to(x.dtype)
        return x * kept.view(x.shape) / (1 - self.probability)


@part_of_network
def _drop(layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Apply the layer's dropout to its output, as a forward hook."""
    return layer.sampled_dropout(output)  # type: ignore[operator]
