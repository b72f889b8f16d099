"""Diversity, discarding and out-of-distribution detection against loops, scikit-learn and SciPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import entropy as scipy_entropy
from sklearn.metrics import roc_auc_score, roc_curve
from torch import nn

import structured_ensembles as se
from structured_ensembles.evaluation.discarding import (
    coverage_at_risk,
    discarding_curve,
    measure_discarding,
    risk_coverage_area,
)
from structured_ensembles.evaluation.diversity import compute_diversity, disagreement_matrix, diversity_by_outcome
from structured_ensembles.evaluation.ood import compute_detection_figures
from structured_ensembles.evaluation.ranking import auroc, false_acceptance
from structured_ensembles.prediction.combination import Uncertainty, uncertainty_of

SCORES = st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=60)  # few values: many ties


def random_logits(members: int = 4, samples: int = 60, classes: int = 5) -> torch.Tensor:
    return 3 * torch.randn(members, samples, classes, generator=torch.Generator().manual_seed(0))


def test_diversity_equals_the_entropy_of_mean_logits() -> None:
    logits = random_logits()
    expected = [
        scipy_entropy(softmax(logits[:, sample].double().mean(0).numpy())) / np.log(5) * 100 for sample in range(60)
    ]
    np.testing.assert_allclose(compute_diversity(logits).numpy(), expected, rtol=1e-6)
    correct = torch.arange(60) % 3 == 0
    cc, wc = diversity_by_outcome(logits, correct)
    assert cc == pytest.approx(np.mean(expected[::3]))
    assert wc == pytest.approx(np.mean([value for sample, value in enumerate(expected) if sample % 3]))


def test_diversity_of_edge_cases() -> None:
    assert compute_diversity(torch.zeros(3, 2, 7)).tolist() == pytest.approx([100, 100])  # knows nothing
    assert compute_diversity(torch.tensor([[[1e4, 0.0]]])).tolist() == [0]  # knows everything
    assert compute_diversity(torch.randn(3, 2, 1)).tolist() == [0, 0]  # one class: nothing to know
    opposed = torch.tensor([[[5.0, -5.0]], [[-5.0, 5.0]]])  # members that contradict each other cancel out
    assert compute_diversity(opposed).tolist() == pytest.approx([100])
    all_right = torch.ones(60, dtype=torch.bool)
    assert not math.isnan(diversity_by_outcome(random_logits(), all_right)[0])
    assert math.isnan(diversity_by_outcome(random_logits(), all_right)[1])
    assert math.isnan(diversity_by_outcome(random_logits(), ~all_right)[0])


def test_disagreement_matrix_equals_a_loop_over_pairs() -> None:
    logits = random_logits()
    labels = logits.argmax(-1).tolist()
    matrix = disagreement_matrix(logits)
    for first in range(4):
        for second in range(4):
            differing = sum(a != b for a, b in zip(labels[first], labels[second], strict=True))
            assert float(matrix[first, second]) == pytest.approx(differing / 60)
    pairs = [float(matrix[first, second]) for first in range(4) for second in range(4) if first != second]
    assert float(uncertainty_of(logits).disagreement.mean()) == pytest.approx(np.mean(pairs))
    assert disagreement_matrix(logits[:1]).tolist() == [[0]]


def test_discarding_equals_a_hand_computation() -> None:
    entropy = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    correct = torch.tensor([True, True, False, True, False])
    discarded = measure_discarding(entropy, correct, float(entropy[2]))  # a sample on the threshold is kept
    assert discarded.accuracy == pytest.approx(3 / 5)
    assert discarded.filtered_accuracy == pytest.approx(2 / 3)
    assert discarded.discarded == pytest.approx(2 / 5)
    everything = measure_discarding(entropy, correct, -1.0)
    assert everything.discarded == 1
    assert math.isnan(everything.filtered_accuracy)
    nothing = measure_discarding(entropy, correct, 9.0)
    assert (nothing.discarded, nothing.filtered_accuracy) == (0, nothing.accuracy)


@settings(deadline=None)
@given(SCORES)
def test_discarding_curve_tries_every_threshold(samples: list[tuple[int, bool]]) -> None:
    entropy, correct = torch.tensor([float(s) for s, _ in samples]), torch.tensor([c for _, c in samples])
    shares, accuracies = discarding_curve(entropy, correct)
    thresholds = sorted({s for s, _ in samples}, reverse=True)
    assert len(shares) == len(accuracies) == len(thresholds)
    for share, accuracy, threshold in zip(shares.tolist(), accuracies.tolist(), thresholds, strict=True):
        kept = [c for s, c in samples if s <= threshold]
        assert share == pytest.approx(1 - len(kept) / len(samples))
        assert accuracy == pytest.approx(sum(kept) / len(kept))
        point = measure_discarding(entropy, correct, threshold)
        assert (point.discarded, point.filtered_accuracy) == pytest.approx((share, accuracy))


@settings(deadline=None)
@given(SCORES)
def test_auroc_equals_scikit_learn(samples: list[tuple[int, bool]]) -> None:
    scores, positive = torch.tensor([float(s) for s, _ in samples]), torch.tensor([c for _, c in samples])
    if positive.all() or not positive.any():
        assert math.isnan(auroc(scores, positive))
    else:
        assert auroc(scores, positive) == pytest.approx(roc_auc_score(positive.numpy(), scores.numpy()))


def test_uncertainty_that_is_nan_ranks_nothing() -> None:
    scores, positive = torch.tensor([0.1, 0.2, 0.3, math.nan]), torch.tensor([False, False, True, True])
    assert math.isnan(auroc(scores, positive))
    assert math.isnan(risk_coverage_area(scores, positive))
    assert math.isnan(coverage_at_risk(scores, positive))
    assert math.isnan(false_acceptance(scores[:2], scores[2:]))
    assert math.isnan(false_acceptance(scores[2:], scores[:2]))


def test_diverged_ensemble_has_no_figures_of_its_ranking() -> None:
    network = nn.Linear(4, 3)
    nn.init.constant_(network.weight, math.nan)
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    with pytest.warns(UserWarning, match="NaN for 20 of 20 samples"):
        figures = se.evaluate(se.Ensemble([network]), se.Data.from_arrays(x, y, test=(x, y)))
    assert math.isnan(figures["cal/nll"])
    assert not figures.keys() & {"unc/auroc", "unc/fpr95", "unc/aurc", "unc/coverage_at_5_risk"}


@settings(deadline=None)
@given(SCORES)
def test_fpr95_equals_scikit_learns_roc_curve(samples: list[tuple[int, bool]]) -> None:
    known = torch.tensor([float(s) for s, foreign in samples if not foreign])
    foreign = torch.tensor([float(s) for s, foreign in samples if foreign])
    if len(known) == 0 or len(foreign) == 0:
        assert math.isnan(false_acceptance(known, foreign))
        return
    # Its positives are the known samples, whose scores are low.
    rates, kept, _ = roc_curve(
        [1] * len(known) + [0] * len(foreign), [-s for s in [*known.tolist(), *foreign.tolist()]]
    )
    expected = rates[np.argmax(kept >= 0.95 - 1e-9)]
    assert false_acceptance(known, foreign) == pytest.approx(expected)


def test_fpr95_counts_whole_samples() -> None:
    known = torch.arange(20.0)
    assert false_acceptance(known, torch.tensor([18.0, 18.5, 19.0, 40.0])) == 0.25  # 19 of 20 are 95 %: up to 18
    assert false_acceptance(known, known + 100) == 0
    assert false_acceptance(known, known - 100) == 1


def test_detection_figures_equal_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    known, foreign = (
        Uncertainty(*(torch.rand(count, generator=generator) + shift for shift in (0.1 * distance, distance, 0.0)))
        for count, distance in ((80, 0), (50, 1))
    )
    figures = compute_detection_figures(known, foreign)
    truth = [0] * 80 + [1] * 50
    scores = torch.cat((known.entropy, foreign.entropy)).numpy()
    assert figures["entropy_auroc"] == pytest.approx(roc_auc_score(truth, scores))
    assert figures["mutual_information_auroc"] == 1
    assert figures["mutual_information_fpr95"] == 0
    assert set(figures) == {
        f"{name}_{figure}"
        for name in ("entropy", "mutual_information")
        for figure in ("auroc", "fpr95", "fpr95_foreign")
    }
