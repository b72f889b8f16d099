"""How the weights of convolutions lie in memory: hardware prefers the channels last, where a network can take it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from structured_ensembles.ensemble import evaluation_mode


@contextmanager
def channels_last(networks: Iterable[nn.Module], example: Tensor) -> Iterator[None]:
    """While this lasts, weights lie channels last, except those of networks that cannot run so.

    What convolutions compute then lies channels last too, which a network that flattens by `view` does not take.
    """
    changed = []
    for network in networks:
        weights = [parameter for parameter in network.parameters() if parameter.dim() == 4]
        if weights:
            _store(weights, torch.channels_last)
            if _runs(network, example):
                changed += weights
            else:
                _store(weights, torch.contiguous_format)
    try:
        yield
    finally:
        _store(changed, torch.contiguous_format)


def _runs(network: nn.Module, example: Tensor) -> bool:
    try:
        with torch.no_grad(), evaluation_mode(network):
            network(example)
    except Exception:
        return False
    return True


def _store(weights: Iterable[nn.Parameter], order: torch.memory_format) -> None:
    for weight in weights:
        weight.data = weight.data.contiguous(memory_format=order)
