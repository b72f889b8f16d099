"""StructuredEnsembleClassifier keeps scikit-learn's contract; weights, calibration and models do what they say."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_blobs, make_moons
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import structured_ensembles as se

QUICK: dict[str, Any] = {"members": 2, "epochs": 20, "selection": "random", "random_state": 0}


@parametrize_with_checks([se.StructuredEnsembleClassifier(members=2, epochs=10, selection="random")])
def test_scikit_learn_accepts_the_classifier(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def moons() -> tuple[np.ndarray, ...]:
    X, y = make_moons(900, noise=0.25, random_state=0)
    return tuple(train_test_split(X * [1000, 0.01], np.array(["lower", "upper"])[y], random_state=0, stratify=y))


@pytest.fixture(scope="module")
def fitted(moons: tuple[np.ndarray, ...]) -> se.StructuredEnsembleClassifier:
    X, _, y, _ = moons
    return se.StructuredEnsembleClassifier(members=3, epochs=40, validation_fraction=0.2, random_state=0).fit(X, y)


def test_bent_classes_of_any_scale_are_learned(fitted: Any, moons: tuple[np.ndarray, ...]) -> None:
    X, X_test, y, y_test = moons
    linear = make_pipeline(MinMaxScaler(), LogisticRegression()).fit(X, y)
    assert fitted.score(X_test, y_test) > linear.score(X_test, y_test) + 0.03
    assert fitted.classes_.tolist() == ["lower", "upper"]
    assert len(fitted.ensemble_) == 3
    assert fitted.n_iter_ == fitted.history_.epochs <= 40


def test_ensemble_predicts_alone_and_from_its_file(fitted: Any, moons: Any, tmp_path: Path) -> None:
    X_test = moons[1]
    probabilities = fitted.predict_proba(X_test)
    assert np.array_equal(fitted.ensemble_.predict_proba(X_test).numpy(), probabilities)
    fitted.ensemble_.save(tmp_path / "moons.safetensors")
    loaded = se.Ensemble.load(tmp_path / "moons.safetensors")
    assert loaded.classes == ("lower", "upper")
    np.testing.assert_allclose(loaded.predict_proba(X_test), probabilities, atol=1e-5)


def test_uncertainty_is_that_of_the_probabilities(fitted: Any, moons: Any) -> None:
    probabilities = fitted.predict_proba(moons[1])
    entropy = -(probabilities * np.log(probabilities)).sum(1)
    np.testing.assert_allclose(fitted.predict_uncertainty(moons[1]).entropy, entropy, atol=1e-9)


def test_prediction_sets_cover_the_truth_as_often_as_they_promise(fitted: Any, moons: Any) -> None:
    _, X_test, _, y_test = moons
    before = pickle.dumps(fitted)
    sets = {coverage: fitted.predict_set(X_test, coverage) for coverage in (0.8, 0.95, 0.99)}
    for coverage, members in sets.items():
        assert members.shape == (len(X_test), 2)
        covered = members[np.arange(len(y_test)), np.searchsorted(fitted.classes_, y_test)].mean()
        assert covered > coverage - 0.06  # 225 test and 135 held-out samples: a deviation of about 0.03
    assert (sets[0.8] <= sets[0.95]).all()
    assert (sets[0.95] <= sets[0.99]).all()
    assert sets[0.99].sum() > sets[0.8].sum()
    assert pickle.dumps(fitted) == before


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_weights_are_repeated_samples_in_mini_batches_too(fraction: float) -> None:
    X, y = make_blobs(150, centers=3, cluster_std=4.0, random_state=1)
    generator = np.random.default_rng(0)
    weights, order = generator.integers(0, 4, size=150), generator.permutation(150)
    settings = {**QUICK, "epochs": 5, "batch_size": 16, "validation_fraction": fraction, "class_weight": "balanced"}
    weighted = se.StructuredEnsembleClassifier(**settings).fit(X[order], y[order], sample_weight=weights[order])
    repeated = se.StructuredEnsembleClassifier(**settings).fit(X.repeat(weights, axis=0), y.repeat(weights))
    plain = se.StructuredEnsembleClassifier(**settings).fit(X, y)
    assert np.array_equal(weighted.predict_proba(X), repeated.predict_proba(X))
    assert not np.allclose(weighted.predict_proba(X), plain.predict_proba(X), atol=1e-3)


@pytest.mark.parametrize(
    ("class_weight", "expected"), [(None, 0.75), ("balanced", 0.5), ({"a": 2}, 60 / 70), ({"a": 1, "b": 3}, 0.5)]
)
def test_probabilities_without_information_are_the_weighted_shares(class_weight: Any, expected: float) -> None:
    """30 samples of a and 10 of b, all with the same inputs."""
    X, y = np.full((22, 1), 7.0), np.array(["a"] * 15 + ["b"] * 5 + ["a", "c"])
    weights = np.array([1.5] * 15 + [2.0] * 5 + [7.5, 0.0])
    classifier = se.StructuredEnsembleClassifier(
        **{**QUICK, "epochs": 200, "learning_rate": 0.02}, validation_fraction=0, class_weight=class_weight
    ).fit(X, y, weights)
    assert classifier.classes_.tolist() == ["a", "b"]
    np.testing.assert_allclose(classifier.predict_proba([[7.0]]), [[expected, 1 - expected]], atol=0.01)


def test_early_stopping_keeps_the_weights_of_the_best_epoch(moons: Any) -> None:
    X, _, y, _ = moons
    settings = {**QUICK, "epochs": 60, "learning_rate": 0.05}
    stopped = se.StructuredEnsembleClassifier(**settings, patience=2).fit(X, y)
    whole = se.StructuredEnsembleClassifier(**settings, early_stopping=False).fit(X, y)
    assert stopped.n_iter_ < whole.n_iter_ == 60
    for member in range(2):
        rows = stopped.history_.of(member)
        losses = [row["validation_loss"] for row in rows]
        assert len(rows) - 1 - int(np.argmin(losses)) == 2  # the best epoch was two before its last


def test_search_pipelines_and_pickle_take_the_classifier(moons: Any) -> None:
    X, X_test, y, y_test = moons
    search = GridSearchCV(se.StructuredEnsembleClassifier(**QUICK), {"members": [1, 2], "prune": [0.5]}, cv=2).fit(X, y)
    assert len(search.best_estimator_.ensemble_) == search.best_params_["members"]
    pipeline = make_pipeline(MinMaxScaler(), clone(search.best_estimator_))
    assert cross_val_score(pipeline, X, y, cv=2).mean() > 0.8
    restored = pickle.loads(pickle.dumps(search.best_estimator_))
    assert np.array_equal(restored.predict_proba(X_test), search.predict_proba(X_test))
    assert np.array_equal(restored.predict_set(X_test), search.best_estimator_.predict_set(X_test))
    assert restored.score(X_test, y_test) > 0.8


def test_columns_of_a_data_frame_are_known_by_name(moons: Any) -> None:
    pandas = pytest.importorskip("pandas")
    X, X_test, y, _ = moons
    frame = pandas.DataFrame(X, columns=["left", "right"])
    classifier = se.StructuredEnsembleClassifier(**{**QUICK, "epochs": 2}).fit(frame, pandas.Series(y))
    assert classifier.feature_names_in_.tolist() == ["left", "right"]
    assert len(classifier.predict(pandas.DataFrame(X_test, columns=["left", "right"]))) == len(X_test)
    with pytest.raises(ValueError, match="feature names"):
        classifier.predict(pandas.DataFrame(X_test, columns=["right", "left"]))


def test_model_is_a_network_or_makes_one(moons: Any) -> None:
    X, X_test, y, y_test = moons
    network = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    classifier = se.StructuredEnsembleClassifier(network, **QUICK, memory=1.0).fit(X, y)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert sum(member[0].out_features for member in classifier.ensemble_.members) <= 32
    assert classifier.score(X_test, y_test) > 0.8

    asked = []

    def make(features: int, outputs: int) -> nn.Module:
        asked.append((features, outputs))
        return nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, outputs))

    scores = [se.StructuredEnsembleClassifier(make, **QUICK).fit(X, y).score(X_test, y_test) for _ in range(2)]
    assert asked == [(2, 2), (2, 2)]
    assert scores[0] == scores[1]  # random_state also seeds the factory


def test_default_network_grows_with_the_data() -> None:
    widths = []
    for features in (3, 60, 500):
        X = np.random.default_rng(0).normal(size=(30, features))
        classifier = se.StructuredEnsembleClassifier(**{**QUICK, "epochs": 1}, prune=0.5).fit(X, X[:, 0] > 0)
        widths.append(classifier.ensemble_.members[0].layers[1].out_features)
    assert widths == [32, 64, 128]  # halves of 64, 128 and 256


def test_wrong_arguments_are_named(moons: Any) -> None:
    X, _, y, _ = moons
    for settings, problem in (
        ({"model": "mlp"}, r"model must be a torch\.nn\.Module, not a str: give a network, or a function"),
        ({"model": nn.Linear(7, 2)}, r"model cannot take samples of 2 features: .*shapes"),
        ({"learning_rate": -1}, r"learning_rate must be a finite number of at least 0, not -1"),
        ({"model": nn.Linear(2, 5)}, r"model must give 2 numbers for each sample"),
        ({"model": lambda features, outputs: "mlp"}, r"model must be a torch\.nn\.Module"),
        ({"class_weight": "even"}, r"class_weight must be a dict, 'balanced' or None, not 'even'"),
        ({"class_weight": {"lower": 2, "uper": 3}}, r"class_weight must have labels of y, .*, not \['uper'\]"),
        ({"class_weight": {"lower": -1}}, r"class_weight must have finite weights above 0"),
        ({"validation_fraction": 1.0}, r"validation_fraction must be at least 0 and less than 1"),
        ({"epochs": 0}, r"epochs must be a whole number of at least 1"),
        ({"model": 3}, r"model must be a torch.nn.Module, not an int: give a network, or a function of .n_features"),
        ({"class_weight": 3}, r"class_weight must be a dict, 'balanced' or None, not 3"),
        ({"learning_rate": -1}, r"learning_rate must be a finite number of at least 0, not -1"),
        ({"batch_size": "x"}, r"batch_size must be 'auto' or a whole number of at least 1, not 'x'"),
        ({"early_stopping": "no"}, r"early_stopping must be True or False, not 'no'"),
    ):
        with pytest.raises((ValueError, TypeError), match=problem):
            se.StructuredEnsembleClassifier(**{**QUICK, **settings}).fit(X, y)
    with pytest.raises(ValueError, match="sample_weight must be at least 0 for all samples"):
        se.StructuredEnsembleClassifier(**QUICK).fit(X, y, -np.ones(len(y)))
    ending = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2), nn.Softmax(1))
    with pytest.warns(UserWarning, match="model ends in a softmax"):
        se.StructuredEnsembleClassifier(ending, **{**QUICK, "epochs": 1}).fit(X, y)
    without = se.StructuredEnsembleClassifier(**{**QUICK, "epochs": 1}, validation_fraction=0).fit(X, y)
    with pytest.raises(ValueError, match="predict_set needs samples that were held out"):
        without.predict_set(X)
