"""Store the weights of convolutions channels last, which hardware prefers, where a network can run so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import Inputs, call, tensors_in
from structured_ensembles.common.logs import log_once
from structured_ensembles.data.random_states import preserve_random_states
from structured_ensembles.networks.copying import clear_hooks, clone_model

logger = logging.getLogger(__name__)


@contextmanager
def channels_last(networks: Iterable[nn.Module], example: Inputs, tell: Callable[[str], None]) -> Iterator[None]:
    """Store weights channels last within the context, except those of networks that cannot run so.

    Outputs of convolutions are channels last too then, which fails in a network that flattens by `view`.
    tell: called with a sentence on why a network cannot.
    """
    switched = [network for network in networks if _runs_channels_last(network, example, tell)]
    try:
        for network in switched:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        yield
    finally:
        for network in switched:
            network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def channels_last_on_cpu(network: nn.Module, example: Inputs) -> AbstractContextManager[None]:
    """Store weights channels last within the context, as `channels_last` does, if the example lies on a CPU.

    For passes in float32, which a CPU computes faster so, pooling and batch norm most of all; on a GPU not measured.
    """
    is_on_cpu = tensors_in(example)[0].device.type == "cpu"
    return channels_last([network], example, partial(log_once, logger)) if is_on_cpu else nullcontext()


def _runs_channels_last(network: nn.Module, example: Inputs, tell: Callable[[str], None]) -> bool:
    """Try a network channels last, on a copy without hooks: a batch might change the network, a hook might count."""
    if not any(parameter.dim() == 4 for parameter in network.parameters()):
        return False
    try:
        trial = clone_model(network).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        clear_hooks(trial)
        for parameter in trial.parameters():  # gradients pass through the layers of a frozen network, too
            parameter.requires_grad_(parameter.is_floating_point())
        with preserve_random_states():  # dropout draws
            with torch.no_grad():
                call(trial.eval(), example)
            with torch.enable_grad():
                call(trial.train(), example).sum().backward()
    except Exception as error:
        reason = f"with channels last the network fails: {first_line(error)}"
        tell(f"weights of convolutions stay channels first, slower: {reason}")
        return False
    return True


def stored_channels_last(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return images stored channels last, without gaps, in a type; other tensors as they are."""
    if x.dim() != 4:
        return x
    # The first copies once, if at all; the second what is stored in that order but with gaps.
    cast = x.to(x.dtype if dtype is None else dtype, memory_format=torch.channels_last)
    return cast.contiguous(memory_format=torch.channels_last)
