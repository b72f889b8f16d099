"""Checks of a batch to predict from, so that errors name the inputs and not some pruned layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.common.inputs import Inputs, is_several, map_inputs, tensors_in
from structured_ensembles.common.plurals import counted
from structured_ensembles.data import Data
from structured_ensembles.data.conversion import IN_UNIT_RANGE, check_bytes
from structured_ensembles.data.kinds import Kinds, Normalizations, normalization_of_each
from structured_ensembles.data.normalization import Normalization

logger = logging.getLogger(__name__)


def warn_of_unknown_inputs(ensemble: Any, data: Data) -> None:
    """Log a warning if an ensemble that `train` has not seen does not normalise inputs, but `data` do."""
    if ensemble.input_shape is None and ensemble.normalization is None and data.normalization is not None:
        logger.warning(
            "the ensemble does not know how its inputs are normalised, and takes them as they are: if its networks "
            "were trained on batches of these data, call ensemble.adopt(data) first"
        )


def check_classification(task: str, method: str) -> None:
    """Raise a ValueError if a regression is asked for a method of classification."""
    if task != "classification":
        raise ValueError(
            f"{method} is for classification; for regression there are predict and spread, conformal and "
            "predict_interval"
        )


def check_regression(task: str, method: str) -> None:
    """Raise a ValueError if a classification is asked for a method of regression."""
    if task != "regression":
        raise ValueError(
            f"{method} is for regression; for classification there are predict_proba and uncertainty, conformal and "
            "predict_set"
        )


def check_batch(ensemble: Any, x: Inputs, dtype: torch.dtype) -> None:
    """Check a batch (samples, …) before an ensemble with weights of this dtype predicts from it."""
    check_inputs(x, ensemble.input_shape, ensemble.input_kinds, ensemble.ids, ensemble.id_limit)
    if ensemble.pixels:
        check_pixels(x)
    if ensemble.normalization is None:
        check_half(x, dtype)


def check_inputs(x: Inputs, shape: Any, kinds: Kinds | None, ids: bool, limits: Any, argument: str = "x") -> None:
    """Raise an error that names the difference if a batch (samples, …) is not like those of training.

    shape, kinds, ids, limits: `input_shape`, `input_kinds`, `ids` and `id_limit` of the ensemble.
    """
    if not isinstance(x, Tensor) or is_several(shape):
        check_several(x, shape, kinds, limits)
    else:
        check_shape(x, shape, ids, argument)
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
    """Raise a ValueError for inputs that overflow float16, where the network computes in it."""
    if dtype != torch.float16:
        return
    for tensor in tensors_in(x):
        if tensor.is_floating_point() and tensor.numel() and float(tensor.abs().max()) > torch.finfo(dtype).max:
            raise ValueError(
                f"x reaches to {float(tensor.abs().max()):g}, but the network computes in float16, whose largest "
                "number is 65504: scale the inputs, or convert the network to float32"
            )


def cast_as_trained(x: Any, normalization: Any, kinds: Kinds | None) -> Any:
    """Cast uint8 inputs to floats where a network was trained on numbers other than pixels.

    Its normalisation tells: that of columns such as ages is not of values in [0,1].
    """

    def cast(tensor: Tensor, moments: Normalization | None, kind: str = "floats") -> Tensor:
        if tensor.dtype != torch.uint8 or kind != "floats" or moments is None:
            return tensor
        return tensor.float() if max(map(abs, (*moments.mean, *moments.deviation))) > IN_UNIT_RANGE else tensor

    if isinstance(x, Tensor):
        return x if isinstance(normalization, Normalizations) else cast(x, normalization)
    return x if kinds is None else map_inputs(cast, x, normalization_of_each(normalization, x), kinds)


def check_shape(x: Tensor, shape: tuple[int, ...] | None, ids: bool, argument: str = "x") -> None:
    """Raise a ValueError unless a batch (samples, …) fits the shape of one input in training; None: it is unknown.

    Where samples seem to have another layout, the error says how to change it.
    Columns and channels have to be as many. Images may be of another size, sequences of another length.
    """
    if shape is None:
        return
    if not _fits(x, shape, ids):
        hint = _suggest_layout(tuple(x.shape), shape)
        raise ValueError(
            f"{argument} must be a batch of {_describe_input(shape, ids)}, not of shape {tuple(x.shape[1:])}{hint}"
        )


def _suggest_layout(actual: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Suggest how to bring x of this shape into a batch of inputs: a single sample, or images with channels last."""
    single = len(actual) == len(shape)
    sample = actual if single else actual[1:]
    last = len(shape) == 3 and len(sample) == 3 and sample[0] != shape[0] and sample[-1] == shape[0]
    if last:
        order = "(2, 0, 1)" if single else "(0, 3, 1, 2)"
        made = f"x.permute{order}{'[None]' * single}"
        return f": its channels seem to come last; {made} (np.transpose of arrays) puts them first"
    if single and (sample[0] == shape[0] or len(shape) != 3):
        return ": it seems to be one sample; x[None] makes a batch of one"
    return ""


def _fits(x: Tensor, shape: tuple[int, ...], free: bool) -> bool:
    """Tell whether a batch fits the shape of one sample. free: all sizes may differ, such as a sentence's length."""
    fixed = 0 if free or len(shape) == 2 else 1
    sample_shape = tuple(x.shape[1:])
    return len(sample_shape) == len(shape) and sample_shape[:fixed] == shape[:fixed]


def check_several(x: Any, shape: Any, kinds: Kinds | None, limits: Any = None) -> None:
    """Raise an error unless several inputs (samples, …) are like those of training: structure, shapes, kinds, ids.

    shape, kinds, limits: of an ensemble; either it or `x` has several inputs. A shape of None: it is unknown.
    """
    if shape is None:
        return
    if _describe_structure(x) != (trained := _describe_structure(shape)):
        raise ValueError(f"x must be {trained}, as in training, not {_describe_structure(x)}")
    sizes = {len(tensor) for tensor in tensors_in(x)}
    if len(sizes) > 1:
        raise ValueError(f"x must have as many samples in every input, not {', '.join(map(str, sorted(sizes)))}")
    for name in shape if isinstance(shape, dict) else range(len(shape)):
        tensor, kind = x[name], None if kinds is None else kinds[name]  # type: ignore[index]
        is_whole = kind in ("whole numbers", "mask")
        if not _fits(tensor, shape[name], is_whole):
            raise ValueError(f"x[{name!r}] must have the shape {('batch', *shape[name])}, not {tuple(tensor.shape)}")
        if is_whole and tensor.is_floating_point():
            expected = "a mask" if kind == "mask" else kind
            raise TypeError(f"x[{name!r}] must be {expected} as in training, not {tensor.dtype}")
        if kind == "pixels":
            check_pixels(tensor, f"x[{name!r}]")
        check_ids(tensor, None if limits is None else limits[name], f"x[{name!r}]")


def _describe_structure(inputs: Any) -> str:
    """Describe the structure of inputs, or of their shapes, in words."""
    if isinstance(inputs, dict):
        return f"a dict of {', '.join(map(repr, sorted(inputs)))}"
    several = isinstance(inputs, tuple) and not all(isinstance(size, int) for size in inputs)
    return f"a tuple of {len(inputs)} inputs" if several else "one input"


def check_ids(x: Tensor, limit: int | None, argument: str = "x") -> None:
    """Raise a ValueError unless ids are from 0 to `limit` - 1, the rows of the network's embedding; None: unknown."""
    if limit is None or x.numel() == 0:
        return
    low, high = int(x.min()), int(x.max())
    if low < 0 or high >= limit:
        raise ValueError(
            f"{argument} must be ids from 0 to {limit - 1}, the rows of the network's embedding, not {low} to {high}"
        )


@contextmanager
def explain_shape_errors(x: Inputs, shape: Any, ids: bool) -> Iterator[None]:
    """Turn an error of the network into one about the shape of `x`, if it was trained on another shape."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        shapes = map_inputs(lambda tensor: tuple(tensor.shape[1:]), x)
        if shape is None or shapes == shape or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"x must be a batch of {_describe_input(shape, ids)}; the network fails on shape {shapes}: {error}"
        ) from error


def _describe_input(shape: Any, ids: bool) -> str:
    """Describe one input in words."""
    if is_several(shape):
        return f"inputs of shapes {shape}"
    if ids:
        return f"ids of shape {shape}"
    if len(shape) == 1:
        return f"inputs of shape {shape}, {counted(shape[0], 'column')}"
    if len(shape) == 3:
        return f"inputs of shape {shape}, {counted(shape[0], 'channel')}"
    return f"inputs of shape {shape}"
