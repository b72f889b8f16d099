"""How the weights of convolutions lie in memory: hardware prefers the channels last, where a network can take it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from structured_ensembles.common.inputs import Inputs, call
from structured_ensembles.networks.copying import clear_hooks, clone_model
from structured_ensembles.tracing.fake_model import first_line


@contextmanager
def channels_last(networks: Iterable[nn.Module], example: Inputs, tell: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, weights lie channels last, except those of networks that cannot run so.

    What convolutions compute then lies channels last too, which a network that flattens by `view` does not take.
    tell: gets a sentence on why a network cannot.
    """
    weights = [weight for network in networks if _can(network, example, tell) for weight in _weights(network)]
    try:
        _store(weights, torch.channels_last)
        yield
    finally:
        _store(weights, torch.contiguous_format)


def _can(network: nn.Module, example: Inputs, tell: Callable[[str], None]) -> bool:
    """Tried on a copy without hooks: the network might learn something from its first batch, a hook might count."""
    if not _weights(network):
        return False
    try:
        trial = clone_model(network)
        _store(_weights(trial), torch.channels_last)
        clear_hooks(trial)
        with torch.no_grad():
            call(trial.eval(), example)
        with torch.enable_grad():
            call(trial.train(), example).sum().backward()
    except Exception as error:
        reason = f"with channels last the network fails: {first_line(error)}"
        tell(f"weights of convolutions stay channels first, slower: {reason}")
        return False
    return True


def _weights(network: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.dim() == 4]


def _store(weights: Iterable[nn.Parameter], order: torch.memory_format) -> None:
    for weight in weights:
        weight.data = weight.data.contiguous(memory_format=order)
