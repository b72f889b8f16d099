"""Split conformal prediction on plain arrays: sets of classes, and intervals, with a given coverage.

A score says how badly a class or a value fits a sample. Of n held-out samples, the ⌈(n+1)·coverage⌉-th smallest score
is the limit; whatever scores at most that is in the set. If those samples and a new one are exchangeable, the set holds
the truth with a probability of at least `coverage`, and of at most coverage + 1/(n+1) where no two scores are equal,
whatever the network. It is a promise on average over samples and over draws of the n, not for each kind of sample.

The promise is exact only for held-out samples that no other choice was based on.

All scores are deterministic: the same input gets the same set.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from structured_ensembles.common.checks import check_choice, check_number, check_whole, is_finite_number

Method = Literal["thr", "aps", "raps"]
METHODS = get_args(Method)


@dataclass(frozen=True)
class ConformalSets:
    """Prediction sets of classes.

    method: the score of a class with probability p.
        "thr" (LAC, Sadinle et al. 2019): 1 - p. The smallest sets on average. A set is empty where no class is likely
            enough: for a share of about accuracy - coverage of the samples, if the accuracy is the higher one.
        "aps" (Romano et al. 2020): the summed probability of the classes that are likelier. Larger sets for harder
            samples. The likeliest class scores 0, so that no set is empty; a network that is right more often than
            `coverage` gets sets of one class, and is covered as often as it is right.
        "raps" (Angelopoulos et al. 2021): the same, and `penalty` for each rank beyond the first `free_ranks`, against
            long tails of unlikely classes. Never empty either.
    limit: the largest score of a class in a set; infinite where there were too few samples, then sets have all classes.
    """

    method: Method
    coverage: float
    limit: float
    penalty: float = 0.01
    free_ranks: int = 5

    def sets(self, probabilities: Tensor) -> Tensor:
        """Return which classes are in the sets, booleans (samples, classes), from probabilities (samples, classes)."""
        return score_classes(probabilities, self.method, self.penalty, self.free_ranks) <= self.limit


@dataclass(frozen=True)
class ConformalIntervals:
    """Intervals of a regression: mean ± limit · (spread + floor), for each of the values of a target.

    limits: of |target - mean| / (spread + floor); infinite where there were too few samples.
    floors: the mean spread of the members on the held-out samples, so that the interval has a width even where all
        members agree; 1 where there is no spread, as of a single network, whose intervals all have one width; 0 for
        Gaussian heads, whose spread is that of the targets.
    """

    coverage: float
    limits: tuple[float, ...]
    floors: tuple[float, ...]

    def interval(self, mean: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends of the intervals for the members' mean and spread, all (samples, …)."""
        limits, floors = (mean.new_tensor(values).view(_shape_per_value(mean)) for values in (self.limits, self.floors))
        half_width = limits * (spread + floors)
        return mean - half_width, mean + half_width


Conformal = ConformalSets | ConformalIntervals


def fit_sets(
    probabilities: Tensor,
    targets: Tensor,
    coverage: float = 0.9,
    method: Method = "thr",
    penalty: float = 0.01,
    free_ranks: int = 5,
) -> ConformalSets:
    """Fit sets to the probabilities (samples, classes) of held-out samples and their labels (samples,)."""
    check_conformal(coverage, method, penalty, free_ranks)
    scores = score_classes(probabilities, method, penalty, free_ranks).gather(-1, targets[:, None]).squeeze(-1)
    return ConformalSets(method, float(coverage), _fit_limit(scores, coverage), float(penalty), int(free_ranks))


def fit_intervals(
    mean: Tensor, spread: Tensor, targets: Tensor, coverage: float = 0.9, floored: bool = True
) -> ConformalIntervals:
    """Fit intervals to the members' mean and spread on held-out samples and their targets, all (samples, …).

    floored: False for a spread that includes the noise of the targets, as of Gaussian heads, and so is never zero.
    """
    check_conformal(coverage)
    if mean.numel() != targets.numel():
        raise ValueError(
            f"intervals need one output for each value of a target, but outputs are {tuple(mean.shape[1:])} and "
            f"targets {tuple(targets.shape[1:])}"
        )
    rows, spreads = (values.double().reshape(len(values), -1) for values in (mean, spread))
    floors = spreads.mean(0)
    floors = torch.where(floors > 0, floors, torch.ones_like(floors)) if floored else torch.zeros_like(floors)
    scores = (targets.double().reshape(rows.shape) - rows).abs() / (spreads + floors)
    limits = tuple(_fit_limit(column, coverage) for column in scores.unbind(1))
    return ConformalIntervals(float(coverage), limits, tuple(floors.tolist()))


def score_classes(probabilities: Tensor, method: Method, penalty: float = 0.01, free_ranks: int = 5) -> Tensor:
    """Return how badly each class fits, (samples, classes) in float64; see `ConformalSets`."""
    values = probabilities.double()
    if method == "thr":
        return 1 - values
    ordered, order = values.sort(dim=-1, descending=True, stable=True)
    likelier = torch.cat((torch.zeros_like(ordered[..., :1]), ordered.cumsum(-1)[..., :-1]), -1)
    if method == "raps":
        ranks = torch.arange(1, values.shape[-1] + 1, dtype=values.dtype, device=values.device)
        likelier = likelier + penalty * (ranks - free_ranks).clamp_min(0)
    return torch.empty_like(values).scatter_(-1, order, likelier)


def finite_quantile(scores: Tensor, coverage: float) -> float:
    """Return the ⌈(n+1)·coverage⌉-th smallest of n scores (samples,); infinity if that is beyond n."""
    position = math.ceil((len(scores) + 1) * coverage - 1e-9)
    return float(scores.double().sort().values[position - 1]) if position <= len(scores) else math.inf


def samples_needed(coverage: float) -> int:
    """Return the smallest number of held-out samples that gives a finite limit."""
    return math.ceil(coverage / (1 - coverage) - 1e-9)


def check_conformal(coverage: Any, method: Any = "thr", penalty: Any = 0.01, free_ranks: Any = 5) -> None:
    """Raise a ValueError that names the argument which is invalid."""
    check_choice("method", method, METHODS)
    if not is_finite_number(coverage) or not 0 < coverage < 1:
        raise ValueError(f"coverage must be above 0 and below 1, such as 0.9, not {coverage!r}")
    check_number("penalty", penalty)
    check_whole("free_ranks", free_ranks)


def conformal_to_json(conformal: Conformal) -> dict[str, Any]:
    """Encode a conformal rule for JSON, with None for infinity, which JSON lacks."""
    if isinstance(conformal, ConformalSets):
        return {**vars(conformal), "limit": _number_or_none(conformal.limit)}
    limits = [_number_or_none(limit) for limit in conformal.limits]
    return {"coverage": conformal.coverage, "limits": limits, "floors": list(conformal.floors)}


def conformal_from_json(value: Any) -> Conformal:
    """Restore what `conformal_to_json` wrote; raise a ValueError that says what is invalid."""
    if isinstance(value, dict) and set(value) == {"method", "coverage", "limit", "penalty", "free_ranks"}:
        check_conformal(value["coverage"], value["method"], value["penalty"], value["free_ranks"])
        return ConformalSets(**{**value, "limit": _parse_limit(value["limit"])})
    if isinstance(value, dict) and set(value) == {"coverage", "limits", "floors"}:
        check_conformal(value["coverage"])
        limits, floors = value["limits"], value["floors"]
        if not isinstance(limits, list) or not isinstance(floors, list) or not 0 < len(limits) == len(floors):
            raise ValueError(
                f"limits and floors must be lists of equally many numbers, at least one, not {limits!r} and {floors!r}"
            )
        for floor in floors:
            check_number("each of floors", floor)
        return ConformalIntervals(value["coverage"], tuple(map(_parse_limit, limits)), tuple(map(float, floors)))
    raise ValueError(f"conformal must have the entries of ConformalSets or of ConformalIntervals, not {value!r}")


def _fit_limit(scores: Tensor, coverage: float) -> float:
    """Return the limit of the scores (samples,); warn if there are too few samples for a finite one."""
    if bool(scores.isnan().any()):
        raise ValueError("predictions must be finite, but some are NaN")
    limit = finite_quantile(scores, coverage)
    if math.isinf(limit):
        warnings.warn(
            f"{len(scores)} samples are too few for coverage={coverage:g}, which needs {samples_needed(coverage)}: "
            "every set has all classes, every interval is infinite",
            stacklevel=4,
        )
    return limit


def _shape_per_value(mean: Tensor) -> tuple[int, ...]:
    """Return the shape that broadcasts one number per value against a mean (samples, …)."""
    return (1, *mean.shape[1:]) if mean.dim() > 1 else (1,)


def _number_or_none(value: float) -> float | None:
    """Return None for infinity, which JSON lacks."""
    return None if math.isinf(value) else value


def _parse_limit(value: Any) -> float:
    """Return a limit from JSON; None stands for infinity."""
    if value is None:
        return math.inf
    check_number("a limit", value)
    return float(value)
