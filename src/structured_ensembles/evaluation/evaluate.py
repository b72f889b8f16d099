"""evaluate(): the figures of an ensemble on a split."""

import torch.nn.functional as F

from structured_ensembles.data import Data
from structured_ensembles.data.dataset import SplitName
from structured_ensembles.ensemble import Combine, Ensemble, combined, uncertainty_of
from structured_ensembles.evaluation.calibration import brier_score, expected_calibration_error, negative_log_likelihood
from structured_ensembles.evaluation.predictions import predictions


def evaluate(
    ensemble: Ensemble, data: Data, split: SplitName = "test", combine: Combine = "mean", batch_size: int = 512
) -> dict[str, float]:
    """Plain figures of an ensemble on a split of `data`; names have a family prefix.

    cls/ accuracy, its members' mean and the Brier score; cal/ NLL and ECE with 30 and 15 bins; div/ how the members
    differ; size/ parameters. For regression reg/ root mean squared error, its members' mean, and the mean spread of the
    members.
    """
    logits, targets = predictions(ensemble, data.split(split), batch_size)
    sizes = {"size/members": float(len(ensemble)), "size/parameters": float(ensemble.num_parameters)}
    if data.task == "regression":
        targets = targets.view_as(logits[0])
        errors = [float(F.mse_loss(member, targets).sqrt()) for member in logits]
        return {
            "reg/rmse": float(F.mse_loss(logits.mean(0), targets).sqrt()),
            "reg/member_rmse": sum(errors) / len(errors),
            "reg/spread": float(logits.std(0, correction=0).mean()),
            **sizes,
        }
    probabilities = combined(logits, combine)
    unsure = uncertainty_of(logits)
    return {
        "cls/accuracy": float((probabilities.argmax(-1) == targets).double().mean()),
        "cls/member_accuracy": float((logits.argmax(-1) == targets).double().mean()),
        "cls/brier": brier_score(probabilities, targets),
        "cal/nll": negative_log_likelihood(probabilities, targets),
        "cal/ece": expected_calibration_error(probabilities, targets, bins=30),
        "cal/ece15": expected_calibration_error(probabilities, targets, bins=15),
        "div/entropy": float(unsure.entropy.mean()),
        "div/mutual_information": float(unsure.mutual_information.mean()),
        "div/disagreement": float(unsure.disagreement.mean()),
        **sizes,
    }
