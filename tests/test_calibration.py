"""Temperature and threshold, and how an ensemble keeps them: by hand, against SciPy and loops."""

import json
import math
import warnings
from collections.abc import Iterator
from copy import deepcopy
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_softmax, softmax
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.artifact import FORMAT
from structured_ensembles.calibration import (
    FEW_ERRORS,
    PRIOR,
    Calibration,
    apply_temperature,
    fit_supported_temperature,
    fit_temperature,
    fit_threshold,
)
from structured_ensembles.evaluation.calibration import expected_calibration_error, negative_log_likelihood
from structured_ensembles.evaluation.discarding import fit_discard_threshold
from structured_ensembles.prediction.combination import combine_logits, combine_logs, uncertainty_of
from structured_ensembles.storage.container import read_container, write_container


def samples(seed: int, sharpness: float, number: int = 300, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Draw logits (samples, classes) that are `sharpness` times as large as the labels justify."""
    rng = np.random.default_rng(seed)
    honest = 2 * rng.standard_normal((number, classes))
    labels = [rng.choice(classes, p=row) for row in softmax(honest, -1)]
    return torch.from_numpy(sharpness * honest), torch.tensor(labels)


class Table(nn.Module):
    """Return row x of a table of logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(logits.float())

    def forward(self, x: Tensor) -> Tensor:
        return self.rows[x[:, 0].long()]


def table_ensemble(seed: int = 0, sharpness: float = 3.0, members: int = 3) -> tuple[se.Ensemble, se.Data]:
    """Make overconfident members that see one truth through noise; 300 validation and 300 test samples."""
    logits, labels = samples(seed, sharpness, 600)
    noise = torch.randn(members, 600, 5, generator=torch.Generator().manual_seed(seed))
    x = torch.arange(600.0)[:, None]
    data = se.Data.from_arrays(
        x, labels, validation=(x[:300], labels[:300]), test=(x[300:], labels[300:]), classes=5, name="table"
    )
    ensemble = se.Ensemble([Table(logits + 2 * offsets) for offsets in noise], classes=data.classes)
    ensemble.input_shape = (1,)
    return ensemble.eval(), data


@pytest.fixture
def calibrated() -> tuple[se.Ensemble, se.Data]:
    ensemble, data = table_ensemble()
    ensemble.calibrate(data)
    return ensemble, data


# Temperature --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_temperature_equals_scipys_minimum(seed: int, sharpness: float) -> None:
    logits, labels = samples(seed, sharpness)
    values, truth = logits.numpy(), labels.numpy()

    def cost(inverse: float) -> float:
        return -float(np.mean(log_softmax(inverse * values, -1)[np.arange(len(truth)), truth]))

    def gradient(inverse: float) -> float:
        weights = softmax(inverse * values, -1)
        return float(np.mean((weights * values).sum(-1) - values[np.arange(len(truth)), truth]))

    temperature = fit_temperature(logits, labels)
    assert 1 / temperature == pytest.approx(brentq(gradient, 0.01, 100, xtol=1e-15, rtol=1e-14), rel=1e-9)
    assert 1 / temperature == pytest.approx(minimize_scalar(cost, bounds=(0.01, 20), method="bounded").x, rel=1e-3)
    assert temperature == pytest.approx(sharpness, rel=0.25)  # what the labels were drawn with
    assert fit_temperature(logits.log_softmax(-1), labels) == pytest.approx(temperature)  # probabilities will do
    assert fit_temperature(values, truth.tolist()) == temperature


def test_fitted_temperature_follows_the_logit_scale() -> None:
    logits, labels = samples(0, 1.0)
    one = fit_temperature(logits, labels)
    assert fit_temperature(7 * logits, labels) == pytest.approx(7 * one)


def test_prior_bounds_the_temperature_if_all_predictions_are_correct() -> None:
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = logits.argmax(-1)
    assert fit_temperature(logits, labels) == pytest.approx(0.01)  # the lowest there is
    assert 0.2 < fit_temperature(logits, labels, prior=8) < 0.9
    assert fit_temperature(torch.zeros(5, 1), torch.zeros(5, dtype=torch.long), prior=8) == pytest.approx(1)


@pytest.mark.parametrize("errors", [0, FEW_ERRORS - 1, FEW_ERRORS, 40])
def test_prior_is_used_only_with_few_errors(errors: int) -> None:
    """With three errors or more, the temperature is the maximum-likelihood one."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(300, 4, generator=generator).double()
    labels = logits.argmax(-1)
    labels[:errors] = logits[:errors].topk(2).indices[:, 1]
    assert fit_supported_temperature(logits, labels) == fit_temperature(logits, labels, PRIOR if errors < 3 else 0)


@pytest.mark.parametrize(("number", "near"), [(20, 0.3), (300, 0.1), (5000, 0.01)])
def test_temperature_with_prior_equals_scipy_and_the_prior_fades(number: int, near: float) -> None:
    logits, labels = samples(0, 2.0, number)
    values, truth = logits.numpy(), labels.numpy()

    def cost(log: float) -> float:
        likelihood = log_softmax(values / math.exp(log), -1)[np.arange(number), truth].sum()
        return -float(likelihood) + 8 * (math.exp(-log) - 1 + log)

    expected = math.exp(minimize_scalar(cost, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}).x)
    temperature, alone = fit_temperature(logits, labels, prior=8), fit_temperature(logits, labels)
    assert temperature == pytest.approx(expected, rel=1e-5)
    assert 1 < temperature < alone
    assert temperature == pytest.approx(alone, rel=near)


def test_temperature_is_maximal_if_all_predictions_are_wrong() -> None:
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    assert fit_temperature(logits, logits.argmin(-1)) == pytest.approx(100)


def test_zero_probabilities_have_a_finite_temperature() -> None:
    sure = torch.tensor([[1.0, 0.0, 0.0]] * 98 + [[0.0, 0.9, 0.1]] + [[0.0, 0.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([0] * 98 + [1, 0])  # the last one is wrong, and was certain
    temperature = fit_temperature(sure.log(), labels)
    assert 10 < temperature < 30
    tiny = float(np.finfo(np.float32).tiny)
    assert temperature == pytest.approx(fit_temperature(sure.clamp_min(tiny).log(), labels), rel=1e-6)


@pytest.mark.parametrize(
    ("scores", "targets", "message"),
    [
        (torch.zeros(3, 2), torch.zeros(4), r"not \(3, 2\) and \(4,\)"),
        (torch.zeros(0, 2), torch.zeros(0), "no samples"),
        (torch.full((3, 2), math.nan), torch.zeros(3), "NaN or infinite"),
        (torch.full((3, 2), -math.inf), torch.zeros(3), "NaN or infinite"),
        (torch.zeros(3, 2), torch.tensor([0, 1, 2]), "labels from 0 to 1, not from 0 to 2"),
    ],
)
def test_invalid_inputs_of_fit_temperature_are_errors(scores: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_temperature(scores, targets)


def test_apply_temperature_equals_a_hand_computation() -> None:
    probabilities = apply_temperature(torch.tensor([[0.8, 0.2, 0.0], [0.2, 0.3, 0.5]]), 2.0)
    assert probabilities[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0])  # the root of 4 is 2
    roots = [math.sqrt(share) for share in (0.2, 0.3, 0.5)]
    assert probabilities[1].tolist() == pytest.approx([root / sum(roots) for root in roots])


def test_temperature_applies_to_the_combined_prediction() -> None:
    logits = 4 * torch.randn(3, 20, 5, generator=torch.Generator().manual_seed(0))
    for rule in ("mean", "logits"):
        expected = apply_temperature(combine_logits(logits, rule), 1.7)
        torch.testing.assert_close(combine_logits(logits, rule, 1.7), expected)
        torch.testing.assert_close(combine_logs(logits, rule).exp(), combine_logits(logits, rule))
        assert not torch.allclose(combine_logits(logits / 1.7), combine_logits(logits, "mean", 1.7), atol=1e-2)
    assert torch.equal(combine_logits(logits, "vote", 1.7), combine_logits(logits, "vote"))
    assert torch.equal(combine_logits(logits, "mean", 1.0), logits.softmax(-1).mean(0))


def test_calibrated_probabilities_can_be_exported() -> None:
    class Calibrated(nn.Module):
        def forward(self, logits: Tensor) -> list[Tensor]:
            probabilities = [combine_logits(logits, rule, 1.7) for rule in ("mean", "logits", "vote")]
            return [*probabilities, *uncertainty_of(logits, 1.7).to_dict().values()]

    logits = torch.randn(3, 8, 5)
    program = torch.export.export(Calibrated(), (logits,))
    other = torch.randn(3, 8, 5)
    for output, expected in zip(program.module()(other), Calibrated()(other), strict=True):
        torch.testing.assert_close(output, expected)


def test_uncertainty_at_a_temperature_equals_a_hand_computation() -> None:
    def entropy(p: np.ndarray) -> float:
        return -float(np.sum(p * np.log(p)))

    logits = np.array([[2.0, 0, 0], [0, 3, 0]])
    uncertainty = uncertainty_of(torch.tensor(logits)[:, None], 2.0)
    mean = softmax(logits, -1).mean(0)
    assert float(uncertainty.entropy) == pytest.approx(entropy(np.sqrt(mean) / np.sqrt(mean).sum()))
    members = softmax(logits / 2, -1)
    information = entropy(members.mean(0)) - (entropy(members[0]) + entropy(members[1])) / 2
    assert float(uncertainty.mutual_information) == pytest.approx(information)
    assert float(uncertainty.disagreement) == 1


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(0.05, 20), st.floats(0.1, 30))
def test_mutual_information_is_never_negative(seed: int, temperature: float, size: float) -> None:
    logits = size * torch.randn(4, 30, 6, generator=torch.Generator().manual_seed(seed))
    uncertainty = uncertainty_of(logits, temperature)
    assert float(uncertainty.mutual_information.min()) >= 0
    assert float(uncertainty.mutual_information.max()) <= math.log(4) + 1e-5  # of four members
    assert float(uncertainty_of(logits[:1].expand(4, -1, -1), temperature).mutual_information.max()) < 1e-5


# Threshold ----------------------------------------------------------------------------------------------------------

PREDICTIONS = st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=50)  # few values: many ties


@settings(deadline=None)
@given(PREDICTIONS, st.sampled_from([0.01, 0.5, 0.75, 0.9, 0.95, 1.0]))
def test_keep_gives_the_smallest_sufficient_threshold(predictions: list[tuple[int, bool]], share: float) -> None:
    entropy, correct = torch.tensor([float(e) for e, _ in predictions]), torch.tensor([c for _, c in predictions])
    right = [e for e, c in predictions if c] or [e for e, _ in predictions]
    enough = [t for t in sorted(set(right)) if sum(e <= t for e in right) >= share * len(right) - 1e-9]
    assert fit_threshold(entropy, correct, ("keep", share)) == enough[0]


@settings(deadline=None)
@given(PREDICTIONS, st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 1.0]))
def test_risk_gives_the_largest_admissible_threshold(predictions: list[tuple[int, bool]], share: float) -> None:
    entropy, correct = torch.tensor([float(e) for e, _ in predictions]), torch.tensor([c for _, c in predictions])

    def risk(threshold: int) -> float:
        kept = [c for e, c in predictions if e <= threshold]
        return 1 - sum(kept) / len(kept)

    good = [t for t in sorted({e for e, _ in predictions}) if risk(t) <= share + 1e-9]
    assert fit_threshold(entropy, correct, ("risk", share)) == (good[-1] if good else -1)


def test_threshold_for_keeps_the_requested_share(calibrated: tuple[se.Ensemble, se.Data]) -> None:
    ensemble, data = calibrated
    x, y = data.validation.inputs, data.validation.targets
    correct = ensemble.predict(x) == y
    for share in (0.95, 0.5):
        threshold = ensemble.threshold_for(data, keep=share)
        assert threshold == ensemble.threshold
        kept = ensemble.keep(x)
        assert torch.equal(kept, ensemble.uncertainty(x).entropy.double() <= threshold)
        assert float(kept[correct].double().mean()) == pytest.approx(share, abs=1 / int(correct.sum()))
        assert float(kept[correct].double().mean()) >= share
    threshold = ensemble.threshold_for(data, risk=0.1)
    kept = ensemble.keep(x)
    assert 0 < float(1 - correct[kept].double().mean()) <= 0.1
    larger = ensemble.uncertainty(x).entropy[~kept].double().sort().values
    risks = [float((~correct[ensemble.uncertainty(x).entropy <= threshold]).double().mean()) for threshold in larger]
    assert min(risks) > 0.1  # none keeps more


def test_predictions_that_are_nan_have_no_threshold() -> None:
    """A threshold of NaN would discard everything, and a file with it could not be read again."""

    class Overflowing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).where(x[:, :1] < 1, torch.nan)

    inputs, labels = torch.arange(8.0)[:, None] / 4, torch.arange(8) % 2
    ensemble = se.Ensemble([Overflowing(1, 2)], threshold=0.5)
    for fit in (
        lambda: ensemble.threshold_for((inputs, labels), keep=0.9),
        lambda: ensemble.threshold_for((inputs, labels), risk=0.9),
        lambda: ensemble.calibrate((inputs, labels), temperature=2.0),
    ):
        with pytest.raises(ValueError, match="predictions must be finite, but some are NaN"):
            fit()
    assert ensemble.threshold == 0.5


def test_invalid_threshold_requests_are_errors(calibrated: tuple[se.Ensemble, se.Data]) -> None:
    ensemble, data = calibrated
    for wrong in ({}, {"keep": 0.9, "risk": 0.1}):
        with pytest.raises(ValueError, match=r"give either keep, such as 0\.95, or risk"):
            ensemble.threshold_for(data, **wrong)
    for wrong in ({"keep": 0.0}, {"keep": 95}, {"risk": -0.1}, {"risk": math.nan}, {"keep": True}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a share"):
            ensemble.threshold_for(data, **wrong)
    with pytest.raises(ValueError, match="there is no threshold yet"):
        table_ensemble()[0].keep(data.test.inputs)
    wrong_labels = 4 - ensemble.predict(data.validation.inputs).clamp(0, 4)
    wrong_labels[wrong_labels == 2] = 3
    x = data.validation.inputs
    confused = se.Data.from_arrays(x, wrong_labels, validation=(x, wrong_labels), classes=5)
    with pytest.warns(UserWarning, match="so none is kept"):
        ensemble.threshold_for(confused, risk=0.01)
    assert not ensemble.keep(x).any()


# Of an ensemble -----------------------------------------------------------------------------------------------------


def test_calibrate_fits_each_rule_and_predict_proba_applies_it() -> None:
    ensemble, data = table_ensemble()
    x, y = data.validation.inputs, data.validation.targets
    logits = ensemble.logits(x).double()
    before = ensemble.predict_proba(x)
    assert ensemble.temperature == 1
    returned = ensemble.calibrate(data)
    assert returned == ensemble.temperature == fit_temperature(logits.softmax(-1).mean(0).log(), y)
    fitted = {rule: ensemble.calibration.temperature(rule) for rule in ("mean", "logits", "vote")}
    assert fitted == {
        "mean": returned,
        "logits": pytest.approx(fit_temperature(logits.mean(0), y)),
        "vote": 1,
    }
    assert fitted["logits"] > 1.05 * fitted["mean"] > 1.05  # the mean of probabilities is less sure already
    for rule, temperature in fitted.items():
        off, on = ensemble.predict_proba(x, rule, temperature=1.0), ensemble.predict_proba(x, rule)
        torch.testing.assert_close(on, off if rule == "vote" else apply_temperature(off, temperature))
        torch.testing.assert_close(ensemble.predict_proba(x, rule, temperature=temperature), on)
        assert torch.equal(ensemble.predict(x, rule), off.argmax(-1))
        if rule != "vote":
            assert negative_log_likelihood(on, y) < negative_log_likelihood(off, y) - 0.01
            assert expected_calibration_error(on, y) < expected_calibration_error(off, y) - 0.03
    assert torch.equal(ensemble.predict_proba(x, temperature=1.0), before)
    assert torch.equal(ensemble.uncertainty(x).entropy, uncertainty_of(ensemble.logits(x), returned).entropy)
    assert torch.equal(ensemble.uncertainty(x, temperature=1.0).entropy, uncertainty_of(ensemble.logits(x)).entropy)
    with pytest.raises(ValueError, match="must be left out for combine='vote'"):
        ensemble.predict_proba(x, "vote", temperature=2.0)
    for wrong in (0, -1.0, math.inf, math.nan, "1"):
        with pytest.raises(ValueError, match="temperature must be a finite number above 0"):
            ensemble.predict_proba(x, temperature=wrong)


def test_new_temperature_refits_threshold_and_conformal_sets(calibrated: tuple[se.Ensemble, se.Data]) -> None:
    ensemble, data = calibrated
    assert ensemble.calibration.threshold_rule == ("keep", 0.95)
    ensemble.threshold_for(data, risk=0.1)
    ensemble.conformal(data, 0.8, "raps", penalty=0.05, free_ranks=2)
    fitted = ensemble.calibration
    assert ensemble.calibrate(data, temperature=2.5) == 2.5
    other = ensemble.calibration
    assert other.temperatures == {"mean": 2.5, "logits": 2.5}
    assert other.threshold_rule == ("risk", 0.1)
    assert other.threshold != fitted.threshold
    assert other.conformal != fitted.conformal
    alone = table_ensemble()[0]
    alone.temperature = 2.5
    assert alone.threshold_for(data, risk=0.1) == other.threshold
    assert alone.conformal(data, 0.8, "raps", penalty=0.05, free_ranks=2) == other.conformal
    ensemble.calibrate(data)
    assert ensemble.calibration == fitted
    ensemble.temperature = 1.0  # nothing to fit them to: what was fitted at another temperature is gone
    assert (ensemble.temperature, ensemble.threshold, ensemble.calibration.conformal) == (1, None, None)
    ensemble.calibrate(data)
    ensemble.adopt(data)  # as before training: other weights will come
    assert ensemble.calibration == Calibration()


def test_assigned_threshold_is_used(calibrated: tuple[se.Ensemble, se.Data]) -> None:
    ensemble, data = calibrated
    ensemble.threshold = 0.25
    assert ensemble.calibration.threshold_rule is None
    x = data.test.inputs
    assert torch.equal(ensemble.keep(x), ensemble.uncertainty(x).entropy <= 0.25)


@pytest.mark.parametrize("wrong", ["high", math.nan, math.inf, [0.5]])
def test_invalid_threshold_is_an_error(wrong: object) -> None:
    with pytest.raises(ValueError, match="threshold must be a finite number"):
        se.Ensemble([nn.Linear(2, 2)], threshold=wrong)
    ensemble = se.Ensemble([nn.Linear(2, 2)], threshold=np.float32(0.5))
    with pytest.raises(ValueError, match="threshold must be a finite number"):
        ensemble.threshold = wrong
    assert ensemble.threshold == 0.5


def test_calibration_is_refused_for_regression() -> None:
    x = torch.rand(40, 3)
    data = se.Data.from_arrays(x, x.sum(1), validation=0.5)
    ensemble = se.Ensemble([nn.Linear(3, 1)], task="regression")
    for method, arguments in (("calibrate", {}), ("threshold_for", {"keep": 0.9})):
        with pytest.raises(ValueError, match=f"{method} is for classification"):
            getattr(ensemble, method)(data, **arguments)
    with pytest.raises(ValueError, match="data are for regression, but the ensemble is for classification"):
        se.Ensemble([nn.Linear(3, 1)]).calibrate(data)
    with pytest.raises(ValueError, match="temperature must be left out for a regression"):
        se.structured_ensemble(se.zoo.mlp(3, 1), data, temperature=2.0)


def test_train_calibrates_the_ensemble(trained: tuple[se.Ensemble, se.Data]) -> None:
    ensemble, data = trained
    trained = ensemble.calibration
    assert trained.temperatures["mean"] != 1
    assert trained.threshold_rule == ("keep", 0.95)
    assert (trained.conformal.method, trained.conformal.coverage) == ("aps", 0.9)  # no set is empty
    assert trained.paper_threshold == pytest.approx(fit_discard_threshold(ensemble, data))
    assert ensemble.calibrate(data) == trained.temperatures["mean"]
    assert ensemble.calibration == trained
    unseen = se.Data.from_arrays(data.train.inputs, data.train.targets, validation=0.0)
    again = se.Ensemble(list(ensemble.members))
    again.temperature = 3.0
    se.train(again, unseen, se.Recipe(epochs=1, rate=1e-9), quiet=True)
    assert again.calibration == Calibration()  # what was fitted to other weights is gone, and nothing to fit it to


def test_paper_threshold_discards_a_quarter_of_correct_predictions_and_ours_does_not(
    trained: tuple[se.Ensemble, se.Data],
) -> None:
    ensemble, data = trained
    figures = se.evaluate(ensemble, data, split="validation")
    rows = data.validation.index
    x, y = data.validation.inputs[rows], data.validation.targets[rows]
    correct, entropy = ensemble.predict(x) == y, ensemble.uncertainty(x, temperature=1.0).entropy.double()
    kept = entropy <= np.percentile(entropy[correct].numpy(), 75)
    assert figures["unc/discarded"] == pytest.approx(float((~kept).double().mean()))
    assert figures["unc/filtered_accuracy"] == pytest.approx(float(correct[kept].double().mean()))
    assert figures["unc/kept_right"] == pytest.approx(0.95, abs=0.01)
    kept = ensemble.keep(x)
    assert figures["unc/kept"] == pytest.approx(float(kept.double().mean()))
    assert figures["unc/kept_accuracy"] == pytest.approx(float(correct[kept].double().mean()))


@pytest.mark.parametrize("rule", ["mean", "logits", "vote"])
def test_evaluate_gives_figures_with_and_without_temperature(trained: tuple[se.Ensemble, se.Data], rule: str) -> None:
    ensemble, data = trained
    figures = se.evaluate(ensemble, data, combine=rule)
    x, y = data.test.inputs, data.test.targets
    for suffix, temperature in (("", 1.0), ("_t", None)):
        probabilities = ensemble.predict_proba(x, rule, temperature=temperature)
        if suffix and rule == "vote":
            assert not {"cal/nll_t", "cal/ece_t", "cal/ece15_t"} & set(figures)
            continue
        assert figures[f"cal/nll{suffix}"] == pytest.approx(negative_log_likelihood(probabilities, y))
        assert figures[f"cal/ece{suffix}"] == pytest.approx(expected_calibration_error(probabilities, y, 30))
        assert figures[f"cal/ece15{suffix}"] == pytest.approx(expected_calibration_error(probabilities, y, 15))
    sets = ensemble.predict_set(x)
    assert figures["conf/coverage"] == pytest.approx(float(sets[torch.arange(len(y)), y].double().mean()))
    assert figures["conf/size"] == pytest.approx(float(sets.sum(-1).double().mean()))
    plain = se.evaluate(se.Ensemble(list(ensemble.members), normalization=ensemble.normalization), data, combine=rule)
    assert plain == {
        name: value
        for name, value in figures.items()
        if not name.startswith(("conf/", "unc/kept", "unc/filtered", "unc/discarded")) and not name.endswith("_t")
    }


def test_non_finite_outputs_leave_the_ensemble_uncalibrated() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else super().forward(x) * math.nan

    x = torch.rand(60, 4)
    data = se.Data.from_arrays(x, torch.arange(60) % 2, validation=0.5)
    ensemble = se.Ensemble([Broken(4, 2)])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        se.train(ensemble, data, se.Recipe(epochs=1), quiet=True)
    assert any("stays uncalibrated" in str(warning.message) for warning in warned)
    assert ensemble.calibration == Calibration()


def test_outputs_of_another_shape_leave_the_ensemble_uncalibrated() -> None:
    """A user's loss may take one output for two classes; training must not fail at its end."""
    x = torch.rand(60, 4)
    data = se.Data.from_arrays(x, torch.arange(60) % 2, validation=0.5)
    ensemble = se.Ensemble([nn.Linear(4, 1)])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.float())

    with pytest.warns(UserWarning, match="stays uncalibrated: targets must be labels from 0 to 0, not from 0 to 1"):
        se.train(ensemble, data, se.Recipe(epochs=1), loss=loss, quiet=True)
    assert ensemble.calibration == Calibration()


def test_temperature_can_be_fixed_or_switched_off(trained: tuple[se.Ensemble, se.Data]) -> None:
    data = trained[1]
    torch.manual_seed(0)
    model = se.zoo.mlp(64)
    quick = {"members": 2, "recipe": se.Recipe(epochs=1), "selection": "random", "quiet": True}
    fitted = se.structured_ensemble(model, data, **quick)
    off = se.structured_ensemble(model, data, temperature=1.0, **quick)
    fixed = se.structured_ensemble(model, data, temperature=1.5, **quick)
    assert fitted.temperature != 1
    assert (off.temperature, off.calibration.temperatures, fixed.temperature) == (1, {}, 1.5)
    assert "cal/ece_t" not in se.evaluate(off, data)
    x = data.test.inputs
    assert torch.equal(off.predict_proba(x), fitted.predict_proba(x, temperature=1.0))
    assert off.threshold == pytest.approx(off.threshold_for(data, keep=0.95))
    with pytest.raises(ValueError, match="temperature must be a finite number above 0"):
        se.structured_ensemble(model, data, temperature=0)


# Storage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(trained: tuple[se.Ensemble, se.Data]) -> se.Ensemble:
    ensemble = deepcopy(trained[0])
    ensemble.threshold_for(trained[1], risk=0.02)
    ensemble.conformal(trained[1], 0.98, "aps")
    return ensemble


def test_file_keeps_the_calibration(kept: se.Ensemble, trained: tuple[se.Ensemble, se.Data], tmp_path: Path) -> None:
    ensemble, x = kept, trained[1].test.inputs
    ensemble.save(tmp_path / "file")
    loaded = se.Ensemble.load(tmp_path / "file")
    assert loaded.calibration == ensemble.calibration
    for method in ("predict_proba", "keep", "predict_set"):
        assert torch.equal(getattr(loaded, method)(x), getattr(ensemble, method)(x))
    assert torch.equal(loaded.uncertainty(x).entropy, ensemble.uncertainty(x).entropy)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()
    loaded.temperature = 1.0
    loaded.save(tmp_path / "off")
    assert se.Ensemble.load(tmp_path / "off").calibration == Calibration(
        paper_threshold=kept.calibration.paper_threshold
    )


def test_state_dict_keeps_the_calibration(kept: se.Ensemble) -> None:
    other = se.Ensemble([se.zoo.mlp(64) for _ in range(3)])
    other.load_state_dict(kept.state_dict())
    assert other.calibration == kept.calibration
    plain = se.Ensemble([se.zoo.mlp(64) for _ in range(3)])
    assert "calibration" not in plain.state_dict()
    other.load_state_dict(plain.state_dict())
    assert other.calibration == Calibration()


def test_files_of_earlier_versions_have_the_paper_threshold(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(64)], threshold=0.7)
    ensemble.save(tmp_path / "file")
    structure, tensors = read_container(tmp_path / "file", FORMAT, 1, "an ensemble")
    assert "calibration" not in structure  # earlier versions can read it
    write_container(tmp_path / "file", FORMAT, 1, structure, tensors)
    loaded = se.Ensemble.load(tmp_path / "file")
    assert loaded.calibration == Calibration(threshold=0.7, paper_threshold=0.7)
    assert loaded.temperature == 1


def odd_values() -> Iterator[tuple[str, object, str]]:
    yield "temperatures", {"mean": 0}, "temperature must be"
    yield "temperatures", {"mean": None}, "temperature must be"
    yield "temperatures", {"vote": 2.0}, "temperatures must be a dict with entries of mean and logits only"
    yield "temperatures", [1.0], "temperatures must be"
    yield "threshold", "high", "threshold must be"
    yield "threshold", math.nan, "threshold must be"
    yield "paper_threshold", [], "paper_threshold must be"
    yield "threshold_rule", ["keep"], "threshold_rule must be"
    yield "threshold_rule", ["hope", 0.5], "must be one of"
    yield "threshold_rule", ["keep", 95], "keep must be"
    yield "conformal", {}, "conformal must have"
    yield "conformal", {"coverage": 0.9, "limits": [1.0, 2.0], "floors": [1.0]}, "limits and floors"
    yield "conformal", {"coverage": 0.9, "limits": [-1.0], "floors": [1.0]}, "a limit must be"
    sets = {"method": "thr", "coverage": 0.9, "limit": 0.5, "penalty": 0.01, "free_ranks": 5}
    for name, value in (("method", "magic"), ("coverage", 1), ("limit", "all"), ("penalty", -1), ("free_ranks", 0.5)):
        yield "conformal", {**sets, name: value}, name
    yield "more", 1, "must have the entries"


def test_invalid_calibration_in_a_file_is_refused(kept: se.Ensemble, tmp_path: Path) -> None:
    kept.save(tmp_path / "file")
    structure, tensors = read_container(tmp_path / "file", FORMAT, 99, "an ensemble")
    for number, (name, value, message) in zip(count(), odd_values(), strict=False):
        path = tmp_path / f"invalid-{number}"
        invalid = json.loads(json.dumps(structure))
        invalid["calibration"][name] = value
        write_container(path, FORMAT, 4, invalid, tensors)
        with pytest.raises(se.ArtifactError, match=f"invalid-{number} has an invalid calibration: .*{message}"):
            se.Ensemble.load(path)
    write_container(tmp_path / "invalid", FORMAT, 4, {**structure, "calibration": [1]}, tensors)
    with pytest.raises(se.ArtifactError, match="must have the entries"):
        se.Ensemble.load(tmp_path / "invalid")


def test_pair_of_arrays_calibrates_like_a_split() -> None:
    ensemble, data = table_ensemble()
    pair = (data.validation.inputs.numpy(), data.validation.targets.numpy())
    assert ensemble.calibrate(pair) == ensemble.calibrate(data)
    assert ensemble.threshold_for(pair, keep=0.9) == ensemble.threshold_for(data, keep=0.9)
    assert ensemble.conformal(pair, 0.8) == ensemble.conformal(data, 0.8)
    with pytest.raises(ValueError, match="equally many samples"):
        ensemble.calibrate((pair[0], pair[1][:-1]))
    with pytest.raises(ValueError, match=r"pair \(inputs, targets\), not a tuple of 3"):
        ensemble.calibrate((*pair, 1))
