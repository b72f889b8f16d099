"""Arguments that cannot be: an error that names the argument, what is possible and what was given, before any work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any


def check_type(argument: str, given: Any, kind: type, hint: str = "") -> None:
    """A TypeError unless `given` is of this kind. hint: where to get one."""
    if not isinstance(given, kind):
        expected = "torch.nn.Module" if kind.__name__ == "Module" else kind.__name__
        raise TypeError(f"{argument} must be {_a(expected)}, not {_a(type(given).__name__)}{hint and f': {hint}'}")


def plain_number(given: Any) -> Any:
    """A number of numpy or torch as Python's; anything else as it is."""
    return given.item() if getattr(given, "ndim", None) == 0 else given


def checked_seed(seed: Any) -> int:
    """Return a seed as Python's number; it may be any that torch takes, numpy's too."""
    if not isinstance(seed, Integral):
        raise TypeError(f"seed must be a whole number, not {seed!r}")
    if not -(2**63) <= int(seed) < 2**64:  # beyond, two seeds would draw the same
        raise ValueError(f"seed must be a whole number from -2**63 to 2**64 - 1, not {seed!r}")
    return int(seed)


def check_list(argument: str, given: Any, of: str = "") -> None:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"{argument} must be a list{of and f' of {of}'}, such as [{given!r}]")


def check_whole(argument: str, given: Any, least: int = 1, *, or_none: bool = False) -> None:
    if or_none and given is None:
        return
    if not isinstance(given, Integral) or given < least:
        none = ", or None" if or_none else ""
        raise ValueError(f"{argument} must be a whole number of at least {least}{none}, not {given!r}")


def check_number(argument: str, given: Any, least: float = 0) -> None:
    if not isinstance(given, Real) or not math.isfinite(given) or float(given) < least:
        raise ValueError(f"{argument} must be a finite number of at least {least:g}, not {given!r}")


def check_share(argument: str, given: Any) -> None:
    if not isinstance(given, Real) or not 0 <= float(given) < 1:
        raise ValueError(f"{argument} must be at least 0 and less than 1, not {given!r}")


def check_choice(argument: str, given: Any, possible: Sequence[Any]) -> None:
    if given not in possible:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, possible))}, not {given!r}")


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'AEIOaeio' else 'a'} {word}"


def is_finite_number(value: Any) -> bool:
    """Tell whether a value is a number, neither infinite nor NaN; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
