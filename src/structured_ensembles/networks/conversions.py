"""Networks that stand for several members: a file names how the base network was converted to them.

A network that was converted has a property `conversion`: the name of its rebuilder under "method", the number of its
"members", the names of its "layers", and the other arguments, as JSON has them. The module of such a network enters its
rebuilder here. A file can only choose among these: a name in it is looked up, never imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

# Base network, arguments and the tensors that the file has for the result, to the converted network.
Rebuild = Callable[[nn.Module, Mapping[str, Any], Mapping[str, Tensor]], nn.Module]

_REBUILDERS: dict[str, Rebuild] = {}


def rebuilds(name: str) -> Callable[[Rebuild], Rebuild]:
    """Enter a function as the rebuilder of this name; raise a ValueError if another module has one of that name."""

    def enter(rebuild: Rebuild) -> Rebuild:
        known = _REBUILDERS.get(name, rebuild)
        if known.__module__ != rebuild.__module__:  # the same module may be imported anew
            raise ValueError(f"the rebuilder {name!r} is that of {known.__module__} already; choose another name")
        _REBUILDERS[name] = rebuild
        return rebuild

    return enter


def rebuilder(name: Any) -> Rebuild:
    """Return the rebuilder of this name; raise a ValueError for a name that nothing has entered."""
    if not isinstance(name, str) or name not in _REBUILDERS:
        raise ValueError(f"it is converted by {name!r}, which this version does not know")
    return _REBUILDERS[name]
