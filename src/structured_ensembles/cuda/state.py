"""The state that a captured step changes, listed from the modules, optimizers and tensors that it works on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def tensors_of(*things: Any) -> Iterator[Tensor]:
    """Yield every tensor in `things`, each once, in an order that stays the same.

    A module has its parameters and buffers; an optimizer has its parameters, its state (momentum and the like) and
    options that are tensors, such as a learning rate. Mappings and other iterables are searched through. None and plain
    numbers hold no tensor. `captured` asks for the state again and again, since a step may add to it: give it a
    function, such as `lambda: tensors_of(network, optimizer)`. Without things, the step changes nothing.
    """
    seen: set[int] = set()
    for tensor in _all_tensors(things):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _all_tensors(thing: Any) -> Iterator[Tensor]:
    """Yield the tensors in one thing, some of them perhaps twice."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, nn.Module):
        yield from thing.parameters()
        yield from thing.buffers()
    elif isinstance(thing, torch.optim.Optimizer):
        for group in thing.param_groups:
            yield from _all_tensors(group)
        yield from _all_tensors(thing.state)
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _all_tensors(value)
    elif isinstance(thing, Iterable) and not isinstance(thing, str):
        for item in thing:
            yield from _all_tensors(item)
    elif not isinstance(thing, bool | int | float | str | None):
        raise TypeError(f"things must be modules, optimizers, tensors, or lists and dicts of these, not {thing!r}")
