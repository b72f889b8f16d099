"""with_head(): a copy of a network whose last layer is a new one, for the classes of other data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.checks import check_seed, check_type, check_whole
from structured_ensembles.common.devices import device_of, fork_generators, seed_generators
from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import Inputs, call, move_inputs
from structured_ensembles.networks.copying import clone_model, copy_for_trial, dtype_of
from structured_ensembles.networks.provenance import ATTRIBUTE, Origin, origin_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
REMEDY = "replace its last layer yourself, or give example= if it has one"


def with_head(model: nn.Module, classes: int, *, example: Inputs | None = None, seed: int = 0) -> nn.Module:
    """Copy a network and replace its classifier by one for `classes` outputs, with newly drawn weights.

    The classifier is what `reset_classifier` of timm's models replaces; otherwise the last linear layer or convolution
    of kernel size 1: the last to run if there is an example, the last in `modules()` if not. All other weights are
    copied, and what is frozen (`requires_grad=False`) stays frozen; batch norm's running statistics still follow the
    data. The model is not changed.

    example: a batch as the network gets it, such as `data.example()`; then the outputs are checked, too.
    seed: of the new layer's weights.

        model = torchvision.models.resnet18()
        model.load_state_dict(torch.load("resnet18.pth", weights_only=True))  # or safetensors.torch.load_file
        model.requires_grad_(False)  # to train the new layer only; leave it out to tune all of them
        model = se.with_head(model, 10)
        data = se.Data.from_arrays(x, y, normalization=se.Normalization.imagenet())
        se.structured_ensemble(model, data, trained=True, selection="mirrored", recipe=se.Recipe.named("tune"))

    `trained=True` is needed: with a new classifier the accuracy is that of chance, and tells nothing of the rest.
    """
    check_type("model", model, nn.Module)
    check_whole("classes", classes)
    seed = check_seed(seed)
    copied = clone_model(model)
    device = device_of(model)
    with fork_generators(device):
        seed_generators(seed, device)
        if example is not None:
            _check_example(model, example)
        if callable(getattr(copied, "reset_classifier", None)):
            _reset_classifier(copied, classes)
        else:
            _replace_layer(copied, _find_classifier(copied, example), classes)
    if example is not None:
        _check_outputs(copied, example, classes)
    _rename_origin(copied, classes)
    return copied


def _check_example(model: nn.Module, example: Inputs) -> None:
    """Raise a ValueError unless the model runs on an example."""
    try:
        with torch.no_grad():
            call(copy_for_trial(model), move_inputs(example, device_of(model)))
    except Exception as error:
        raise ValueError(
            f"example must be a batch as the model gets it, such as data.example(), not {_describe(example)}, which it "
            f"cannot run on: {first_line(error)}"
        ) from error


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _reset_classifier(model: Any, classes: int) -> None:
    """Let a model of timm replace its classifier, by one on the same device and of the same dtype."""
    device, dtype = device_of(model), dtype_of(model)
    model.reset_classifier(classes)
    heads = model.get_classifier()  # a pair, for a distilled network
    for head in heads if isinstance(heads, tuple) else (heads,):
        head.to(device, dtype)


def _find_classifier(model: nn.Module, example: Inputs | None) -> str:
    """Return the qualified name of the classifier."""
    candidates = {name: module for name, module in model.named_modules() if _is_layer(module)}
    order = list(candidates) if example is None else _layers_run(model, example)
    if not order or not _can_classify(candidates[order[-1]]):
        last = f"{order[-1]}, {candidates[order[-1]]}" if order else "none"
        raise ValueError(
            "model must end in a linear layer or a convolution of kernel size 1 for its classifier to be replaced, but "
            f"its last layer is {last}: {REMEDY}"
        )
    return order[-1]


def _layers_run(model: nn.Module, example: Inputs) -> list[str]:
    """Name the linear layers and convolutions in the order in which they run on an example."""
    trial = copy_for_trial(model)
    names: list[str] = []

    def record(name: str) -> Any:
        return lambda *_: names.append(name)

    for name, module in trial.named_modules():
        if _is_layer(module):
            module.register_forward_hook(record(name))
    with torch.no_grad():
        call(trial, move_inputs(example, device_of(trial)))
    return names


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd)


def _can_classify(layer: nn.Module) -> bool:
    """Tell whether a layer may be a classifier."""
    if isinstance(layer, CONVOLUTIONS):
        return layer.groups == 1 and set(layer.kernel_size) == {1}
    return isinstance(layer, nn.Linear)


def _replace_layer(model: nn.Module, name: str, classes: int) -> None:
    """Replace a linear layer or convolution of a model by one with `classes` outputs."""
    old: Any = model.get_submodule(name)
    settings = {"bias": old.bias is not None, "device": old.weight.device, "dtype": old.weight.dtype}
    new: nn.Module
    if isinstance(old, nn.Linear):
        new = nn.Linear(old.in_features, classes, **settings)
    else:
        plain = next(kind for kind in CONVOLUTIONS if isinstance(old, kind))
        new = plain(old.in_channels, classes, 1, stride=old.stride, **settings)
    new.train(old.training)
    if not name:
        raise ValueError("model is a single layer: there is no network to keep, make a new layer instead")
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, new)


def _check_outputs(model: nn.Module, example: Inputs, classes: int) -> None:
    """Raise a ValueError unless a model gives `classes` outputs for each sample of an example."""
    with torch.no_grad():
        outputs = call(copy_for_trial(model), move_inputs(example, device_of(model)))
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or outputs.shape[1] != classes:
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"model must give (batch, {classes}) once its last layer is replaced, but it gives {shape}: the last layer "
            "is not its classifier, so replace that yourself"
        )


def _rename_origin(model: nn.Module, classes: int) -> None:
    """Record the new number of classes in how the model is made; forget that where it has no such argument."""
    origin = origin_of(model)
    if origin is not None:
        known = ":" not in origin.name or "num_classes" in origin.arguments
        renamed = Origin(origin.name, {**origin.arguments, "num_classes": classes}) if known else None
        setattr(model, ATTRIBUTE, renamed)
