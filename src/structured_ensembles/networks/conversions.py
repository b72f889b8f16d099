"""Rebuilders of converted networks: base networks that were turned into several members, such as a BatchEnsemble.

A converted network has a property `conversion`: the name of its rebuilder under "method", the number of its "members",
the names of its "layers", and the other arguments, all as JSON values. The module that defines such a network registers
its rebuilder here. A file can only choose among these: a name in it is looked up, never imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

# From the base network, the arguments and the tensors of the file to the converted network.
Rebuild = Callable[[nn.Module, Mapping[str, Any], Mapping[str, Tensor]], nn.Module]

_REBUILDERS: dict[str, Rebuild] = {}


def register_rebuilder(name: str) -> Callable[[Rebuild], Rebuild]:
    """Register a function as the rebuilder of this name; raise a ValueError if another module has taken the name."""

    def register(rebuild: Rebuild) -> Rebuild:
        known = _REBUILDERS.get(name, rebuild)
        if known.__module__ != rebuild.__module__:  # a module may be imported again
            raise ValueError(f"{known.__module__} has registered a rebuilder {name!r} already: choose another name")
        _REBUILDERS[name] = rebuild
        return rebuild

    return register


def find_rebuilder(name: Any) -> Rebuild:
    """Return the rebuilder of this name; raise a ValueError for an unknown name."""
    if not isinstance(name, str) or name not in _REBUILDERS:
        raise ValueError(f"it is converted by {name!r}, which this version does not know")
    return _REBUILDERS[name]
