"""Checks of the arguments that the search and the saliency take."""

from __future__ import annotations

from typing import get_args

from torch import nn

from structured_ensembles.channels import ChannelGraph, check_traced
from structured_ensembles.common.checks import check_choice, check_number, check_type, check_whole
from structured_ensembles.common.plurals import counted
from structured_ensembles.data import Data
from structured_ensembles.data.dataset import check_data
from structured_ensembles.data.losses import Loss, check_training_loss
from structured_ensembles.diversity import Diversity
from structured_ensembles.scaling import Initial, Placement, check_prunable, check_settings


def check_walk(model: nn.Module, graph: ChannelGraph, data: Data, loss: Loss | None, batch_size: int) -> None:
    """Raise an error unless the arguments that search and saliency take are of the right type, and fit each other."""
    check_type("model", model, nn.Module)
    check_type("graph", graph, ChannelGraph, "trace(model, example) gives one")
    check_data(data)
    check_prunable(graph)
    check_traced(model, graph)
    check_training_loss(loss)
    check_whole("batch_size", batch_size)


def check_search(
    strength: float,
    diversity: Diversity | None,
    epochs: int,
    initial: Initial,
    placement: Placement,
    epochs_argument: str = "epochs",
) -> None:
    """Raise a ValueError unless the search's own settings are valid. epochs_argument: the caller's name of `epochs`."""
    check_number("strength", strength)
    check_choice("diversity", diversity, (*get_args(Diversity), None))
    check_whole(epochs_argument, epochs, 0)
    check_settings(initial, placement)


def check_task(graph: ChannelGraph, data: Data) -> None:
    """Raise a ValueError if the network has fewer outputs than there are classes."""
    if data.task == "classification" and graph.output_shape and data.num_classes > graph.output_shape[-1]:
        raise ValueError(
            f"data has {counted(data.num_classes, 'class')}, but the model has "
            f"{counted(graph.output_shape[-1], 'output')}: it needs one for each class, "
            "also for two classes and a loss of your own"
        )
