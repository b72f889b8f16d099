"""evaluate(): the figures of an ensemble on a split."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.checks import check_choice, check_list, check_type, plain_number
from structured_ensembles.data import Data
from structured_ensembles.data.corrupted import CorruptedData
from structured_ensembles.data.dataset import SplitName, check_data
from structured_ensembles.ensemble import COMBINE, Combine, Ensemble, combined, uncertainty_of
from structured_ensembles.evaluation.calibrated import calibrated_figures, interval_figures
from structured_ensembles.evaluation.calibration import brier_score, expected_calibration_error, negative_log_likelihood
from structured_ensembles.evaluation.checks import check_request
from structured_ensembles.evaluation.discarding import discarding
from structured_ensembles.evaluation.diversity import diversity_by_outcome
from structured_ensembles.evaluation.memory import file_bytes, prediction_bytes
from structured_ensembles.evaluation.ood import ood_figures
from structured_ensembles.evaluation.predictions import predictions
from structured_ensembles.evaluation.ranking import auroc
from structured_ensembles.evaluation.robustness import attack_figures, corruption_figures


def evaluate(
    ensemble: Ensemble,
    data: Data,
    split: SplitName = "test",
    combine: Combine = "mean",
    batch_size: int = 512,
    *,
    fgsm: Sequence[float] = (),
    corruptions: bool | Sequence[str] | CorruptedData = False,
    severities: Sequence[int] = (3, 5),
    ood: Data | None = None,
    base: nn.Module | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Plain figures of an ensemble on a split of `data`; names have a family prefix. Shares are from 0 to 1.

    Always there, from one pass over the data:
    cls/ accuracy, its members' mean and the Brier score; cal/ NLL and ECE with 30 and 15 bins, as combined, and with
    `_t` after the ensemble's temperature; div/ how the members differ, and the paper's diversity (0 to 100) of
    correctly (cc) and wrongly (wc) classified samples; unc/ what discarding by the paper's rule gives (its A, FA, D),
    the AUROC of the entropy for errors, and what `Ensemble.keep` does: the share kept, of all and of the right
    (`kept`, `kept_right`), and how often the kept are right (`kept_accuracy`); conf/ how often conformal sets or
    intervals hold the truth, and their mean size or width; size/ members and parameters. All but `_t`, `kept` and conf/
    is without temperature, as in the paper. For regression reg/ root mean squared error, its members' mean, and the
    mean spread of the members. A figure that does not exist, such as the diversity of errors where there are none, or
    one after a temperature that was never fitted, is left out.

    On request:
    fgsm: adv/, accuracy and discarding under attacks of these strengths, in units of a pixel in [0,1].
    corruptions: cor/, the same under these corruptions at these `severities`, drawn with `seed`; True means all (grey
        images have no saturation to change). What `load_corrupted` gives: the official images instead, as official/.
    ood: detecting that the test split of other data is not this data, by entropy and by mutual information.
    base: size/ overhead over this network, bytes of the saved file, peak bytes when predicting a batch.
    """
    check_type("ensemble", ensemble, Ensemble, "Ensemble([network, …]) makes one, also of one network")
    check_data(data)
    check_choice("combine", combine, COMBINE)
    check_list("fgsm", fgsm)
    fgsm = [plain_number(epsilon) for epsilon in fgsm]
    names = check_request(data, fgsm, corruptions, severities, ood)
    logits, targets = predictions(ensemble, data.split(split), batch_size)
    if data.task == "regression":
        figures = _regression(logits, targets) | interval_figures(ensemble, logits, targets)
    else:
        figures = _classification(ensemble, logits, targets, combine)
    if fgsm:
        figures |= _family("adv", attack_figures(ensemble, data.split(split), fgsm, combine, batch_size))
    if names:
        official = corruptions if isinstance(corruptions, CorruptedData) else None
        source = official or data.split(split)
        found = corruption_figures(ensemble, source, names, severities, combine, batch_size, seed)
        figures |= _family("official" if official else "cor", found)
    if ood is not None:
        figures |= _family("ood", ood_figures(ensemble, uncertainty_of(logits), ood.split("test"), batch_size))
    figures |= {"size/members": float(len(ensemble)), "size/parameters": float(ensemble.num_parameters)}
    if base is not None:
        batch, _ = next(iter(data.split(split).batches(batch_size)))
        figures["size/overhead"] = ensemble.overhead(base)
        figures["size/file_bytes"] = float(file_bytes(ensemble))
        figures["size/peak_bytes"] = float(prediction_bytes(ensemble, batch))
    return figures


def _regression(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    targets = targets.view_as(outputs[0])
    errors = [float(F.mse_loss(member, targets).sqrt()) for member in outputs]
    return {
        "reg/rmse": float(F.mse_loss(outputs.mean(0), targets).sqrt()),
        "reg/member_rmse": sum(errors) / len(errors),
        "reg/spread": float(outputs.std(0, correction=0).mean()),
    }


def _classification(ensemble: Ensemble, logits: Tensor, targets: Tensor, combine: Combine) -> dict[str, float]:
    probabilities = combined(logits, combine)
    correct = probabilities.argmax(-1) == targets
    unsure = uncertainty_of(logits)
    cc, wc = diversity_by_outcome(logits, correct)
    uncertain = {"accuracy": float(correct.double().mean()), "auroc": auroc(unsure.entropy, ~correct)}
    if ensemble.calibration.paper_threshold is not None:
        uncertain |= vars(discarding(unsure.entropy, correct, ensemble.calibration.paper_threshold))
    return {
        "cls/accuracy": float(correct.double().mean()),
        "cls/member_accuracy": float((logits.argmax(-1) == targets).double().mean()),
        "cls/brier": brier_score(probabilities, targets),
        "cal/nll": negative_log_likelihood(probabilities, targets),
        "cal/ece": expected_calibration_error(probabilities, targets, bins=30),
        "cal/ece15": expected_calibration_error(probabilities, targets, bins=15),
        "div/entropy": float(unsure.entropy.mean()),
        "div/mutual_information": float(unsure.mutual_information.mean()),
        "div/disagreement": float(unsure.disagreement.mean()),
        **_family("div", {"cc": cc, "wc": wc}),
        **_family("unc", uncertain),
        **calibrated_figures(ensemble, logits, targets, combine),
    }


def _family(prefix: str, figures: dict[str, float]) -> dict[str, float]:
    """With their prefix, and without those that do not exist."""
    return {f"{prefix}/{name}": value for name, value in figures.items() if not math.isnan(value)}
