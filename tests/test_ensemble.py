"""Ensemble: combination rules, uncertainty, and the inputs that it takes."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structured_ensembles as se
from structured_ensembles.prediction.combination import combine_logits, uncertainty_of


class Fixed(nn.Module):
    """Return the same logits for any input."""

    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor(logits))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x[:, 0].long()]


@pytest.fixture
def ensemble() -> se.Ensemble:
    return se.Ensemble(
        [Fixed([[2.0, 0, 0], [0, 1, 0]]), Fixed([[0.0, 3, 0], [0, 2, 0]]), Fixed([[1.0, 0, 0], [0, 3, 0]])]
    )


X = torch.tensor([[0.0], [1.0]])


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in row)
    return [math.exp(value) / total for value in row]


def test_combination_rules_equal_hand_computations(ensemble: se.Ensemble) -> None:
    assert ensemble(X).shape == (3, 2, 3)
    rows = [softmax([2, 0, 0]), softmax([0, 3, 0]), softmax([1, 0, 0])]
    expected = [sum(column) / 3 for column in zip(*rows, strict=True)]
    assert ensemble.predict_proba(X)[0].tolist() == pytest.approx(expected)
    assert ensemble.predict_proba(X, combine="logits")[0].tolist() == pytest.approx(softmax([1, 1, 0]))
    assert ensemble.predict_proba(X, combine="vote")[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert ensemble.predict(X, combine="vote").tolist() == [0, 1]
    with pytest.raises(ValueError, match="combine must be one of 'mean', 'logits', 'vote'"):
        ensemble.predict_proba(X, combine="median")


def test_uncertainty_equals_a_hand_computation(ensemble: se.Ensemble) -> None:
    def entropy(p: list[float]) -> float:
        return -sum(q * math.log(q) for q in p)

    measures = ensemble.uncertainty(X)
    rows = [softmax([2, 0, 0]), softmax([0, 3, 0]), softmax([1, 0, 0])]
    mean = [sum(column) / 3 for column in zip(*rows, strict=True)]
    assert float(measures.entropy[0]) == pytest.approx(entropy(mean), rel=1e-5)
    information = entropy(mean) - sum(map(entropy, rows)) / 3
    assert float(measures["mutual_information"][0]) == pytest.approx(information, rel=1e-4)
    assert measures.disagreement.tolist() == pytest.approx([2 / 3, 0])
    sure = uncertainty_of(torch.tensor([[[1000.0, 0.0]]]))
    assert (float(sure.entropy), float(sure.mutual_information), float(sure.disagreement)) == (0, 0, 0)


def test_predict_accepts_arrays_lists_datasets_loaders_and_splits(ensemble: se.Ensemble) -> None:
    expected = ensemble.predict_proba(X)
    labels = torch.tensor([0, 1])
    data = se.Data.from_arrays(X, labels, validation=0.0)
    for x in (
        X.numpy(),
        X.tolist(),
        TensorDataset(X, labels),
        DataLoader(TensorDataset(X, labels), batch_size=1),
        data.train,
    ):
        torch.testing.assert_close(ensemble.predict_proba(x, batch_size=1), expected)
    with pytest.raises(ValueError, match="no samples"):
        ensemble.predict(np.zeros((0, 1)))


def test_prediction_runs_in_evaluation_mode_and_restores_it() -> None:
    ensemble = se.Ensemble(
        [nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))]
    )
    ensemble.train()
    ensemble.members[1].eval()
    x = torch.randn(8, 4)
    torch.testing.assert_close(ensemble.logits(x), ensemble.logits(x))
    assert ensemble.members[0].training
    assert not ensemble.members[1].training
    assert int(ensemble.members[1][0].num_batches_tracked) == 0
    assert not ensemble.logits(x).requires_grad


def test_uint8_inputs_are_normalised() -> None:
    normalization = se.Normalization((0.5,), (0.25,))
    ensemble = se.Ensemble([nn.Flatten()], normalization=normalization)
    pixels = torch.tensor([[[[0, 255]]]], dtype=torch.uint8)
    assert ensemble(pixels).tolist() == [[[-2.0, 2.0]]]
    assert ensemble(pixels / 255).tolist() == [[[-2.0, 2.0]]]


def test_ensemble_counts_members_and_parameters() -> None:
    base = nn.Linear(4, 4)
    ensemble = se.Ensemble([nn.Linear(4, 2), nn.Linear(4, 2)])
    assert ensemble.num_parameters == 20
    assert ensemble.overhead(base) == 1.0
    assert len(ensemble) == 2
    with pytest.raises(ValueError, match="at least one network"):
        se.Ensemble([])


def test_regression_predicts_mean_and_spread() -> None:
    ensemble = se.Ensemble([Fixed([[1.0], [2.0]]), Fixed([[3.0], [2.0]])], task="regression")
    assert ensemble.predict(X).tolist() == [[2.0], [2.0]]
    assert ensemble.spread(X).tolist() == [[1.0], [0.0]]
    with pytest.raises(ValueError, match="for regression there are predict and spread"):
        ensemble.uncertainty(X)
    with pytest.raises(ValueError, match="keep is for classification"):
        ensemble.keep(X)


def test_combined_predictions_are_probabilities() -> None:
    logits = 10 * torch.randn(4, 50, 7)
    for rule in ("mean", "logits", "vote"):
        torch.testing.assert_close(combine_logits(logits, rule).sum(-1), torch.ones(50))
