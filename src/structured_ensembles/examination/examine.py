"""examine(): checks of a network and its data against each other before training."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from structured_ensembles.common.checks import check_flags, check_type
from structured_ensembles.common.devices import Device, device_of, fork_generators
from structured_ensembles.common.gradients import gradients_on
from structured_ensembles.common.inputs import Inputs, call, move_inputs
from structured_ensembles.common.plurals import counted
from structured_ensembles.data import Data
from structured_ensembles.data.dataset import check_data
from structured_ensembles.data.losses import Loss
from structured_ensembles.data.splits import take_samples
from structured_ensembles.examination.embedding_ids import check_data_ids
from structured_ensembles.examination.pretrained import find_normalization
from structured_ensembles.examination.trained import output_shape
from structured_ensembles.networks.copying import copy_for_trial, dtype_of

RESHAPING = ("View", "Reshape", "Squeeze", "Unsqueeze", "Clone", "Copy", "Alias", "Transpose", "Permute", "Slice")


def examine(model: nn.Module, data: Data, device: Device = "auto", loss: Loss | None = None) -> Data:
    """Return the data with the normalisation that the model expects, marked as examined; examined data are unchanged.

    See `find_normalization` and `warn_about_probabilities`. Ids outside the model's embedding raise a ValueError, and
    fewer outputs than classes, unless the loss is the user's own.
    """
    if data.examined:
        return data
    check_data_ids(model, data)
    check_outputs(model, data, loss)
    check_own_parameters(model, data)
    data = replace(find_normalization(model, data, device), examined=True)
    warn_about_probabilities(model, data)
    return data


def check_arguments(model: nn.Module, data: Data, **flags: bool) -> None:
    """Raise a TypeError unless a method's first two arguments are a network and a `Data`, and its flags are bools."""
    check_type("model", model, nn.Module)
    check_data(data)
    check_flags(**flags)


def check_outputs(model: nn.Module, data: Data, loss: Loss | None) -> None:
    """Raise a ValueError unless a model gives a logit for every class, at least; the loss may be the user's own."""
    shape = output_shape(model, data) if data.task == "classification" and loss is None else None
    if shape is None:
        return
    if len(shape) != 2:
        raise ValueError(
            f"model must return logits (batch, classes), as a sample has one label, not {('batch', *shape[1:])}"
        )
    outputs = shape[1]
    if outputs < data.num_classes:
        raise ValueError(
            f"model has {counted(outputs, 'output')}, but data has {counted(data.num_classes, 'class')}: it needs one "
            f"for each class, also for two; with_head(model, {data.num_classes}) gives it a new classifier"
        )


def check_own_parameters(network: nn.Module, data: Data) -> None:
    """Raise a ValueError if a copy of the network does not compute with the copy's parameters.

    That happens if `forward` looks its network up in a global variable: all members would be the user's network.
    """
    if not any(parameter.requires_grad for parameter in network.parameters()):
        return
    used = True
    with suppress(Exception):  # training explains better why a network does not fit the data
        inputs, _ = take_samples(data.train, 8)
        copied = copy_for_trial(network)
        for parameter in copied.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        device = device_of(copied)
        with fork_generators(device), gradients_on():
            outputs: Tensor = call(copied, data.prepare(move_inputs(inputs, device), dtype_of(copied)))
            parameters = [parameter for parameter in copied.parameters() if parameter.requires_grad]
            gradients = torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
            used = any(gradient is not None for gradient in gradients)
    if not used:
        raise ValueError(
            "model cannot be copied: a copy of it computes with the parameters of another network, such as one that "
            "`forward` finds in a global variable. Let `forward` use the layers of `self`"
        )


def warn_about_probabilities(network: nn.Module, data: Data) -> None:
    """Warn if a classifier ends in a softmax or a sigmoid. The outputs of a log-softmax are logits, too."""
    if data.task != "classification":
        return
    ending = None
    with suppress(Exception):  # training explains better why a network does not fit the data
        inputs, _ = take_samples(data.train, 8)
        inputs = move_inputs(inputs, device_of(network))
        ending = _final_activation(copy_for_trial(network), data.prepare(inputs, dtype_of(network)))
    if ending is not None:
        warnings.warn(
            f"the model ends in a {ending}, but its outputs are used as logits: the loss and `predict_proba` apply a "
            "softmax themselves, so that the model learns slowly and its probabilities are much too even. Remove the "
            f"{ending} from the model",
            stacklevel=4,
        )


def _final_activation(network: nn.Module, example: Inputs) -> str | None:
    """Return "softmax" or "sigmoid" if a network ends in it, by its outputs for an example and their last operation."""
    device = device_of(network)
    with fork_generators(device), gradients_on():
        for parameter in network.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        outputs: Tensor = call(network, example)
        values = outputs.detach().double()
        tolerance = 1e-4 if outputs.dtype in (torch.float32, torch.float64) else 2e-2
        if values.shape[-1] > 1 and bool((values >= 0).all() & ((values.sum(-1) - 1).abs() < tolerance).all()):
            return "softmax"
        operation = outputs.grad_fn
        while operation is not None and operation.name().startswith(RESHAPING):
            operation = operation.next_functions[0][0]
        return "sigmoid" if operation is not None and operation.name().startswith("SigmoidBackward") else None
