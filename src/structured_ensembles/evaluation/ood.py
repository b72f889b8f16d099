"""Out-of-distribution detection: does an ensemble notice that data are not of its kind?"""

import torch

from structured_ensembles.data import Split
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.predictions import predictions
from structured_ensembles.evaluation.ranking import auroc, false_acceptance, false_alarms
from structured_ensembles.prediction.combination import Uncertainty, uncertainty_of

SCORES = ("entropy", "mutual_information")


def detection_figures(own: Uncertainty, foreign: Uncertainty) -> dict[str, float]:
    """Compute AUROC and FPR95, in both conventions, for entropy and mutual information.

    fpr95: the foreign share accepted when 95 % of its own are (ODIN). fpr95_foreign: the share of its own that is
    rejected when 95 % of the foreign ones are (OpenOOD, torch-uncertainty).
    """
    figures = {}
    for name in SCORES:
        is_foreign = torch.cat((torch.zeros(len(own[name])), torch.ones(len(foreign[name])))).bool()
        figures[f"{name}_auroc"] = auroc(torch.cat((own[name], foreign[name])), is_foreign)
        figures[f"{name}_fpr95"] = false_acceptance(own[name], foreign[name])
        figures[f"{name}_fpr95_foreign"] = false_alarms(own[name], foreign[name])
    return figures


def ood_figures(ensemble: Ensemble, own: Uncertainty, foreign: Split, batch_size: int = 512) -> dict[str, float]:
    """The same for an ensemble, whose uncertainty on its own data is known, and a split of other data."""
    logits, _ = predictions(ensemble, foreign, batch_size)
    return detection_figures(own, uncertainty_of(logits))
