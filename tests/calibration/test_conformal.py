"""Conformal sets and intervals: by hand, and their coverage over many draws."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.calibration.conformal import (
    ConformalIntervals,
    ConformalSets,
    conformal_from_json,
    conformal_to_json,
    finite_quantile,
    fit_intervals,
    fit_sets,
    samples_needed,
    score_classes,
)

PROBABILITIES = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]], dtype=torch.float64)


def test_conformal_scores_equal_a_hand_computation() -> None:
    assert score_classes(PROBABILITIES, "thr")[0].tolist() == pytest.approx([0.9, 0.4, 0.7])
    aps = score_classes(PROBABILITIES, "aps")
    assert aps[0].tolist() == pytest.approx([0.9, 0.0, 0.6])  # what is likelier, summed
    assert aps[1].tolist() == pytest.approx([0.0, 0.5, 0.75])  # of equal ones the first comes first
    raps = score_classes(PROBABILITIES, "raps", penalty=0.2, free_ranks=1)
    assert raps[0].tolist() == pytest.approx([0.9 + 0.4, 0.0, 0.6 + 0.2])


def test_finite_quantile_counts_the_test_sample() -> None:
    scores = torch.tensor([0.5, 0.1, 0.3, 0.2, 0.4, 0.9, 0.7, 0.6, 0.8])
    assert finite_quantile(scores, 0.5) == pytest.approx(0.5)  # the 5th of 9
    assert finite_quantile(scores, 0.51) == pytest.approx(0.6)
    assert finite_quantile(scores, 0.9) == pytest.approx(0.9)  # the 9th: 10 · 0.9
    assert finite_quantile(scores, 0.91) == math.inf  # a 10th there is not
    assert [samples_needed(share) for share in (0.5, 0.9, 0.95, 0.99)] == [1, 9, 19, 99]


def test_prediction_sets_equal_a_hand_computation() -> None:
    assert ConformalSets("thr", 0.9, 0.7).sets(PROBABILITIES).tolist() == [[False, True, True], [True, False, False]]
    assert ConformalSets("thr", 0.9, 0.3).sets(PROBABILITIES).sum() == 0  # nothing is likely enough
    assert ConformalSets("aps", 0.9, 0.55).sets(PROBABILITIES).tolist() == [[False, True, False], [True, True, False]]
    targets = torch.tensor([1] * 4 + [2])
    five = PROBABILITIES[:1].expand(5, -1)
    assert fit_sets(five, targets, 0.6).limit == pytest.approx(0.4)  # the 4th of 0.4, 0.4, 0.4, 0.4, 0.7
    assert fit_sets(five, targets, 0.8).limit == pytest.approx(0.7)
    assert fit_sets(five, targets, 0.8, "aps").limit == pytest.approx(0.6)
    assert fit_sets(five, targets, 0.6, "aps").limit == 0


def draws(rng: np.random.Generator, number: int) -> tuple[Tensor, Tensor]:
    """Draw overconfident probabilities (samples, 6) and labels, correct in about half of the cases."""
    honest = 1.5 * rng.standard_normal((number, 6))
    uniform = rng.random((number, 1))
    truth = np.exp(honest) / np.exp(honest).sum(1, keepdims=True)
    labels = (truth.cumsum(1) < uniform).sum(1).clip(0, 5)
    return torch.from_numpy(2.5 * honest).softmax(-1), torch.from_numpy(labels)


@pytest.mark.parametrize("method", ["thr", "aps", "raps"])
def test_prediction_sets_have_the_requested_coverage(method: str) -> None:
    """However wrong the probabilities are, and hardly more than requested."""
    rng = np.random.default_rng(0)
    held_out, coverage, coverages, sizes = 40, 0.8, [], []
    for _ in range(800):
        rule = fit_sets(*draws(rng, held_out), coverage, method)
        probabilities, labels = draws(rng, 50)
        sets = rule.sets(probabilities)
        coverages.append(float(sets[torch.arange(50), labels].double().mean()))
        sizes.append(sets.sum(-1))
    noise = 4 * np.std(coverages) / math.sqrt(len(coverages))  # below 0.012
    assert noise < 0.012
    assert coverage - noise < np.mean(coverages) < coverage + 1 / (held_out + 1) + noise
    smallest = int(torch.cat(sizes).min())
    assert smallest == (0 if method == "thr" else 1)


def test_network_above_the_coverage_gives_empty_thr_sets_and_single_aps_sets() -> None:
    rng = np.random.default_rng(0)
    probabilities = torch.from_numpy(6 * rng.standard_normal((400, 6))).softmax(-1)
    labels = probabilities.argmax(-1)
    thr, aps = (fit_sets(probabilities[:200], labels[:200], 0.9, method) for method in ("thr", "aps"))
    sizes = thr.sets(probabilities[200:]).sum(-1)
    assert set(sizes.tolist()) == {0, 1}
    assert float((sizes == 0).double().mean()) == pytest.approx(0.1, abs=0.06)
    assert (aps.sets(probabilities[200:]).sum(-1) == 1).all()


def test_too_few_samples_are_an_error() -> None:
    probabilities, labels = draws(np.random.default_rng(0), 18)
    with pytest.warns(UserWarning, match=r"18 samples are too few for coverage=0\.95, which needs 19"):
        rule = fit_sets(probabilities, labels, 0.95)
    assert rule.sets(probabilities).all()
    assert conformal_from_json(conformal_to_json(rule)) == rule
    assert conformal_to_json(rule)["limit"] is None
    with pytest.raises(ValueError, match="some are NaN"):
        fit_sets(probabilities * math.nan, labels, 0.5)


def values(rng: np.random.Generator, number: int, width: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Draw mean, spread and targets (samples, width) with noise proportional to the spread."""
    mean, spread = rng.standard_normal((number, width)), rng.gamma(2.0, 1.0, (number, width))
    targets = mean + 3 * (spread + 0.2) * rng.standard_t(3, (number, width))
    return tuple(map(torch.from_numpy, (mean, spread, targets)))


@pytest.mark.parametrize("width", [1, 2])
def test_intervals_have_the_requested_coverage(width: int) -> None:
    rng = np.random.default_rng(0)
    held_out, coverage, coverages = 60, 0.9, []
    for _ in range(800):
        rule = fit_intervals(*values(rng, held_out, width), coverage)
        mean, spread, targets = values(rng, 50, width)
        lower, upper = rule.interval(mean, spread)
        coverages.append(float(((lower <= targets) & (targets <= upper)).double().mean()))
    noise = 4 * np.std(coverages) / math.sqrt(len(coverages))
    assert noise < 0.012
    assert coverage - noise < np.mean(coverages) < coverage + 1 / (held_out + 1) + noise


def test_intervals_equal_a_hand_computation() -> None:
    mean, spread = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 3.0, 3.0])
    rule = fit_intervals(mean, spread, torch.tensor([0.0, 4.0, 7.0, 23.0]), 0.6)
    assert rule.floors == (2.0,)
    assert rule.limits == (1.0,)  # the 3rd of 0/3, 3/3, 5/5, 20/5
    lower, upper = rule.interval(torch.tensor([10.0, 10.0]), torch.tensor([0.0, 3.0]))
    assert (lower.tolist(), upper.tolist()) == ([8.0, 5.0], [12.0, 15.0])  # wider where members differ more
    alone = fit_intervals(mean, torch.zeros(4), torch.tensor([1.0, 3.0, 5.0, 7.0]), 0.6)
    assert (alone.floors, alone.limits) == ((1.0,), (3.0,))  # absolute errors 1, 2, 3, 4
    both = fit_intervals(torch.zeros(4, 2), torch.ones(4, 2), torch.tensor([[1.0, 10], [2, 20], [3, 30], [4, 40]]), 0.6)
    assert both.limits == (1.5, 15.0)  # each value has its own
    assert conformal_from_json(conformal_to_json(both)) == both
    with pytest.raises(ValueError, match=r"outputs are \(2,\) and targets \(\)"):
        fit_intervals(torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(4), 0.6)


# Of an ensemble -----------------------------------------------------------------------------------------------------


def test_regression_ensemble_predicts_intervals() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(900, 4, generator=generator)
    y = 50 + 10 * x.sum(1) + 5 * torch.randn(900, generator=generator)
    data = se.Data.from_arrays(x[:500], y[:500], validation=0.4, test=(x[500:], y[500:]))
    torch.manual_seed(0)
    ensemble = se.Ensemble([nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(3)])
    se.train(ensemble, data, se.Recipe.named("regression", epochs=5), quiet=True)
    assert isinstance(ensemble.calibration.conformal, ConformalIntervals)
    assert ensemble.calibration.conformal.coverage == 0.9
    for coverage in (0.9, 0.5):
        ensemble.conformal(data, coverage)
        lower, upper = ensemble.predict_interval(x[500:])
        mean, spread = ensemble.predict(x[500:]), ensemble.spread(x[500:])
        assert lower.shape == upper.shape == mean.shape
        rule = ensemble.calibration.conformal
        torch.testing.assert_close(upper - mean, rule.limits[0] * (spread + rule.floors[0]), rtol=1e-4, atol=1e-3)
        inside = (lower.flatten() <= y[500:]) & (y[500:] <= upper.flatten())
        assert float(inside.double().mean()) == pytest.approx(coverage, abs=0.08)
        figures = se.evaluate(ensemble, data)
        assert figures["conf/coverage"] == pytest.approx(float(inside.double().mean()))
        assert figures["conf/width"] == pytest.approx(float((upper - lower).mean()))
    with pytest.raises(ValueError, match="for regression there is predict_interval"):
        ensemble.predict_set(x)
    with pytest.raises(ValueError, match="method must be left out for a regression"):
        ensemble.conformal(data, 0.9, "aps")


def test_invalid_conformal_arguments_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    data = se.load_data("digits")
    ensemble = se.Ensemble([se.zoo.mlp(64)])
    ensemble.adopt(data)
    with pytest.raises(ValueError, match=r"no prediction sets yet: .* validation split of at least 9 samples"):
        ensemble.predict_set(data.test.inputs)
    with pytest.raises(ValueError, match=r"predict_interval is for regression; .* predict_set"):
        ensemble.predict_interval(data.test.inputs)
    regression = se.Ensemble([se.zoo.mlp(64)], task="regression")
    with pytest.raises(ValueError, match=r"no intervals yet: .* at least 9 samples"):
        regression.predict_interval(data.test.inputs)

    def work(*_: object) -> None:
        raise AssertionError("work has started")

    monkeypatch.setattr(se.Ensemble, "logits", work)
    wrong = {"coverage": (0, 1, 90, "all"), "method": ("lac", None), "penalty": (-1,), "free_ranks": (0, 1.5)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name} must be"):
                ensemble.conformal(data, **{name: value})
    with pytest.raises(ValueError, match="no validation split"):
        ensemble.conformal(se.Data.from_arrays(torch.rand(9, 64), torch.arange(9) % 3, validation=0.0))


@pytest.mark.parametrize("method", ["thr", "aps", "raps"])
def test_digits_ensemble_predicts_sets_with_coverage(method: str) -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(64) for _ in range(2)])
    se.train(ensemble, data, se.Recipe(epochs=2), quiet=True)
    returned = ensemble.conformal(data, 0.95, method)
    assert returned == ensemble.calibration.conformal
    x, y = data.test.inputs, data.test.targets
    sets = ensemble.predict_set(x)
    assert (sets.shape, sets.dtype) == ((len(y), 10), torch.bool)
    assert torch.equal(sets, returned.sets(ensemble.predict_proba(x).double())) or method != "thr"
    assert float(sets[torch.arange(len(y)), y].double().mean()) > 0.9
    if method != "thr":
        assert sets[torch.arange(len(y)), ensemble.predict(x)].all()  # the likeliest class is always in it
