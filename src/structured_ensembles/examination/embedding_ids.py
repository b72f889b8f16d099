"""Check ids, such as tokens, against the embeddings of the network that gets them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.inputs import call, each, rows_of, tensors_in
from structured_ensembles.data import Data
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.networks.copying import bystander_of

TABLES = (nn.Embedding, nn.EmbeddingBag)


def check_data_ids(network: nn.Module, data: Data) -> None:
    """Raise an error that names the range, if data in memory have ids that the network does not know."""
    splits = {label: getattr(data, label) for label in ("train", "validation", "test")}
    stored = {label: split for label, split in splits.items() if isinstance(split, TensorSplit)}
    several = any(not isinstance(split.inputs, Tensor) for split in stored.values())
    limits = embedding_size(network, data) if data.ids or several else None
    if limits is None:
        return
    for label, split in stored.items():

        def check(own: Tensor, limit: int | None, label: str = label) -> None:
            if limit is None or not own.numel():
                return
            low, high = int(own.min()), int(own.max())
            if low < 0 or high >= limit:
                raise ValueError(
                    f"the model's embedding knows the ids from 0 to {limit - 1}, but those of the {label} split reach "
                    f"from {low} to {high}: give the model a larger one"
                )

        each(check, rows_of(split.inputs, split.index), limits)


def embedding_size(network: nn.Module, data: Data) -> Any:
    """Count the ids that a network knows: the rows of the embedding that gets them unchanged; None if none does.

    Of several, such as those of words and of positions, only those that get the ids count. Of several inputs: a number
    or None for each.
    """
    inputs = each(Tensor.cpu, data.example())
    several = not isinstance(inputs, Tensor)
    if not (data.ids or several):
        return None
    parts = tensors_in(inputs)
    sizes: list[list[int]] = [[] for _ in parts]

    def look(table: Any, arguments: tuple[Any, ...]) -> None:
        given: Any = arguments[0] if arguments else None
        for number, part in enumerate(parts):
            if isinstance(given, Tensor) and (given.shape[1:], given.dtype) == (part.shape[1:], part.dtype):
                alike = torch.equal(given[: len(part)], part) if several else torch.equal(given.unique(), part.unique())
                sizes[number] += [table.num_embeddings] * alike

    with suppress(Exception), torch.no_grad():  # a network that does not fit the data says so when it is trained
        bystander = bystander_of(network).cpu()  # an id out of range would break the CUDA context
        for table in bystander.modules():
            if isinstance(table, TABLES):
                table.register_forward_pre_hook(look)
        call(bystander, inputs)
    limits = iter([min(own, default=None) for own in sizes])
    return each(lambda _: next(limits), inputs)
