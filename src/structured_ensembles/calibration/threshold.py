"""Discard threshold on plain arrays: the entropy above which a prediction is better discarded."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from structured_ensembles.common.checks import check_choice, is_finite_number, to_python_number

KEEP = 0.95  # share of the right predictions that the default threshold keeps
KEEPS_NOTHING = -1.0  # a threshold below any entropy

ThresholdRule = tuple[Literal["keep", "risk"], float]


def check_threshold_rule(name: Any, share: Any) -> ThresholdRule:
    """Return a threshold rule; raise a ValueError unless name and share are valid."""
    check_choice("the rule of a threshold", name, ("keep", "risk"))
    lowest = 0 if name == "risk" else math.ulp(0.0)
    if not is_finite_number(share) or not lowest <= share <= 1:
        allowed = "at least 0 and at most 1" if name == "risk" else "above 0 and at most 1"
        raise ValueError(f"{name} must be a share {allowed}, not {share!r}")
    return name, float(share)


def choose_threshold_rule(keep: float | None, risk: float | None) -> ThresholdRule:
    """Return the rule for whichever of `keep` and `risk` is given; raise a ValueError unless it is exactly one."""
    if (keep is None) == (risk is None):
        raise ValueError(f"give either keep, such as 0.95, or risk, such as 0.01, not keep={keep!r}, risk={risk!r}")
    return check_threshold_rule("keep", keep) if risk is None else check_threshold_rule("risk", risk)


def check_threshold(value: Any, argument: str = "threshold") -> float | None:
    """Return a threshold as a float, or None; raise a ValueError unless it is a finite number."""
    number = to_python_number(value)
    if number is not None and not is_finite_number(number):
        raise ValueError(f"{argument} must be a finite number, or None, not {value!r}")
    return None if number is None else float(number)


def fit_threshold(entropy: Tensor, correct: Tensor, rule: ThresholdRule) -> float:
    """Fit the threshold of a rule; a prediction is kept if its entropy is at most the threshold.

    entropy: of predictions, (samples,). correct: whether they are right, booleans (samples,).
    ("keep", share): the smallest threshold that keeps at least this share of the right predictions (of all, where none
        is right).
    ("risk", share): the one that keeps most predictions while at most this share of the kept is wrong; -1, which keeps
        none, where the surest ones are wrong too often.
    """
    name, share = rule
    values = entropy.double()
    if bool(values.isnan().any()):
        raise ValueError("predictions must be finite, but some are NaN")
    if name == "keep":
        right = (values[correct] if bool(correct.any()) else values).sort().values
        return float(right[max(math.ceil(share * len(right) - 1e-9), 1) - 1])
    distinct, index, counts = values.unique(return_inverse=True, return_counts=True)  # ties are kept together
    wrong = torch.zeros_like(distinct).index_add_(0, index, (~correct).double())
    allowed = wrong.cumsum(0) <= share * counts.cumsum(0) + 1e-9
    return float(distinct[allowed.nonzero().max()]) if bool(allowed.any()) else KEEPS_NOTHING
