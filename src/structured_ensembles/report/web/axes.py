"""Axes of charts: data to pixels, round ticks, and numbers as their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["linear", "log", "symlog"]
LINEAR_UP_TO = 10.0  # of symlog, which is linear around zero


@dataclass(frozen=True)
class Axis:
    """Axis from low to high. ticks: (value, label)."""

    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    kind: Kind = "linear"

    def share(self, value: float) -> float:
        """Return where a value lies on the axis: 0 at its low end, 1 at its high end."""
        low, high, position = (_warp(number, self.kind) for number in (self.low, self.high, value))
        return (position - low) / (high - low)


def fit_axis(
    title: str,
    values: Sequence[float],
    *,
    kind: Kind = "linear",
    low: float | None = None,
    high: float | None = None,
    whole: bool = False,
) -> Axis:
    """Make an axis that holds all values with some room, or ends at `low` and `high`. whole: ticks at whole numbers."""
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    first, last = min(known), max(known)
    if kind == "log":
        room = max(1.25, (last / first) ** 0.08)
        first, last = first / room, last * room
        return Axis(title, first, last, _log_ticks(first, last), kind)
    if kind == "symlog":
        last = max(LINEAR_UP_TO, last) * 3
        powers = range(1, math.ceil(math.log10(last)))
        decades = [
            10.0**power for power in powers if power % max(1, math.ceil(len(powers) / 3)) == 1 or len(powers) < 4
        ]
        return Axis(title, -3.0, last, tuple((tick, describe_number(tick)) for tick in (0.0, *decades)), kind)
    room = 0.06 * (last - first) or max(abs(last) * 0.01, 0.5)
    first = first - room if low is None else low
    last = last + room if high is None else high
    return Axis(title, first, last, round_ticks(first, last, whole=whole), kind)


def round_ticks(low: float, high: float, target: int = 5, whole: bool = False) -> tuple[tuple[float, str], ...]:
    """Return about `target` ticks at multiples of 1, 2 or 5 times a power of ten, with labels of equal decimals."""
    raw = (high - low) / target
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(low / step - 1e-9)
    ticks = [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
    if len(ticks) < 2 and not whole:  # a short axis between two round numbers
        return round_ticks(low, high, 2 * target)
    return tuple((tick, f"{tick + 0.0:,.{decimals}f}") for tick in ticks)


def describe_number(value: float) -> str:
    """Write a number briefly: 300, 2 k, 1.5 M."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def _warp(value: float, kind: Kind) -> float:
    if kind == "log":
        return math.log10(value)
    if kind == "symlog":
        return math.copysign(math.log10(1 + abs(value) / LINEAR_UP_TO), value)
    return value


def _log_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    """Return ticks at 1, 2, 5, … within the limits, or round linear ones where there are fewer than three."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 200 else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
    if len(ticks) < 3:
        return round_ticks(low, high, 4)
    return tuple((tick, f"{tick:g}") for tick in ticks)
