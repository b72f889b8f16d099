"""How a network was made: what a saved ensemble needs to know in order to build it again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torch import nn

ATTRIBUTE = "structured_ensembles_origin"  # where a network keeps its Origin; members cut out of it keep it too
Parameters = ParamSpec("Parameters")
Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class Origin:
    """A name of the zoo or `package.module:function`, and the arguments it was given."""

    name: str
    arguments: Mapping[str, Any]


def remembered(function: Callable[Parameters, Network]) -> Callable[Parameters, Network]:
    """Let the networks that a function of the zoo makes remember its name and arguments."""

    @functools.wraps(function)
    def make(*positional: Parameters.args, **named: Parameters.kwargs) -> Network:
        network = function(*positional, **named)
        arguments = inspect.signature(function).bind(*positional, **named).arguments
        setattr(network, ATTRIBUTE, Origin(function.__name__, dict(arguments)))
        return network

    return make


def origin_of(network: nn.Module) -> Origin | None:
    """How the network, or the one it was cut out of, was made, if it is known."""
    return getattr(network, ATTRIBUTE, None)


def remember_origin(network: nn.Module, model: nn.Module) -> None:
    """Let a network that was made from `model` say how that was made."""
    setattr(network, ATTRIBUTE, origin_of(model))
