"""Out-of-distribution detection by an ensemble's uncertainty."""

import torch

from structured_ensembles.data import Split
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.predictions import gather_foreign_logits
from structured_ensembles.evaluation.ranking import auroc, false_acceptance, false_alarms
from structured_ensembles.prediction.combination import Uncertainty, uncertainty_of

SCORES = ("entropy", "mutual_information")


def compute_detection_figures(known: Uncertainty, foreign: Uncertainty) -> dict[str, float]:
    """Compute AUROC and FPR95, in both conventions, for entropy and mutual information.

    known, foreign: the uncertainty on in-distribution and on other samples. fpr95: the foreign share accepted when
    95 % of the known samples are (ODIN). fpr95_foreign: the known share rejected when 95 % of the foreign samples are
    (OpenOOD, torch-uncertainty).
    """
    figures = {}
    for name in SCORES:
        is_foreign = torch.cat((torch.zeros(len(known[name])), torch.ones(len(foreign[name])))).bool()
        figures[f"{name}_auroc"] = auroc(torch.cat((known[name], foreign[name])), is_foreign)
        figures[f"{name}_fpr95"] = false_acceptance(known[name], foreign[name])
        figures[f"{name}_fpr95_foreign"] = false_alarms(known[name], foreign[name])
    return figures


def measure_ood(ensemble: Ensemble, known: Uncertainty, foreign: Split, batch_size: int = 512) -> dict[str, float]:
    """Predict a split of other data and compare with `known`, the uncertainty on the ensemble's own data."""
    return compute_detection_figures(known, uncertainty_of(gather_foreign_logits(ensemble, foreign, batch_size)))
