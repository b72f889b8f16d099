"""Provenance of a network: how it was made and what it was cut out of, so that a saved ensemble can be rebuilt."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from structured_ensembles.networks.state import saved_tensors

ATTRIBUTE = "structured_ensembles_origin"  # holds a network's Origin; members cut out of it have it too
SHAPES = "structured_ensembles_base_shapes"  # holds the shapes that a network had before it was cut
Shapes = dict[str, tuple[int, ...]]  # of tensors, by name
Parameters = ParamSpec("Parameters")
Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class Origin:
    """The function that made a network, of the zoo or `package.module:function`, and its arguments."""

    name: str
    arguments: Mapping[str, Any]


def record_origin(function: Callable[Parameters, Network]) -> Callable[Parameters, Network]:
    """Decorate a function of the zoo so that its networks carry its name and arguments."""

    @functools.wraps(function)
    def make(*positional: Parameters.args, **keywords: Parameters.kwargs) -> Network:
        network = function(*positional, **keywords)
        arguments = inspect.signature(function).bind(*positional, **keywords).arguments
        setattr(network, ATTRIBUTE, Origin(function.__name__, dict(arguments)))
        return network

    return make


def origin_of(network: nn.Module) -> Origin | None:
    """Return how the network, or the one it was cut out of, was made; None if unknown."""
    return getattr(network, ATTRIBUTE, None)


def copy_origin(network: nn.Module, model: nn.Module) -> None:
    """Record on a network that was made from `model` how `model` was made."""
    setattr(network, ATTRIBUTE, origin_of(model))


def warn_if_unnamed(network: nn.Module, argument: str) -> None:
    """Warn before saving a network without an Origin. argument: what loading the file will need."""
    if origin_of(network) is None:
        warnings.warn(
            f"the file cannot say how its network is made, so loading it will need {argument}=: make the network with "
            "from_factory('package.module:function', …) to load it with trust_code=True instead",
            stacklevel=4,
        )


def record_base_shapes(network: nn.Module, model: nn.Module) -> None:
    """Record on a network that was cut out of `model` the shapes of `model`."""
    setattr(network, SHAPES, base_shapes(model))


def base_shapes(network: nn.Module) -> Shapes:
    """Return the shapes that a network's tensors had before it, or a module of it, was cut."""
    before: Shapes = {}
    for prefix, module in network.named_modules():
        recorded: Shapes = getattr(module, SHAPES, None) or {}
        before |= {f"{prefix}.{name}" if prefix else name: shape for name, shape in recorded.items()}
    return {name: before.get(name, shape) for name, shape in _shapes(network).items()}


def distinct_bases(networks: Iterable[nn.Module]) -> list[Shapes]:
    """List the base shapes of the networks without repetition: one entry if all were cut out of the same network."""
    bases: list[Shapes] = []
    for network in networks:
        shapes = base_shapes(network)
        bases += [] if shapes in bases else [shapes]
    return bases


def count_base_parameters(networks: Sequence[nn.Module]) -> int | None:
    """Count the parameters of the network that all of these were cut out of; None if there is no such network."""
    bases = distinct_bases(networks)
    if len(bases) != 1:
        return None
    sizes = [(math.prod(bases[0][name]), parameter.numel()) for name, parameter in networks[0].named_parameters()]
    base, member = map(sum, zip(*sizes, strict=True)) if sizes else (0, 0)
    return base if base > member else None


def read_bases(value: Any) -> list[Shapes]:
    """Read the shapes of `distinct_bases` back from JSON; files of earlier versions have None."""
    return [{str(name): tuple(map(int, shape)) for name, shape in dict(shapes).items()} for shapes in value or ()]


def restore_base(network: nn.Module, source: nn.Module, bases: Sequence[Shapes]) -> None:
    """Record on a member that was loaded into a copy of `source` the shapes that the file has of its base."""
    if len(bases) <= 1:  # members that were cut out of different networks keep their own shapes
        setattr(network, SHAPES, bases[0] if bases else base_shapes(source))


def check_shapes(model: nn.Module, members: Sequence[Mapping[str, Tensor]], bases: Sequence[Shapes]) -> None:
    """Raise a ValueError unless every tensor of `model` has the sizes of the members' base network, or of a member.

    members: the tensors of each, by name. bases: shapes of the base networks. Files of earlier versions have none; then
        any network is accepted that the members may have been cut out of.
    """
    shapes, shapes_before = _shapes(model), base_shapes(model)
    for name in shapes.keys() & members[0].keys():
        member_shapes = [tuple(member[name].shape) for member in members if name in member]
        known_shapes = [base[name] for base in bases if name in base]
        # Each axis is checked by itself: members may have got heads of another size after they were cut
        fits = any(
            _has_known_sizes(shape, [*member_shapes, *known_shapes]) for shape in (shapes[name], shapes_before[name])
        )
        if not fits and not (not bases and all(_is_within(shape, shapes[name]) for shape in member_shapes)):
            expected = (known_shapes or member_shapes)[0]
            raise ValueError(f"{name} has the shape {shapes[name]} in the given model, and must have {expected}")


def _shapes(network: nn.Module) -> Shapes:
    """Return the shapes of a network's state, by name."""
    return {name: tuple(tensor.shape) for name, tensor in saved_tensors(network).items()}


def _has_known_sizes(shape: Sequence[int], known: Sequence[Sequence[int]]) -> bool:
    """Tell whether each axis of a shape has the size that it has in one of the known shapes."""
    candidates = [other for other in known if len(other) == len(shape)]
    return all(any(other[axis] == size for other in candidates) for axis, size in enumerate(shape))


def _is_within(small: Sequence[int], large: Sequence[int]) -> bool:
    """Tell whether no axis of one shape is longer than the other's."""
    return len(small) == len(large) and all(one <= other for one, other in zip(small, large, strict=True))
