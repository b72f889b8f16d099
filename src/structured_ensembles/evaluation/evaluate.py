"""evaluate(): the figures of an ensemble on a split."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from structured_ensembles.common.checks import check_list, check_type, check_whole, to_python_number
from structured_ensembles.common.gaussian import Gaussians
from structured_ensembles.common.inputs import Inputs
from structured_ensembles.data import Data
from structured_ensembles.data.corrupted import CorruptedData
from structured_ensembles.data.dataset import SplitName
from structured_ensembles.data.losses import Loss, check_loss
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.calibrated import compute_calibrated_figures, compute_interval_figures
from structured_ensembles.evaluation.calibration import (
    adaptive_calibration_error,
    brier_score,
    classwise_calibration_error,
    expected_calibration_error,
    negative_log_likelihood,
)
from structured_ensembles.evaluation.checks import check_deep, check_request
from structured_ensembles.evaluation.deep_equivalent import compute_deep_equivalent
from structured_ensembles.evaluation.discarding import coverage_at_risk, measure_discarding, risk_coverage_area
from structured_ensembles.evaluation.diversity import diversity_by_outcome
from structured_ensembles.evaluation.memory import measure_file_bytes, measure_prediction_bytes
from structured_ensembles.evaluation.ood import measure_ood
from structured_ensembles.evaluation.predictions import gather_predictions
from structured_ensembles.evaluation.ranking import auroc, false_acceptance
from structured_ensembles.evaluation.regression import (
    compute_gaussian_figures,
    compute_loss_figures,
    compute_regression_figures,
)
from structured_ensembles.evaluation.robustness import measure_attacks, measure_corruptions
from structured_ensembles.evaluation.rules import check_rules, pair_with_thresholds, suffix_of
from structured_ensembles.prediction.combination import Combine, combine_logits, uncertainty_of
from structured_ensembles.prediction.held_out import check_data_for
from structured_ensembles.prediction.input_checks import warn_of_unknown_inputs
from structured_ensembles.prediction.undecided import warn_of_undecided


def evaluate(
    ensemble: Ensemble,
    data: Data,
    split: SplitName = "test",
    combine: Combine | Sequence[Combine] = "mean",
    batch_size: int = 512,
    *,
    fgsm: Sequence[float] = (),
    corruptions: bool | Sequence[str] | CorruptedData = False,
    severities: Sequence[int] = (3, 5),
    ood: Data | None = None,
    base: nn.Module | None = None,
    loss: Loss | None = None,
    deep: Ensemble | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Measure an ensemble on a split of `data`; figures' names have a family prefix. Shares are from 0 to 1.

    Always measured, in one pass over the data:
    cls/ accuracy, its members' mean and the Brier score; cal/ NLL and ECE with 30 and 15 bins, as combined, and with
    `_t` after the ensemble's temperature, and with 15 bins the adaptive ECE (bins of equally many samples) and the
    classwise one (mean over the classes); div/ the members' differences, and the paper's diversity (0 to 100) of
    correctly (cc) and wrongly (wc) classified samples; unc/ discarding by the paper's rule (its A, FA, D);
    by entropy the AUROC for errors and fpr95 (the share of errors that are kept when 95 % of the right ones are); by
    confidence aurc (area under the risk-coverage curve) and coverage_at_5_risk (the most samples that can be kept with
    at most 5 % errors); and by `Ensemble.keep` the share kept, of all and of the correct (`kept`, `kept_right`), and
    the accuracy of the kept (`kept_accuracy`); conf/ how often conformal sets or intervals hold the truth, and their
    mean size or width; size/ members and parameters. All but `_t`, `kept` and conf/ is without temperature, as in the
    paper. For regression reg/ root mean squared error, its members' mean, and the mean spread of the members (left out
    if outputs and targets differ in size). With Gaussian heads the spread is the total deviation, with its aleatoric
    and epistemic components, and there are the NLL of the mixture, of the Gaussian with its
    mean and deviation (nll_matched) and of the members, and how many targets lie in intervals that should hold 90 %
    (coverage_at_90, width_at_90). A figure that does not exist, such as the diversity of errors where there are none,
    or one after a temperature that was never fitted, is left out.

    combine: the combination rule. Of several rules, such as ("mean", "logits"), the first one's figures have these
        names; the names of another's end in the rule (`cal/ece/logits`). The network runs once for all of them.
        The mean of logits discards by its own entropy, with a threshold from the validation split of `data`.

    On request:
    fgsm: adv/, accuracy and discarding under attacks of these strengths, in units of a pixel in [0,1].
    corruptions: cor/, the same under these corruptions at these `severities`, drawn with `seed`; True means all (grey
        images have no saturation to change). `cor/mean@3` is over the 15 standard ones, `cor/extra_mean@3` over the
        four extra ones. With the result of `load_corrupted`, the official images instead, as official/.
    ood: detecting that the test split of other data is not this data, by entropy and by mutual information: AUROC,
        fpr95 (the share of other data accepted when 95 % of these are), fpr95_foreign (the share of these rejected when
        95 % of the other data are).
    loss: a function of (outputs, targets) as for `train`: reg/loss (cls/loss) of the members' mean outputs, as the
        ensemble gives them, and member_loss, the mean of the members' own.
    deep: a deep ensemble: cal/deep_equivalent, how many of its members are as good in NLL, each number of them and this
        ensemble with a temperature from the validation split (see `deep_ensemble_equivalent`).
    base: size/ overhead over this network, bytes of the saved file, peak bytes when predicting a batch.
    """
    check_type("ensemble", ensemble, Ensemble, "make one with Ensemble([network, …]), also of one network")
    check_data_for(data, ensemble.task)
    combination_rules = check_rules(combine)
    check_list("fgsm", fgsm)
    fgsm = [to_python_number(epsilon) for epsilon in fgsm]
    check_loss(loss)
    check_whole("batch_size", batch_size)
    if base is not None:
        check_type("base", base, nn.Module)
    if deep is not None:
        check_deep(deep, data, combination_rules[0])
    names = check_request(data, fgsm, corruptions, severities, ood)
    warn_of_unknown_inputs(ensemble, data)
    logits, targets = gather_predictions(ensemble, data.split(split), batch_size)
    regression = data.task == "regression"
    predictions = logits.mean(0) if regression else combine_logits(logits, combination_rules[0])
    warn_of_undecided(
        predictions, "so that figures mean nothing" if regression else "which count as class 0 in figures"
    )
    rules = pair_with_thresholds(combination_rules, ensemble, data)
    if data.task == "regression":
        figures = _regression_figures(ensemble, logits, targets) | compute_interval_figures(ensemble, logits, targets)
    else:
        figures = {}
        for rule, threshold in rules.items():
            rule_figures = _classification_figures(ensemble, logits, targets, rule, threshold)
            figures |= {f"{name}{suffix_of(rule, rules)}": value for name, value in rule_figures.items()}
    if loss is not None:
        family = "reg" if data.task == "regression" else "cls"
        losses = compute_loss_figures(ensemble, loss, logits, targets)
        figures |= {f"{family}/{name}": value for name, value in losses.items()}
    if deep is not None:
        figures["cal/deep_equivalent"] = compute_deep_equivalent(
            ensemble, deep, data, split, combination_rules[0], batch_size
        )
    if fgsm:
        figures |= _family("adv", measure_attacks(ensemble, data.split(split), fgsm, rules, batch_size))
    if names:
        official = corruptions if isinstance(corruptions, CorruptedData) else None
        source = official or data.split(split)
        corrupted = measure_corruptions(ensemble, source, names, severities, rules, batch_size, seed)
        figures |= _family("official" if official else "cor", corrupted)
    if ood is not None:
        figures |= _family("ood", measure_ood(ensemble, uncertainty_of(logits), ood.split("test"), batch_size))
    return figures | _size_figures(ensemble, base, lambda: next(iter(data.split(split).batches(batch_size)))[0])


def _regression_figures(ensemble: Ensemble, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    if ensemble.gaussian:
        figures = compute_gaussian_figures(Gaussians.from_outputs(outputs), targets)
    else:
        figures = compute_regression_figures(outputs, targets)
    return {f"reg/{name}": value for name, value in figures.items()}  # NaN stays: a diverged network should show


def _classification_figures(
    ensemble: Ensemble, logits: Tensor, targets: Tensor, combine: Combine, threshold: float | None
) -> dict[str, float]:
    probabilities = combine_logits(logits, combine)
    correct = probabilities.argmax(-1) == targets
    uncertainty = uncertainty_of(logits, combine=combine)
    cc, wc = diversity_by_outcome(logits, correct)
    negative_confidence = -probabilities.max(-1).values
    discarding_figures = {
        "accuracy": float(correct.double().mean()),
        "auroc": auroc(uncertainty.entropy, ~correct),
        "fpr95": false_acceptance(uncertainty.entropy[correct], uncertainty.entropy[~correct]),
        "aurc": risk_coverage_area(negative_confidence, correct),
        "coverage_at_5_risk": coverage_at_risk(negative_confidence, correct, 0.05),
    }
    if threshold is not None:
        discarding_figures |= vars(measure_discarding(uncertainty.entropy, correct, threshold))
    return {
        "cls/accuracy": float(correct.double().mean()),
        "cls/member_accuracy": float((logits.argmax(-1) == targets).double().mean()),
        "cls/brier": brier_score(probabilities, targets),
        "cal/nll": negative_log_likelihood(probabilities, targets),
        "cal/ece": expected_calibration_error(probabilities, targets, bins=30),
        "cal/ece15": expected_calibration_error(probabilities, targets, bins=15),
        "cal/adaptive_ece": adaptive_calibration_error(probabilities, targets),
        "cal/classwise_ece": classwise_calibration_error(probabilities, targets),
        "div/entropy": float(uncertainty.entropy.mean()),
        "div/mutual_information": float(uncertainty.mutual_information.mean()),
        "div/disagreement": float(uncertainty.disagreement.mean()),
        **_family("div", {"cc": cc, "wc": wc}),
        **_family("unc", discarding_figures),
        **compute_calibrated_figures(ensemble, logits, targets, combine),
    }


def _size_figures(ensemble: Ensemble, base: nn.Module | None, first_batch: Callable[[], Inputs]) -> dict[str, float]:
    """Measure the size of an ensemble; beside a base network also what depends on how it is stored and run."""
    figures = {"size/members": float(len(ensemble)), "size/parameters": float(ensemble.num_parameters)}
    if base is not None:
        figures["size/overhead"] = ensemble.overhead(base)
        figures["size/file_bytes"] = float(measure_file_bytes(ensemble))
        figures["size/peak_bytes"] = float(measure_prediction_bytes(ensemble, first_batch()))
    return figures


def _family(prefix: str, figures: dict[str, float]) -> dict[str, float]:
    """Prefix the names of figures with their family; leave NaN out."""
    return {f"{prefix}/{name}": value for name, value in figures.items() if not math.isnan(value)}
