"""Check inputs against those of training, with errors in terms of the inputs, not of some pruned layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.common.inputs import Inputs, each, is_several, tensors_in
from structured_ensembles.data import Data
from structured_ensembles.data.conversion import IN_UNIT_RANGE, check_bytes
from structured_ensembles.data.kinds import Kinds, Normalizations, parts_of
from structured_ensembles.data.normalization import Normalization

logger = logging.getLogger(__name__)


def warn_of_unknown_inputs(ensemble: Any, data: Data) -> None:
    """Log that an ensemble which nothing was trained with does not normalise inputs as `data` do."""
    if ensemble.input_shape is None and ensemble.normalization is None and data.normalization is not None:
        logger.warning(
            "the ensemble does not know how its inputs are normalised, and takes them as they are: if its networks "
            "were trained on batches of these data, call ensemble.adopt(data) first"
        )


def check_inputs(x: Inputs, shape: Any, kinds: Kinds | None, ids: bool, limits: Any) -> None:
    """Raise an error that names the difference if a batch (samples, …) is not such as an ensemble was trained on.

    shape, kinds, ids, limits: `input_shape`, `input_kinds`, `ids` and `id_limit` of the ensemble.
    """
    if not isinstance(x, Tensor) or is_several(shape):
        check_several(x, shape, kinds, limits)
    else:
        check_shape(x, shape, ids)
    if ids and isinstance(x, Tensor):
        check_ids(x, limits)


def check_pixels(x: Any, argument: str = "x") -> None:
    """Raise a ValueError for pixels from 0 to 255 that are not uint8: they would be taken for floats in [0,1]."""
    if not isinstance(x, Tensor):
        return
    check_bytes(argument, x)
    if x.dtype != torch.uint8 and x.numel() and float(x.max()) > IN_UNIT_RANGE:
        raise ValueError(
            f"{argument} must be pixels as uint8, from 0 to 255, or as floats in [0,1], not values up to "
            f"{float(x.max()):g}: convert them to uint8, or divide them by 255"
        )


def check_half(x: Inputs, dtype: torch.dtype) -> None:
    """Raise for inputs that a network in half precision would get as infinities; one that normalises them has none."""
    if dtype != torch.float16:
        return
    for own in tensors_in(x):
        if own.is_floating_point() and own.numel() and float(own.abs().max()) > torch.finfo(dtype).max:
            raise ValueError(
                f"x reaches to {float(own.abs().max()):g}, but the network computes in float16, whose largest number "
                "is 65504: scale the inputs, or convert the network to float32"
            )


def as_trained(x: Any, normalization: Any, kinds: Kinds | None) -> Any:
    """Take uint8 for numbers, not for pixels, where a network was trained on other numbers than pixels.

    The normalisation of its inputs tells: that of columns such as ages is not of values in [0,1].
    """

    def numbers(own: Tensor, moments: Normalization | None, kind: str = "floats") -> Tensor:
        if own.dtype != torch.uint8 or kind != "floats" or moments is None:
            return own
        return own.float() if max(map(abs, (*moments.mean, *moments.deviation))) > IN_UNIT_RANGE else own

    if isinstance(x, Tensor):
        return x if isinstance(normalization, Normalizations) else numbers(x, normalization)
    return x if kinds is None else each(numbers, x, parts_of(normalization, x), kinds)


def check_shape(x: Tensor, shape: tuple[int, ...] | None, ids: bool) -> None:
    """Compare a batch (samples, …) with the shape of one input in training; None: nothing is known.

    Columns and channels have to be as many. Images may be of another size, sequences of another length.
    """
    if shape is None:
        return
    if not _fits(x, shape, ids):
        raise ValueError(f"x must be a batch of {_described(shape, ids)}, not of shape {tuple(x.shape[1:])}")


def _fits(x: Tensor, shape: tuple[int, ...], free: bool) -> bool:
    """Compare a batch with the shape of one sample. free: sizes may differ, such as the length of a sentence."""
    fixed = 0 if free or len(shape) == 2 else 1
    given = tuple(x.shape[1:])
    return len(given) == len(shape) and given[:fixed] == shape[:fixed]


def check_several(x: Any, shape: Any, kinds: Kinds | None, limits: Any = None) -> None:
    """Compare several inputs (samples, …) with those in training: structure, dimensions, kinds, range of ids.

    shape, kinds, limits: of an ensemble; either it or `x` has several inputs. A shape of None: nothing is known.
    """
    if shape is None:
        return
    if _structure(x) != (trained := _structure(shape)):
        raise ValueError(f"x must be {trained}, as in training, not {_structure(x)}")
    sizes = {len(own) for own in tensors_in(x)}
    if len(sizes) > 1:
        raise ValueError(f"x must have as many samples in every input, not {', '.join(map(str, sorted(sizes)))}")
    for name in shape if isinstance(shape, dict) else range(len(shape)):
        own, kind = x[name], None if kinds is None else kinds[name]  # type: ignore[index]
        whole = kind in ("whole numbers", "mask")
        if not _fits(own, shape[name], whole):
            raise ValueError(f"x[{name!r}] must have the shape {('batch', *shape[name])}, not {tuple(own.shape)}")
        if whole and own.is_floating_point():
            expected = "a mask" if kind == "mask" else kind
            raise TypeError(f"x[{name!r}] must be {expected} as in training, not {own.dtype}")
        if kind == "pixels":
            check_pixels(own, f"x[{name!r}]")
        check_ids(own, None if limits is None else limits[name], f"x[{name!r}]")


def _structure(inputs: Any) -> str:
    """Describe the structure of inputs, or of their shapes, in words."""
    if isinstance(inputs, dict):
        return f"a dict of {', '.join(map(repr, sorted(inputs)))}"
    several = isinstance(inputs, tuple) and not all(isinstance(size, int) for size in inputs)
    return f"a tuple of {len(inputs)} inputs" if several else "one input"


def check_ids(x: Tensor, limit: int | None, argument: str = "x") -> None:
    """Raise unless ids are from 0 to `limit` - 1, the rows of the network's embedding; None: nothing is known."""
    if limit is None or x.numel() == 0:
        return
    low, high = int(x.min()), int(x.max())
    if low < 0 or high >= limit:
        raise ValueError(
            f"{argument} must be ids from 0 to {limit - 1}, as many as the network knows, not {low} to {high}"
        )


@contextmanager
def shape_is_blamed(x: Inputs, shape: Any, ids: bool) -> Iterator[None]:
    """Add the shape of `x` to an error of the network, if it was trained on another shape."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        given = each(lambda own: tuple(own.shape[1:]), x)
        if shape is None or given == shape or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"x must be a batch of {_described(shape, ids)}; the network does not take shape {given}: {error}"
        ) from error


def _described(shape: Any, ids: bool) -> str:
    """Describe one input in words."""
    if is_several(shape):
        return f"inputs of shapes {shape}"
    if ids:
        return f"ids of shape {shape}"
    if len(shape) == 1:
        return f"inputs of shape {shape}, {shape[0]} columns"
    if len(shape) == 3:
        return f"inputs of shape {shape}, {shape[0]} channel{'s' * (shape[0] != 1)}"
    return f"inputs of shape {shape}"
