"""as_tensor(): convert any kind of array of real numbers to a tensor; and checks of its values."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

IN_UNIT_RANGE = 2.0  # pixels in [0,1] may be beyond 1 after noise or a change of contrast, but not so far
# Whole numbers that are not pixels, which are uint8.
WHOLE_TYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def as_tensor(argument: str, values: Any) -> Tensor:
    """Convert real numbers to a tensor of the same type, sharing memory if possible; raise an error for others."""
    if isinstance(values, Tensor):
        tensor = values.detach()
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            layouts = (("quantized", tensor.is_quantized), ("nested", tensor.is_nested), ("meta", tensor.is_meta))
            layout = next((layout for layout, applies in layouts if applies), "sparse")
            raise TypeError(f"{argument} must be an ordinary dense tensor, not a {layout} tensor")
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # we only read
            tensor = torch.from_numpy(_as_array(argument, values))
    if tensor.is_complex():
        raise TypeError(f"{argument} must be real numbers, not {tensor.dtype}")
    return tensor


def as_float32(argument: str, tensor: Tensor) -> Tensor:
    """Convert to float32; raise a ValueError if any value is not finite, or too large for it."""
    converted = tensor.float()
    if not bool(converted.isfinite().all()):
        if bool(tensor.isfinite().all()):
            raise ValueError(f"{argument} contain values that float32 cannot hold, beyond 3.4e38: scale them down")
        broken = ~tensor.isfinite()
        first = ", ".join(map(str, broken.nonzero()[0].tolist()))
        raise ValueError(
            f"{argument} contain values that are not finite: {int(broken.sum()):,} of {tensor.numel():,} are NaN or "
            f"infinite, the first at [{first}]; replace them, or drop their samples"
        )
    return converted


def check_images(argument: str, tensor: Tensor) -> None:
    """Raise a ValueError for images (samples, channels, height, width) of whole numbers of unknown range.

    Pixels are uint8. Other types would reach a network unscaled, uint16 up to 65535, and it would hardly learn.
    """
    if tensor.dim() != 4 or tensor.dtype not in WHOLE_TYPES or not tensor.numel():
        return
    low, high = int(tensor.long().min()), int(tensor.long().max())
    if low < 0 or high > IN_UNIT_RANGE:
        name = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"{argument} are images of {name}, from {low} to {high}, but pixels are uint8, or floats in [0,1]: convert "
            f"them to uint8, divide them by the largest value that their camera or format has, or say "
            "normalization='standard'"
        )


def check_bytes(argument: str, tensor: Tensor) -> None:
    """Raise a ValueError for whole numbers other than uint8 pixels, which would be taken for floats in [0,1]."""
    if tensor.dtype in WHOLE_TYPES:
        name = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"{argument} must be pixels as uint8, from 0 to 255, or as floats in [0,1], not {name}: convert them to "
            "uint8, or divide them by the largest value they can have"
        )


def _as_array(argument: str, values: Any) -> np.ndarray[Any, Any]:
    """Convert to an array of real numbers in native byte order."""
    if hasattr(values, "toarray"):
        raise TypeError(f"{argument} must be a dense array, not a {type(values).__name__}: call its toarray() first")
    arrays = values if isinstance(values, list | tuple) else (values,)
    if masked := sum(int(np.ma.count_masked(value)) for value in arrays if isinstance(value, np.ma.MaskedArray)):
        raise ValueError(
            f"{argument} has {masked:,} masked values, which a tensor cannot leave out: replace them, as in "
            "x.filled(0), or drop the samples that have any"
        )
    try:
        array = np.ascontiguousarray(values)
        if array.dtype == object:  # such as columns of pandas that may have missing values
            array = np.ascontiguousarray(array.tolist())
    except ValueError as error:
        raise ValueError(f"{argument} must be numbers, as an array or a tensor of one shape: {error}") from error
    if array.dtype.kind not in "biufc":
        if hasattr(values, "columns"):  # a DataFrame, of which one column of words turns all numbers into words
            columns = zip(values.columns, values.dtypes, strict=True)
            others = ", ".join(repr(name) for name, dtype in columns if dtype.kind not in "biufc")
            raise TypeError(
                f"{argument} must be numbers, which these columns are not: {others}; pandas.get_dummies encodes them"
            )
        example = repr(array.flat[0]) if array.size else "nothing"
        hint = ": numpy.unique(names, return_inverse=True)[1] numbers names" if array.dtype.kind in "US" else ""
        raise TypeError(
            f"{argument} must be numbers, as an array or a tensor, without missing values, not {array.dtype} such as "
            f"{example}{hint}"
        )
    if array.dtype.itemsize > 8 and array.dtype.kind == "f":
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
