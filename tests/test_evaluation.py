import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss

import structured_ensembles as se
from structured_ensembles.evaluation.calibration import brier_score, expected_calibration_error, negative_log_likelihood
from structured_ensembles.evaluation.discarding import discard_threshold


def ece_by_loop(probabilities: torch.Tensor, targets: torch.Tensor, bins: int) -> float:
    total = 0.0
    for index in range(bins):
        low, high = index / bins, (index + 1) / bins
        inside = [
            i
            for i, row in enumerate(probabilities.double())
            if (low < row.max() <= high) or (index == 0 and row.max() == 0)
        ]
        if inside:
            confidence = np.mean([float(probabilities[i].double().max()) for i in inside])
            accuracy = np.mean([int(probabilities[i].argmax()) == int(targets[i]) for i in inside])
            total += len(inside) / len(targets) * abs(confidence - accuracy)
    return total


@pytest.mark.parametrize("bins", [15, 30])
def test_ece_is_the_loop_over_bins(bins: int) -> None:
    probabilities = (3 * torch.randn(200, 5)).softmax(-1)
    targets = torch.randint(0, 5, (200,))
    assert expected_calibration_error(probabilities, targets, bins) == pytest.approx(
        ece_by_loop(probabilities, targets, bins)
    )


def test_ece_edges() -> None:
    right, wrong = torch.tensor([0, 0]), torch.tensor([1, 1])
    certain = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert expected_calibration_error(certain, right) == 0
    assert expected_calibration_error(certain, wrong) == 1
    assert expected_calibration_error(torch.tensor([[0.5, 0.5]]), torch.tensor([0]), bins=2) == pytest.approx(0.5)
    # Exactly on an edge: 0.5 belongs to (0, 0.5], so that both samples share no bin with 0.6.
    probabilities = torch.tensor([[0.5, 0.5], [0.6, 0.4]], dtype=torch.float64)
    assert expected_calibration_error(probabilities, torch.tensor([0, 1]), bins=2) == pytest.approx((0.5 + 0.6) / 2)
    assert expected_calibration_error(torch.ones(3, 1), torch.zeros(3, dtype=torch.long)) == 0


def test_nll_and_brier_are_scikit_learns() -> None:
    probabilities = torch.randn(100, 4, dtype=torch.float64).softmax(-1)
    targets = torch.randint(0, 4, (100,))
    assert negative_log_likelihood(probabilities, targets) == pytest.approx(
        log_loss(targets, probabilities, labels=range(4))
    )
    truth = torch.nn.functional.one_hot(targets, 4)
    expected = sum(brier_score_loss(truth[:, own], probabilities[:, own]) for own in range(4))
    assert brier_score(probabilities, targets) == pytest.approx(expected)
    assert negative_log_likelihood(torch.tensor([[0.0, 1.0]]), torch.tensor([0])) < 100  # finite


def test_evaluate_puts_it_together() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(64) for _ in range(3)])
    ensemble.adopt(data)
    figures = se.evaluate(ensemble, data)
    x, y = data.test.inputs, data.test.targets
    probabilities = ensemble.predict_proba(x)
    assert figures["cls/accuracy"] == pytest.approx(float((probabilities.argmax(1) == y).double().mean()))
    members = [float((logits.argmax(1) == y).double().mean()) for logits in ensemble.logits(x)]
    assert figures["cls/member_accuracy"] == pytest.approx(np.mean(members))
    assert figures["cal/ece"] == pytest.approx(ece_by_loop(probabilities, y, 30), abs=1e-6)
    assert figures["size/parameters"] == 3 * sum(p.numel() for p in se.zoo.mlp(64).parameters())
    assert all(isinstance(value, float) for value in figures.values())
    with pytest.raises(ValueError, match="no test split"):
        se.evaluate(ensemble, se.Data.from_arrays(x, y))


def test_the_threshold_is_a_percentile_of_the_entropy_of_what_is_right() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(64)])
    se.train(ensemble, data, se.Recipe(epochs=3), quiet=True)
    x, y = data.validation.inputs[data.validation.index], data.validation.targets[data.validation.index]
    entropy = ensemble.uncertainty(x).entropy[ensemble.predict(x) == y]
    assert ensemble.threshold == pytest.approx(float(np.percentile(entropy.double().numpy(), 75)), rel=1e-6)
    assert discard_threshold(ensemble, data, 0) == pytest.approx(float(entropy.min()), rel=1e-6)
