"""Hooks that are part of a network: they compute with its tensors, and nobody watches by them.

The networks of some methods (rank-one factors, dropout) are any model with such hooks on its layers. Exports and
CUDA graphs follow them like the code of a layer; any other hook may do anything, and has to be called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

Hook = TypeVar("Hook", bound=Callable[..., Any])
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def part_of_network(hook: Hook) -> Hook:
    """Mark a forward hook, or forward pre-hook, that only computes with its layer's tensors, inputs and output."""
    hook.part_of_network = True  # type: ignore[attr-defined]
    return hook


def watching(hooks: Iterable[Any]) -> bool:
    """Tell whether any of these hooks is not part of its network."""
    return not all(getattr(hook, "part_of_network", False) for hook in hooks)


def has_watching_hooks(layer: nn.Module) -> bool:
    """Tell whether a layer has forward hooks that are not part of its network."""
    return any(watching(getattr(layer, kind).values()) for kind in FORWARD_HOOKS)
