"""BatchEnsemble (Wen et al. 2020): members that share their weights and differ by rank-one factors.

Member i has the weight W ∘ (r_i s_iᵀ) in every linear layer and convolution, and its own bias. These weights are never
materialised: W (x ∘ s_i) ∘ r_i is the same, so that the rows of all members go through the shared layer in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.common.checks import check_choice, check_seed, check_whole
from structured_ensembles.common.devices import Device, device_of
from structured_ensembles.common.gradients import gradients_on
from structured_ensembles.common.inputs import (
    Inputs,
    batch_from,
    batch_size,
    call,
    check_one_tensor,
    join_batches,
    move_inputs,
    select_rows,
    tensors_in,
)
from structured_ensembles.common.member_rows import broadcast_per_member
from structured_ensembles.data import Data
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.data.losses import Loss
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import check_arguments, examine
from structured_ensembles.methods.layers import find_called_layers, get_layer
from structured_ensembles.networks.conversions import register_rebuilder
from structured_ensembles.networks.copying import clone_model, copy_with, dtype_of
from structured_ensembles.networks.hooks import part_of_network
from structured_ensembles.networks.provenance import copy_origin
from structured_ensembles.networks.rank_one import RankOneMembers
from structured_ensembles.resuming.folder import open_folder
from structured_ensembles.train import train
from structured_ensembles.training import Execution, ParameterRule, Recipe
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import OnEpoch
from structured_ensembles.training.recipe import recipe_for

Repeat = Literal["tile", "split"]
# As in the authors' code (Edward2, ResNet-32x4): the factors have no weight decay and half the learning rate.
FACTOR_RULES = tuple(
    ParameterRule(f"*.{name}_factors", rate_factor=0.5, weight_decay=0.0) for name in ("input", "output")
)
VECTORS = ("input_factors", "output_factors", "biases")  # s, r and the biases, each (members, channels)


def batch_ensemble(
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
    repeat: Repeat = "tile",
) -> Ensemble:
    """Train a BatchEnsemble whose members start from the model's weights, times random signs.

    The model is not changed.

    recipe: its weight decay does not apply to the factors, and they have half its learning rate, unless the recipe's
        rules say otherwise.
    repeat: in training every member sees the whole batch ("tile"), or each row goes to one member ("split"), which
        costs no more than to train one network.
    """
    check_arguments(model, data, quiet=quiet)
    seed, recipe, execution = check_seed(seed), recipe_for(data.task, recipe), execution_or_default(execution)
    data = examine(model, data, device, loss)
    example = data.example(dtype=dtype_of(model))
    layers = find_called_layers(model, example).all
    with gradients_on():  # factors made under inference mode could not be trained
        network = BatchEnsembleNetwork(model, layers, members, repeat, seed)
    _check_rows(network, example)
    settings = {"members": members, "seed": seed, "repeat": repeat}
    run = open_folder(
        folder,
        "batch-ensemble",
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
    recipe = replace(recipe, rules=(*FACTOR_RULES, *recipe.rules))
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


class BatchEnsembleNetwork(nn.Module):
    """Copy of `model` with rank-one factors, which computes the outputs of `members` networks.

    layers: the qualified names of the layers that get factors, drawn with `seed`: each is -1 or 1.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str], members: int, repeat: Repeat = "tile", seed: int = 0
    ) -> None:
        super().__init__()
        check_whole("members", members)
        check_choice("repeat", repeat, get_args(Repeat))
        if not layers:
            raise ValueError("model has no linear layer or convolution to add factors to: use another method for it")
        self.network = clone_model(model)
        self.num_members, self.repeat, self.layers = members, repeat, tuple(layers)
        generator = torch.Generator().manual_seed(derive_seed(seed, "factors"))
        for name in self.layers:
            _add_factors(get_layer(self.network, name), members, generator)
        copy_origin(self, model)

    @property
    def conversion(self) -> dict[str, Any]:
        """Return the arguments that rebuild it from its base, for JSON; see `networks.conversions`."""
        arguments = {"members": self.num_members, "repeat": self.repeat, "layers": list(self.layers)}
        return {"method": "batch_ensemble", **arguments}

    @property
    def rank_one(self) -> RankOneMembers | None:
        """Return the description by which all members' training becomes a program; None if their rows are split."""
        if self.repeat == "split":
            return None
        return RankOneMembers(self.network, "network.", self.layers, self.num_members)

    @property
    def member_vectors(self) -> set[str]:
        """Return the names of the tensors that hold a vector for each member."""
        return {f"network.{layer}.{vector}" for layer in self.layers for vector in VECTORS}

    def forward(self, *x: Tensor, **named_inputs: Tensor) -> Tensor:
        """Map (batch, …) to (members, batch, classes), or (1, batch, classes) in training if rows are split."""
        inputs = batch_from(x, named_inputs)
        members = self.num_members
        if not (self.training and self.repeat == "split"):
            return check_one_tensor(call(self.network, join_batches([inputs] * members))).unflatten(0, (members, -1))
        batch = batch_size(inputs)
        if batch % members == 0:
            return check_one_tensor(call(self.network, inputs))[None]
        filled_rows, row_positions = _assign_rows(batch, members, tensors_in(inputs)[0].device)
        return check_one_tensor(call(self.network, select_rows(inputs, filled_rows)))[row_positions][None]

    def extra_repr(self) -> str:
        return f"members={self.num_members}, repeat={self.repeat}"


@register_rebuilder("batch_ensemble")
def _rebuild(base: nn.Module, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Rebuild the network of a file from its base; raise a ValueError if its tensors have another number of members."""
    members, layers = arguments["members"], arguments["layers"]
    vectors = [tensors.get(f"network.{layer}.{vector}") for layer in layers for vector in VECTORS]
    if any(len(vector) != members for vector in vectors if vector is not None):
        raise ValueError(f"it is converted to {members} members in {len(layers)} layers, which its tensors do not have")
    return BatchEnsembleNetwork(base, **arguments)


def _add_factors(layer: nn.Module, members: int, generator: torch.Generator) -> None:
    """Add the members' factors and biases to a layer, in place; its type and weight stay."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    linear = isinstance(layer, nn.Linear)
    sizes = (layer.in_features, layer.out_features) if linear else (layer.in_channels, layer.out_channels)
    for name, size in zip(VECTORS, sizes, strict=False):
        if weight.is_meta:  # only the structure is needed, see `artifact`
            layer.register_parameter(name, nn.Parameter(weight.new_empty(members, size)))  # type: ignore[call-overload]
            continue
        signs = 2 * torch.randint(2, (members, size), generator=generator) - 1  # type: ignore[arg-type]
        layer.register_parameter(name, nn.Parameter(signs.to(weight.device, weight.dtype)))
    bias = layer.bias
    if isinstance(bias, Tensor):
        layer.biases = nn.Parameter(bias.detach().repeat(members, 1), requires_grad=bias.requires_grad)
        layer.bias = None  # type: ignore[assignment]
    layer.register_forward_pre_hook(_scale_inputs)
    layer.register_forward_hook(_scale_outputs)


@part_of_network
def _scale_inputs(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    factors = _broadcast_vectors(layer, "input_factors", inputs[0])
    grouped = inputs[0].unflatten(0, (len(factors), -1)) * factors
    return (grouped.flatten(0, 1), *inputs[1:])


@part_of_network
def _scale_outputs(layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    factors = _broadcast_vectors(layer, "output_factors", output)
    grouped = output.unflatten(0, (len(factors), -1)) * factors
    if "biases" in layer._parameters:
        grouped = grouped + _broadcast_vectors(layer, "biases", output)
    return grouped.flatten(0, 1)


def _broadcast_vectors(layer: nn.Module, name: str, x: Tensor) -> Tensor:
    """Shape the members' vectors to broadcast over the inputs or outputs `x` of a layer, unflattened by member."""
    # In the dtype of x: a float32 factor would promote a bfloat16 product.
    return broadcast_per_member(
        layer.get_parameter(name).to(x.dtype), x, -1 if isinstance(layer, nn.Linear) else 1 - x.dim()
    )


def _assign_rows(batch: int, members: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Split rows among members as evenly as possible, then pad every share to the same size by repeating a row.

    Returns the row of the batch at each position, (members * share,), and the position of each row, (batch,).
    """
    row, member = torch.arange(batch, device=device), torch.arange(members, device=device)[:, None]
    share = -(-batch // members)
    starts = -(-member * batch // members)  # member i has the rows from starts[i] up to starts[i + 1]
    ends = -(-(member + 1) * batch // members)
    row_at = torch.minimum(starts + torch.arange(share, device=device), ends - 1).clamp_min(0)
    member_of = row * members // batch
    return row_at.flatten(), member_of * share + row - starts[member_of, 0]


@torch.no_grad()
def _check_rows(network: BatchEnsembleNetwork, example: Inputs) -> None:
    """Raise a ValueError unless the model keeps the rows of a batch apart, which members in one pass rely on."""
    example = move_inputs(example, device_of(network))
    members_output = call(network.eval(), example)[-1]

    def select_last(name: str, tensor: Tensor) -> Tensor:
        return tensor[-1:] if name in network.member_vectors else tensor

    last = copy_with(network, select_last, lambda _, tensor: tensor)
    alone_output: Tensor = call(last.network, example)  # type: ignore[arg-type]
    if not torch.allclose(
        members_output, alone_output, rtol=1e-2, atol=1e-2 * float(alone_output.abs().max()), equal_nan=True
    ):
        raise ValueError(
            "model mixes the rows of a batch, or does not keep them in the first dimension (sequences with "
            "batch_first=False?), so the members of a BatchEnsemble would mix too: put the batch in the first dimension"
        )
