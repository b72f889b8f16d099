"""Check of ids, such as tokens, against the embeddings of the network that gets them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.inputs import call, map_inputs, tensors_in
from structured_ensembles.data import Data
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.networks.copying import copy_for_trial

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def check_data_ids(network: nn.Module, data: Data) -> None:
    """Raise a ValueError if data in memory have ids outside the range of the network's embedding."""
    splits = {label: getattr(data, label) for label in ("train", "validation", "test")}
    stored = {label: split for label, split in splits.items() if isinstance(split, TensorSplit)}
    several = any(not isinstance(split.inputs, Tensor) for split in stored.values())
    limits = embedding_size(network, data) if data.ids or several else None
    if limits is None:
        return
    for label, split in stored.items():

        def check(stored: Tensor, limit: int | None, label: str = label, index: Tensor = split.index) -> None:
            if limit is None or not stored.numel() or not len(index):
                return
            ids = stored[index]
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= limit:
                raise ValueError(
                    f"the model's embedding knows the ids from 0 to {limit - 1}, but those of the {label} split reach "
                    f"from {low} to {high}: give the model a larger one"
                )

        map_inputs(check, split.inputs, limits)


def embedding_size(network: nn.Module, data: Data) -> Any:
    """Return the number of rows of the embedding that gets the ids unchanged; None if there is no such embedding.

    Embeddings that get something else, such as positions, do not count. For several inputs, return a number or None for
    each.
    """
    inputs = map_inputs(Tensor.cpu, data.example())
    several = not isinstance(inputs, Tensor)
    if not (data.ids or several):
        return None
    tensors = tensors_in(inputs)
    sizes: list[list[int]] = [[] for _ in tensors]

    def record_size(embedding: Any, arguments: tuple[Any, ...]) -> None:
        ids: Any = arguments[0] if arguments else None
        for number, tensor in enumerate(tensors):
            if isinstance(ids, Tensor) and (ids.shape[1:], ids.dtype) == (tensor.shape[1:], tensor.dtype):
                pair = (ids[: len(tensor)], tensor) if several else (ids.unique(), tensor.unique())
                sizes[number] += [embedding.num_embeddings] * torch.equal(*pair)

    with suppress(Exception), torch.no_grad():  # training explains better why a network does not fit the data
        copied = copy_for_trial(network).cpu()  # an id out of range would break the CUDA context
        for module in copied.modules():
            if isinstance(module, EMBEDDINGS):
                module.register_forward_pre_hook(record_size)
        call(copied, inputs)
    limits = iter([min(candidates, default=None) for candidates in sizes])
    return map_inputs(lambda _: next(limits), inputs)
