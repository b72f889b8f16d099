"""How a network was made, and what it was cut out of: what a saved ensemble needs to know to build it again."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from structured_ensembles.networks.copying import tensors_of

ATTRIBUTE = "structured_ensembles_origin"  # where a network keeps its Origin; members cut out of it keep it too
SHAPES = "structured_ensembles_base_shapes"  # where a network that was cut keeps the shapes from before
Shapes = dict[str, tuple[int, ...]]  # of tensors, by name
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


def warn_if_unnamed(network: nn.Module, argument: str) -> None:
    """Warn before a network is saved whose file cannot say how to make it. argument: what loading it will need."""
    if origin_of(network) is None:
        warnings.warn(
            f"the file cannot say how its network is made: to load it will need {argument}=. Made by "
            "from_factory('package.module:function', …), it can be loaded with trust_code=True instead",
            stacklevel=4,
        )


def remember_base(network: nn.Module, model: nn.Module) -> None:
    """Let a network that was cut out of `model` say which shapes that had."""
    setattr(network, SHAPES, base_shapes(model))


def base_shapes(network: nn.Module) -> Shapes:
    """Shapes of the network that this one, or any part of it, was cut out of; its own where nothing was cut."""
    before: Shapes = {}
    for prefix, part in network.named_modules():
        kept: Shapes = getattr(part, SHAPES, None) or {}
        before |= {f"{prefix}.{name}" if prefix else name: shape for name, shape in kept.items()}
    return {name: before.get(name, shape) for name, shape in _shapes(network).items()}


def distinct_bases(networks: Iterable[nn.Module]) -> list[Shapes]:
    """List the shapes of what the networks were cut out of: one entry if that was the same network."""
    bases: list[Shapes] = []
    for network in networks:
        found = base_shapes(network)
        bases += [] if found in bases else [found]
    return bases


def read_bases(value: Any) -> list[Shapes]:
    """Read what `distinct_bases` gave and JSON kept; files of earlier versions have nothing there."""
    return [{str(name): tuple(map(int, shape)) for name, shape in dict(own).items()} for own in value or ()]


def restore_base(network: nn.Module, source: nn.Module, bases: Sequence[Shapes]) -> None:
    """Let a member that was loaded by means of `source` say what it was cut out of, as the file has it."""
    if len(bases) <= 1:  # of different networks, members keep their own
        setattr(network, SHAPES, bases[0] if bases else base_shapes(source))


def check_shapes(model: nn.Module, members: Sequence[Mapping[str, Tensor]], bases: Sequence[Shapes]) -> None:
    """Raise unless every tensor of `model` has the sizes of the network that members were cut out of, or of a member.

    members: the tensors of each, by name. bases: the shapes before; files of earlier versions have none, and any
        network from which the members may have been cut is as good as another.
    """
    own, before = _shapes(model), base_shapes(model)
    for name in own.keys() & members[0].keys():
        small = [tuple(member[name].shape) for member in members if name in member]
        whole = [base[name] for base in bases if name in base]
        # One size at a time: members may have got heads of another size after they were cut
        fits = any(_is_made_of(shape, [*small, *whole]) for shape in (own[name], before[name]))
        if not fits and not (not bases and all(_is_within(shape, own[name]) for shape in small)):
            expected = (whole or small)[0]
            raise ValueError(f"{name} has the shape {own[name]} in the given model, and must have {expected}")


def _shapes(network: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(network).items()}


def _is_made_of(shape: Sequence[int], known: Sequence[Sequence[int]]) -> bool:
    """Whether each of its sizes is that of a known shape."""
    alike = [other for other in known if len(other) == len(shape)]
    return all(any(other[axis] == size for other in alike) for axis, size in enumerate(shape))


def _is_within(small: Sequence[int], large: Sequence[int]) -> bool:
    return len(small) == len(large) and all(one <= other for one, other in zip(small, large, strict=True))
