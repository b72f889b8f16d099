"""Outputs that are NaN: no public door takes them for class 0."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.cli.predictions import describe_predictions

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 3
DATA = se.Data.from_arrays(X, Y, test=(X, Y), validation=(X, Y))
RECIPE = se.Recipe.named("modern", epochs=1)


def diverge(network: nn.Module) -> None:
    """Set a bias to NaN."""
    with torch.no_grad():
        list(network.parameters())[-1][0] = torch.nan


def ensemble_with_nan() -> se.Ensemble:
    """Train two members, then let the second diverge."""
    ensemble = se.Ensemble([se.zoo.mlp(4, 3, hidden=(8,)) for _ in range(2)])
    se.train(ensemble, DATA, RECIPE, quiet=True)
    diverge(ensemble.members[1])
    return ensemble


@pytest.mark.parametrize("combine", ["mean", "logits", "vote"])
def test_predict_refuses_nan_and_probabilities_stay_nan(combine: Any) -> None:
    ensemble = ensemble_with_nan()
    with pytest.raises(ValueError, match=r"predict cannot tell the class of 5 of 5 samples.*NaN.*diverged"):
        ensemble.predict(X[:5], combine=combine)
    assert ensemble.predict_proba(X[:5], combine=combine).isnan().any(1).all()


def test_uncertainty_is_nan_and_nothing_is_kept_nor_in_a_set() -> None:
    ensemble = ensemble_with_nan()
    assert all(values.isnan().all() for values in ensemble.uncertainty(X).to_dict().values())
    assert not ensemble.keep(X).any()
    with pytest.raises(ValueError, match="predict_set cannot tell the class of 60 of 60 samples"):
        ensemble.predict_set(X)
    with pytest.raises(ValueError, match="the ensemble cannot tell the class of 1 of 1 sample:"):
        describe_predictions(ensemble, ensemble.logits(X[:1]), [("cat.png", "")])


def test_only_the_samples_that_are_nan_count() -> None:
    logits = torch.randn(3, 4, 5)
    logits[1, 2, 0] = torch.nan
    votes = se.prediction.combination.combine_logits(logits, "vote")
    assert votes.isnan().any(1).tolist() == [False, False, True, False]
    disagreement = se.prediction.combination.uncertainty_of(logits).disagreement
    assert disagreement.isnan().tolist() == [False, False, True, False]


def test_evaluate_warns_of_nan() -> None:
    with pytest.warns(UserWarning, match="NaN for 60 of 60 samples, which count as class 0 in figures"):
        se.evaluate(ensemble_with_nan(), DATA)
    values = se.Data.from_arrays(X, X[:, 0], test=(X, X[:, 0]))
    ensemble = se.Ensemble([se.zoo.mlp(4, 1, hidden=(8,))])
    se.train(ensemble, values, RECIPE, quiet=True)
    diverge(ensemble.members[0])
    with pytest.warns(UserWarning, match="NaN for 60 of 60 samples, so that figures mean nothing"):
        assert np.isnan(se.evaluate(ensemble, values)["reg/rmse"])


def test_export_refuses_nan_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be exported, as its probabilities of the example are NaN"):
        se.export_pt2(ensemble_with_nan(), tmp_path / "nan.pt2")
    assert not list(tmp_path.iterdir())


def test_classifier_and_learner_refuse_nan() -> None:
    classifier = se.StructuredEnsembleClassifier(members=2, epochs=2, random_state=0).fit(X, Y)
    diverge(classifier.ensemble_.members[0])
    with pytest.raises(ValueError, match="predict cannot tell the class of 60 of 60 samples"):
        classifier.predict(X)
    learner = se.continual.NaiveLearner(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), epochs=1, quiet=True)
    learner.learn(se.Data.from_arrays(X, Y))
    diverge(learner.heads[0])
    with pytest.raises(ValueError, match="predict cannot tell the class of 60 of 60 samples"):
        learner.predict(X, task=0)
    with pytest.raises(ValueError, match="infer_task cannot tell"):
        learner.infer_task(X)
