"""StructuredEnsembleRegressor keeps scikit-learn's contract; deviations and intervals mean what they say."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor, nn

import structured_ensembles as se

QUICK: dict[str, Any] = {"members": 2, "epochs": 20, "selection": "random", "random_state": 0}
NOISE = 0.3


@parametrize_with_checks([se.StructuredEnsembleRegressor(members=2, epochs=10, selection="random")])
def test_scikit_learn_accepts_the_regressor(estimator: Any, check: Any) -> None:
    check(estimator)


def waves(samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw inputs (samples, 1) and sin(3x) with noise, (samples,)."""
    generator = np.random.default_rng(seed)
    X = generator.uniform(-1, 1, size=(samples, 1))
    return X, np.sin(3 * X[:, 0]) + NOISE * generator.normal(size=samples)


@pytest.fixture(scope="module")
def fitted() -> se.StructuredEnsembleRegressor:
    return se.StructuredEnsembleRegressor(members=3, epochs=40, validation_fraction=0.3, random_state=0).fit(
        *waves(600, 0)
    )


def test_mean_follows_the_curve_and_the_deviation_is_the_noise(fitted: Any) -> None:
    X, _ = waves(500, 1)
    mean, deviation = fitted.predict(X, return_std=True)
    assert np.sqrt(np.mean((mean - np.sin(3 * X[:, 0])) ** 2)) < 0.1
    assert np.mean(deviation) == pytest.approx(NOISE, rel=0.2)
    assert np.array_equal(fitted.predict(X), mean)
    spread = fitted.ensemble_.spread(X).numpy()
    np.testing.assert_allclose(deviation, np.sqrt(spread**2 + fitted.noise_[0] ** 2))


def test_intervals_hold_the_target_as_often_as_they_promise_on_average() -> None:
    """The promise is for the mean over draws: one draw of 180 held-out samples is off by 0.02 to 0.04 (one deviation).

    The mean of six is off by 0.009 for coverage 0.9, and by 0.015 for 0.5; three deviations of the latter are allowed.
    """
    X, y = waves(5000, 100)
    covered: dict[float, list[float]] = {0.5: [], 0.9: []}
    for seed in range(6):
        settings = {**QUICK, "random_state": seed, "validation_fraction": 0.3}
        regressor = se.StructuredEnsembleRegressor(**settings).fit(*waves(600, seed))
        for coverage, shares in covered.items():
            low, high = regressor.predict_interval(X, coverage)
            shares.append(((low <= y) & (y <= high)).mean())
    for coverage, shares in covered.items():
        assert np.mean(shares) == pytest.approx(coverage, abs=0.045)


def test_intervals_survive_pickle_and_change_nothing(fitted: Any) -> None:
    X, _ = waves(100, 2)
    before = pickle.dumps(fitted)
    low, high = fitted.predict_interval(X, 0.5)
    lower, higher = fitted.predict_interval(X, 0.9)
    assert (lower < low).all()
    assert (high < higher).all()
    assert pickle.dumps(fitted) == before
    assert np.array_equal(pickle.loads(before).predict_interval(X, 0.9)[0], lower)


def test_units_of_the_targets_do_not_matter() -> None:
    X, y = waves(200, 3)
    plain = se.StructuredEnsembleRegressor(**QUICK).fit(X, y)
    scaled = se.StructuredEnsembleRegressor(**QUICK).fit(X, 1e5 * y + 7e6)
    for name, values in (("mean", 0), ("deviation", 1)):
        expected = 1e5 * plain.predict(X, return_std=True)[values] + (7e6 if name == "mean" else 0)
        np.testing.assert_allclose(scaled.predict(X, return_std=True)[values], expected, rtol=1e-3)


def test_values_of_different_scales_are_learned_alike() -> None:
    X, y = waves(400, 4)
    both = np.column_stack((y, 50 * np.cos(3 * X[:, 0])))
    regressor = se.StructuredEnsembleRegressor(**{**QUICK, "epochs": 60}).fit(X, both)
    mean, deviation = regressor.predict(X, return_std=True)
    low, high = regressor.predict_interval(X)
    assert mean.shape == deviation.shape == low.shape == high.shape == (400, 2)
    errors = ((mean - np.column_stack((np.sin(3 * X[:, 0]), both[:, 1]))) ** 2).mean(0) / both.var(0)
    assert (errors < 0.05).all()


class TwoLastLayers(nn.Module):
    """Add what a linear layer computes of the inputs to what another computes of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out, self.skip = nn.Linear(1, 64), nn.Linear(64, 2), nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu()) + self.skip(x)


@pytest.mark.parametrize("model", [None, TwoLastLayers()], ids=["mlp", "two last layers"])
def test_scales_of_the_values_do_not_matter(model: nn.Module | None, tmp_path: Path) -> None:
    X, y = waves(200, 4)
    both, scales = np.column_stack((y, np.cos(3 * X[:, 0]))), np.array([1e-3, 1e4])
    plain, scaled = (
        se.StructuredEnsembleRegressor(model, **QUICK).fit(X, targets) for targets in (both, scales * both)
    )
    for expected, given in zip(plain.predict(X, return_std=True), scaled.predict(X, return_std=True), strict=True):
        np.testing.assert_allclose(given / scales, expected, rtol=1e-3, atol=1e-3)
    scaled.ensemble_.save(tmp_path / "scaled.safetensors")
    loaded = se.Ensemble.load(tmp_path / "scaled.safetensors", model=model)
    np.testing.assert_allclose(loaded.predict(X).numpy(), scaled.predict(X), rtol=1e-5, atol=1e-5)


def test_constant_value_is_predicted_exactly_and_disturbs_no_other() -> None:
    """The mean of a hundred times 0.7 is not 0.7 in floating point: its deviation of 1e-15 must not count as one."""
    X, y = waves(100, 6)
    mean, deviation = (
        se.StructuredEnsembleRegressor(**{**QUICK, "epochs": 60})
        .fit(X, np.column_stack((y, np.full(100, 0.7))))
        .predict(X, return_std=True)
    )
    assert (mean[:, 1] == 0.7).all()
    assert (deviation[:, 1] == 0).all()
    assert ((mean[:, 0] - np.sin(3 * X[:, 0])) ** 2).mean() < 0.1 * y.var()


def test_network_whose_outputs_no_layer_scales_is_warned_of() -> None:
    X, y = waves(100, 7)
    model = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2), nn.Tanh())
    with pytest.warns(UserWarning, match=r"deviations of y's values are up to 100 times as large as others"):
        se.StructuredEnsembleRegressor(model, **{**QUICK, "epochs": 1}).fit(X, np.column_stack((y, 100 * y)))


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_weights_are_repeated_samples_in_mini_batches_too(fraction: float) -> None:
    X, y = waves(120, 5)
    generator = np.random.default_rng(0)
    weights, order = generator.integers(0, 4, size=120), generator.permutation(120)
    settings = {**QUICK, "epochs": 5, "batch_size": 16, "validation_fraction": fraction}
    weighted = se.StructuredEnsembleRegressor(**settings).fit(X[order], y[order], sample_weight=weights[order])
    repeated = se.StructuredEnsembleRegressor(**settings).fit(X.repeat(weights, axis=0), y.repeat(weights))
    plain = se.StructuredEnsembleRegressor(**settings).fit(X, y)
    assert np.array_equal(weighted.predict(X, return_std=True), repeated.predict(X, return_std=True))
    assert not np.allclose(weighted.predict(X), plain.predict(X), atol=1e-3)


def test_prediction_without_information_is_the_weighted_mean() -> None:
    X, y = np.full((4, 1), 7.0), np.array([0.0, 4.0, 0.0, 9.0])
    regressor = se.StructuredEnsembleRegressor(
        **{**QUICK, "epochs": 200, "learning_rate": 0.02}, validation_fraction=0
    ).fit(X, y, [2.0, 1.0, 1.0, 0.0])
    mean, deviation = regressor.predict([[7.0]], return_std=True)
    assert mean[0] == pytest.approx(1.0, abs=0.03)
    assert deviation[0] == pytest.approx(np.sqrt(3), abs=0.03)  # of 0, 0, 0 and 4
    with pytest.raises(ValueError, match="predict_interval needs samples that were held out"):
        regressor.predict_interval(X)
