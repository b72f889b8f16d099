"""The kind of each of several inputs, told by its type: pixels, whole numbers, a mask, or floats."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from structured_ensembles.several import Inputs, Shape, each, is_several, tensors_in

Kind = Literal["pixels", "whole numbers", "mask", "floats"]
Kinds = tuple[Kind, ...] | dict[str, Kind]


def kind_of(tensor: Tensor, ids: bool = False) -> Kind:
    """What a tensor holds. ids: uint8 are whole numbers too, not pixels."""
    if tensor.dtype == torch.bool:
        return "mask"
    if tensor.is_floating_point():
        return "floats"
    return "pixels" if tensor.dtype == torch.uint8 and not ids else "whole numbers"


def kinds_of(inputs: Inputs, ids: bool = False) -> Kinds | None:
    """Of each of several inputs; None for one."""
    return None if isinstance(inputs, Tensor) else each(partial(kind_of, ids=ids), inputs)


def stored(tensor: Tensor, ids: bool = False) -> Tensor:
    """One of several inputs as it is kept: whole numbers as int64, floats as float32, pixels and masks as they are."""
    kind = kind_of(tensor, ids)
    return tensor.long() if kind == "whole numbers" else tensor.float() if kind == "floats" else tensor


def check_several(inputs: Any, shape: Shape, kinds: Kinds | None) -> None:
    """Whether inputs (batch, …) have the structure, dimensions and kinds of those that an ensemble was trained on."""
    if _outline(inputs) != _outline(shape):
        raise ValueError(f"x must be {_described(shape)}, as in training, not {_described(inputs)}")
    if not is_several(shape):
        return
    sizes = {len(own) for own in tensors_in(inputs)}
    if len(sizes) > 1:
        raise ValueError(f"x must have as many samples in every input, not {', '.join(map(str, sorted(sizes)))}")
    for name, own in _named(inputs).items():
        expected, kind = _named(shape)[name], None if kinds is None else _named(kinds)[name]
        if own.dim() != 1 + len(expected) or (len(expected) == 3 and own.shape[1] != expected[0]):
            raise ValueError(f"x[{name!r}] must have the shape {('batch', *expected)}, not {tuple(own.shape)}")
        if kind in ("whole numbers", "mask") and own.is_floating_point():
            raise TypeError(f"x[{name!r}] must be a {kind} as in training, not {own.dtype}".replace("a whole", "whole"))


def _named(several: Any) -> dict[Any, Any]:
    return several if isinstance(several, dict) else dict(enumerate(several))


def _outline(inputs: Any) -> Any:
    """The structure of inputs or of their shapes: names, a number, or None for one input."""
    if isinstance(inputs, dict):
        return frozenset(inputs)
    return len(inputs) if isinstance(inputs, tuple) and (is_several(inputs) or not _is_shape(inputs)) else None


def _is_shape(given: tuple[Any, ...]) -> bool:
    return all(isinstance(size, int) for size in given)


def _described(inputs: Any) -> str:
    """The structure in words."""
    if isinstance(inputs, dict):
        return f"a dict of {', '.join(map(repr, inputs))}"
    number = _outline(inputs)
    return "one input" if number is None else f"a tuple of {number} inputs"
