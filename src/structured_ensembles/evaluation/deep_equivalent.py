"""Deep-ensemble equivalent: the number of deep-ensemble members that are as good (Ashukha et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from structured_ensembles.calibration import fit_supported_temperature
from structured_ensembles.data import Data
from structured_ensembles.data.dataset import SplitName
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.calibration import negative_log_likelihood
from structured_ensembles.evaluation.predictions import gather_predictions
from structured_ensembles.prediction.combination import Combine, combine_logs

Predicted = tuple[Tensor, Tensor]  # logits (members, samples, classes), targets (samples,)


def deep_ensemble_equivalent(nll: float, deep_nlls: Sequence[float]) -> float:
    """Interpolate the number of members at which a deep ensemble reaches `nll`.

    deep_nlls: of deep ensembles of 1, 2, … members; linear in between, as in the paper. Both should be taken after
    temperature, or they compare calibration. An ensemble no better than one network counts as 1, as in the paper; one
    better than all of them counts as `math.inf`: more members than were measured.
    """
    if not deep_nlls or any(math.isnan(value) for value in (nll, *deep_nlls)):
        raise ValueError(
            f"deep_nlls must be the NLL of 1, 2, … members, without NaN, not {list(deep_nlls)} for nll={nll!r}"
        )
    if nll >= deep_nlls[0]:
        return 1.0
    for members, (before, after) in enumerate(pairwise(deep_nlls), start=1):
        if after <= nll:  # the first time, as more members are not always better on a test split
            return members + (before - nll) / (before - after)
    return math.inf


def compute_calibrated_nlls(validation: Predicted, test: Predicted, combine: Combine = "mean") -> list[float]:
    """Compute the test NLL of the first 1, 2, … members, each with a temperature from the validation split.

    The paper has no validation split: it fits each half of the test split's temperature on the other half.
    """
    (held_out, labels), (logits, targets) = validation, test
    nlls = []
    for number in range(1, len(logits) + 1):
        temperature = fit_supported_temperature(combine_logs(held_out[:number].double(), combine), labels)
        probabilities = (combine_logs(logits[:number].double(), combine) / temperature).softmax(-1)
        nlls.append(negative_log_likelihood(probabilities, targets))
    return nlls


def compute_deep_equivalent(
    ensemble: Ensemble, deep: Ensemble, data: Data, split: SplitName, combine: Combine, batch_size: int = 512
) -> float:
    """Compute the deep-ensemble equivalent of `ensemble` on a split; `data` must have a validation split too."""
    nlls, deep_nlls = (
        compute_calibrated_nlls(
            gather_predictions(compared, data.split("validation"), batch_size),
            gather_predictions(compared, data.split(split), batch_size),
            combine,
        )
        for compared in (ensemble, deep)
    )
    return deep_ensemble_equivalent(nlls[-1], deep_nlls)
