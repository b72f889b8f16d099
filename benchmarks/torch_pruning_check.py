"""What Torch-Pruning makes of a model: its dependency graph, its pruned model, and whether that is exact."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from model_list import CLASSES
from structured_ensembles.checking.comparison import Difference, comparison_inputs, run_network
from structured_ensembles.checking.weights import randomize, remove_randomness
from structured_ensembles.common.inputs import call_arguments
from structured_ensembles.networks.copying import clone_model
from structured_ensembles.tracing.fake_model import first_line


def check_torch_pruning(model: nn.Module, example: Any, ratio: float = 0.5) -> dict[str, Any]:
    """Prune a copy of a model as Torch-Pruning's examples do; return a row.

    The classifier is ignored, and attention with a layer `qkv` gets its number of heads. The pruned model is
    compared in evaluation mode with the full one in which the pruned inputs of every layer have zero weights (and
    the pruned outputs of `qkv`, which no layer reads).
    """
    import torch_pruning as tp

    full = randomize(remove_randomness(clone_model(model))).eval()
    pruned = copy.deepcopy(full)
    inputs = comparison_inputs(example, 0, model)
    row: dict[str, Any] = {"parameters": _count(full), "built": False, "runs": False}
    attentions = [
        module
        for module in pruned.modules()
        if hasattr(module, "num_heads") and isinstance(getattr(module, "qkv", None), nn.Linear)
    ]
    try:
        pruner = tp.pruner.BasePruner(
            pruned,
            inputs,
            importance=tp.importance.MagnitudeImportance(p=2),
            pruning_ratio=ratio,
            ignored_layers=[module for module in pruned.modules() if _outputs_of(module) == CLASSES],
            num_heads={module.qkv: module.num_heads for module in attentions},
            output_transform=lambda outputs: outputs if isinstance(outputs, torch.Tensor) else list(outputs.values()),
        )
        row["built"] = True
        kept = _prune(tp, pruner, pruned)
    except Exception as error:  # its code may raise anything
        return {**row, "error": f"{type(error).__name__}: {first_line(error)}"}
    for module in attentions:  # as its examples do
        module.head_dim = module.qkv.out_features // (3 * module.num_heads)
        for name in ("attn_dim", "all_head_dim"):
            if hasattr(module, name):
                setattr(module, name, module.qkv.out_features // 3)
    row["left"] = _count(pruned)
    try:
        positional, keywords = call_arguments(inputs)
        with torch.no_grad():
            pruned(*positional, **keywords)
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {first_line(error)}"}
    row["runs"] = True
    try:
        outputs = [run_network(network, inputs, training=False) for network in (pruned, _mask(full, kept), full)]
        difference = Difference.of(*outputs)
        row |= {"relative": difference.relative, "effect": difference.effect}
        row["exact"] = difference.exact and row["left"] < row["parameters"]  # a model that stays as it is, is not cut
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {first_line(error)}"
    return row


Kept = dict[tuple[str, str], list[int]]  # by the name of a layer and "in" or "out": the original indices that are left


def _prune(tp: Any, pruner: Any, model: nn.Module) -> Kept:
    """Prune all groups; return which inputs and outputs of linear layers and convolutions are left."""
    names = {module: name for name, module in model.named_modules()}
    kept: Kept = {}
    for group in pruner.step(interactive=True):
        for dependency, indices in group:
            module = dependency.target.module
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                output = pruner.DG.is_out_channel_pruning_fn(dependency.handler)
                size = _outputs_of(module) if output else _inputs_of(module)
                place = (names[module], "out" if output else "in")
                left = kept.setdefault(place, list(range(size)))
                # Where its indices are wrong, its own pruning of this group fails.
                gone = {left[index] for index in tp._helpers.to_plain_idxs(indices) if index < len(left)}
                kept[place] = [index for index in left if index not in gone]
        group.prune()
    return kept


@torch.no_grad()
def _mask(full: nn.Module, kept: Kept) -> nn.Module:
    """Copy the full network with zero weights for all inputs that are not left, and for such outputs of `qkv`."""
    masked = clone_model(full)
    for (name, side), left in kept.items():
        module = masked.get_submodule(name)
        size = _outputs_of(module) if side == "out" else _inputs_of(module)
        gone = sorted(set(range(size)) - set(left))
        weight = module.weight
        if side == "out":
            if name.endswith("qkv"):
                weight[gone] = 0
                if module.bias is not None:
                    module.bias[gone] = 0
        elif isinstance(module, nn.modules.conv._ConvTransposeNd):
            weight[gone] = 0
        elif getattr(module, "groups", 1) == 1:
            weight[:, gone] = 0
        elif module.groups != module.in_channels:  # channels of a depthwise convolution are masked behind it
            width, filters = weight.shape[1], len(weight) // module.groups
            for channel in gone:
                rows = slice(channel // width * filters, (channel // width + 1) * filters)
                weight[rows, channel % width] = 0
    return masked


def _outputs_of(module: nn.Module) -> int | None:
    """Return the number of outputs of a linear layer or convolution; None for other modules."""
    return getattr(module, "out_features", getattr(module, "out_channels", None))


def _inputs_of(module: nn.Module) -> int:
    """Return the number of inputs of a linear layer or convolution."""
    return module.in_features if isinstance(module, nn.Linear) else module.in_channels


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
