"""Inputs that a trained network cannot take: said in one sentence, before a pruned layer says it in its own terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.copying import bystander_of
from structured_ensembles.data import Data
from structured_ensembles.data.splits import TensorSplit

TABLES = (nn.Embedding, nn.EmbeddingBag)


def check_shape(x: Tensor, shape: tuple[int, ...] | None, ids: bool) -> None:
    """Compare a batch (samples, …) with the shape of one input in training; None: nothing is known.

    Columns and channels have to be as many. Images may be of another size, sequences of another length.
    """
    if shape is None:
        return
    fixed = 0 if ids or len(shape) == 2 else 1 if len(shape) in (1, 3) else len(shape)
    given = tuple(x.shape[1:])
    if len(given) != len(shape) or given[:fixed] != shape[:fixed]:
        raise ValueError(f"x must be a batch of {_described(shape, ids)}, not of shape {given}")


def check_ids(x: Tensor, limit: int | None) -> None:
    """limit: how many rows the network's embedding has; None: nothing is known."""
    if limit is None or x.numel() == 0:
        return
    low, high = int(x.min()), int(x.max())
    if low < 0 or high >= limit:
        raise ValueError(f"x must be ids from 0 to {limit - 1}, as many as the network knows, not {low} to {high}")


@contextmanager
def shape_is_blamed(x: Tensor, shape: tuple[int, ...] | None, ids: bool) -> Iterator[None]:
    """Name the shape of `x` in what a network raises, if that is not the one that it was trained on."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        given = tuple(x.shape[1:])
        if shape is None or given == shape or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"x must be a batch of {_described(shape, ids)}; the network does not take shape {given}: {error}"
        ) from error


def _described(shape: tuple[int, ...], ids: bool) -> str:
    """One input, in words."""
    if ids:
        return f"ids of shape {shape}"
    if len(shape) == 1:
        return f"inputs of shape {shape}, {shape[0]} columns"
    if len(shape) == 3:
        return f"inputs of shape {shape}, {shape[0]} channel{'s' * (shape[0] != 1)}"
    return f"inputs of shape {shape}"


def check_data_ids(network: nn.Module, data: Data) -> None:
    """Raise an error that names the range, if data in memory have ids that the network does not know."""
    limit = embedding_size(network, data)
    for label in ("train", "validation", "test"):
        split = getattr(data, label)
        if limit is None or not isinstance(split, TensorSplit):
            continue
        ids = split.inputs[split.index]
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= limit):
            raise ValueError(
                f"the model's embedding knows the ids from 0 to {limit - 1}, but those of the {label} split reach from "
                f"{int(ids.min())} to {int(ids.max())}: give the model a larger one"
            )


def embedding_size(network: nn.Module, data: Data) -> int | None:
    """How many different ids a network takes: the rows of the embedding that gets them as they are; None if none does.

    Of several, such as those of words and of positions, only those that get the ids count.
    """
    if not data.ids:
        return None
    sizes: list[int] = []
    with suppress(Exception), torch.no_grad():  # a network that does not fit the data says so when it is trained
        example = data.example()
        values, shape = example.unique(), tuple(example.shape[1:])

        def look(table: Any, inputs: tuple[Any, ...]) -> None:
            given: Any = inputs[0] if inputs else None
            alike = isinstance(given, Tensor) and tuple(given.shape[1:]) == shape
            if alike and torch.equal(given.unique(), values):
                sizes.append(table.num_embeddings)

        bystander = bystander_of(network).cpu()  # an id out of range would break the CUDA context
        for table in bystander.modules():
            if isinstance(table, TABLES):
                table.register_forward_pre_hook(look)
        bystander(example)
    return min(sizes, default=None)
