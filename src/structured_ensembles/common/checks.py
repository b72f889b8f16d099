"""Argument validation: each error names the argument, what it must be and what was given, before any work starts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np


def check_type(argument: str, value: Any, expected: type, hint: str = "") -> None:
    """Raise a TypeError unless `value` is an instance of `expected`. hint: where to get one."""
    if not isinstance(value, expected):
        name = "torch.nn.Module" if expected.__name__ == "Module" else expected.__name__
        raise TypeError(
            f"{argument} must be {_with_article(name)}, not {_with_article(type(value).__name__)}{hint and f': {hint}'}"
        )


def to_python_number(value: Any) -> Any:
    """Convert a number of NumPy or torch to Python's; return anything else unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def convert_fields(settings: Any) -> None:
    """Convert the numbers of NumPy or torch in the fields of a frozen dataclass to Python's, which JSON can hold."""
    for name, value in list(vars(settings).items()):
        object.__setattr__(settings, name, to_python_number(value))


def check_seed(seed: Any) -> int:
    """Return a seed as a Python int; raise an error unless it is a whole number that torch accepts."""
    if not isinstance(seed, Integral):
        raise TypeError(f"seed must be a whole number, not {seed!r}")
    if not -(2**63) <= int(seed) < 2**64:  # beyond this range, two seeds would draw the same numbers
        raise ValueError(f"seed must be a whole number from -2**63 to 2**64 - 1, not {seed!r}")
    return int(seed)


def check_path(argument: str, value: Any) -> Path:
    """Return a path as a `Path`; raise a TypeError unless it is a string or a path."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{argument} must be a path, as a string or a pathlib.Path, not {value!r}")
    return Path(value)


def check_list(argument: str, value: Any, items: str = "") -> None:
    """Raise a ValueError unless `value` can be iterated over and is no string. items: what it should hold, in words."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{argument} must be a list{items and f' of {items}'}, such as [{value!r}]")


def check_flags(**flags: Any) -> None:
    """Raise a TypeError unless every flag, given by its name, is True or False: "no" or 0.1 would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def check_whole(argument: str, value: Any, least: int = 1, *, or_none: bool = False) -> None:
    """Raise a ValueError unless `value` is a whole number of at least `least`, or None where `or_none` allows it."""
    if or_none and value is None:
        return
    if not isinstance(value, Integral) or value < least:
        none = ", or None" if or_none else ""
        raise ValueError(f"{argument} must be a whole number of at least {least}{none}, not {value!r}")


def check_number(argument: str, value: Any) -> None:
    """Raise a ValueError unless `value` is a finite number of at least 0."""
    if not isinstance(value, Real) or not math.isfinite(value) or float(value) < 0:
        raise ValueError(f"{argument} must be a finite number of at least 0, not {value!r}")


def check_share(argument: str, value: Any) -> None:
    """Raise a ValueError unless `value` is a number in [0, 1)."""
    if not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise ValueError(f"{argument} must be at least 0 and less than 1, not {value!r}")


def check_choice(argument: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise a ValueError unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def is_finite_number(value: Any) -> bool:
    """Tell whether a value is a real number, also one of NumPy, and neither NaN nor infinity; a bool is none here."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _with_article(noun: str) -> str:
    """Put "a" or "an" before a noun."""
    return f"{'an' if noun[0] in 'AEIOaeio' else 'a'} {noun}"
