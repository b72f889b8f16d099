"""Adaptive and classwise ECE, AURC, coverage at a risk, FPR95: as torch-uncertainty and torchmetrics define them.

torch-uncertainty needs too many packages to be one of ours. So each definition is written here as a loop over numbers,
and for a fixed example stands what torch-uncertainty 0.13.0 itself gives (float32, hence seven digits).
"""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import structured_ensembles as se
from structured_ensembles.evaluation.calibration import (
    adaptive_calibration_error,
    classwise_calibration_error,
    expected_calibration_error,
)
from structured_ensembles.evaluation.discarding import coverage_at_risk, risk_coverage_area
from structured_ensembles.evaluation.ranking import false_acceptance, false_alarms, mean_over_ties

SAMPLES, CLASSES = 120, 4
LOGITS = [[3 * math.sin(1.7 * i + 2.3 * k * k) for k in range(CLASSES)] for i in range(SAMPLES)]
PROBABILITIES = torch.tensor(LOGITS, dtype=torch.float64).softmax(-1)
# Some are wrong, more often where the confidence is low.
TARGETS = torch.tensor(
    [
        (int(row.argmax()) + (i % 17 == 0 or (float(row.max()) < 0.6 and i % 3 == 0))) % CLASSES
        for i, row in enumerate(PROBABILITIES)
    ]
)
CORRECT = PROBABILITIES.argmax(-1) == TARGETS
DOUBT = -PROBABILITIES.max(-1).values
ENTROPY = -(PROBABILITIES * PROBABILITIES.log()).sum(-1)

RANKED = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=7)  # few values: many ties


def test_metrics_equal_recorded_torch_uncertainty_values() -> None:
    assert adaptive_calibration_error(PROBABILITIES, TARGETS, 15) == pytest.approx(0.1668993, abs=1e-6)
    assert classwise_calibration_error(PROBABILITIES, TARGETS, 15) == pytest.approx(0.1056626, abs=1e-6)
    assert risk_coverage_area(DOUBT, CORRECT) == pytest.approx(0.0852975, abs=1e-6)
    assert coverage_at_risk(DOUBT, CORRECT, 0.05) == pytest.approx(0.2416667, abs=1e-6)
    assert coverage_at_risk(DOUBT, CORRECT, 0.12) == pytest.approx(0.7166666, abs=1e-6)
    # FPR95(pos_label=…): right predictions, the first 80 samples, the others
    assert false_acceptance(ENTROPY[CORRECT], ENTROPY[~CORRECT]) == pytest.approx(0.9047619, abs=1e-6)
    known, foreign = ENTROPY[:80], ENTROPY[80:] + 0.2
    assert false_acceptance(known, foreign) == pytest.approx(0.6, abs=1e-6)
    assert false_alarms(known, foreign) == pytest.approx(0.7625, abs=1e-6)


def test_calibration_errors_equal_torchmetrics() -> None:
    pytest.importorskip("torchmetrics")
    from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

    ece = multiclass_calibration_error(PROBABILITIES, TARGETS, CLASSES, n_bins=15, norm="l1")
    assert expected_calibration_error(PROBABILITIES, TARGETS, 15) == pytest.approx(float(ece))
    each = [
        float(binary_calibration_error(PROBABILITIES[:, label], (label == TARGETS).long(), n_bins=15))
        for label in range(CLASSES)
    ]
    assert classwise_calibration_error(PROBABILITIES, TARGETS, 15) == pytest.approx(np.mean(each))


def test_false_alarms_equal_torchmetrics() -> None:
    pytest.importorskip("torchmetrics")
    from torchmetrics.functional.classification import binary_specificity_at_sensitivity

    # Sensitivity: foreign samples that are rejected. Specificity: known ones that are accepted.
    known, foreign = ENTROPY[:80], ENTROPY[80:] + 0.2
    foreign_ones = torch.cat((torch.zeros(80), torch.ones(40))).long()
    scores = torch.cat((known, foreign)) / 2  # it takes values beyond [0,1] for logits
    specificity, _ = binary_specificity_at_sensitivity(scores, foreign_ones, min_sensitivity=0.95)
    assert false_alarms(known, foreign) == pytest.approx(1 - float(specificity))


@pytest.mark.parametrize("bins", [1, 7, 15, 120, 200])
def test_adaptive_bins_hold_equally_many_samples(bins: int) -> None:
    confidence, correct = (-DOUBT).tolist(), CORRECT.tolist()
    order = sorted(range(SAMPLES), key=lambda i: confidence[i])
    first, total = 0, 0.0
    for index in range(bins):
        last = first + SAMPLES // bins + (index < SAMPLES % bins)
        inside = order[first:last]
        if inside:
            gap = np.mean([confidence[i] for i in inside]) - np.mean([correct[i] for i in inside])
            total += len(inside) / SAMPLES * abs(gap)
        first = last
    assert first == SAMPLES
    assert adaptive_calibration_error(PROBABILITIES, TARGETS, bins) == pytest.approx(total)


def test_classwise_ece_equals_a_hand_computation() -> None:
    probabilities = torch.tensor([[0.9, 0.1, 0.0], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.0, 0.0, 1.0]])
    targets = torch.tensor([0, 1, 1, 2])
    # Two bins, (0, .5] and (.5, 1]. Class 0: |.2 + 0 - 0| + |.9 + .6 - 1|, class 1: |.1 + .3 + 0 - 1| + |.7 - 1|,
    # class 2: |0 + .1 + .1 - 0| + |1 - 1|; all over four samples.
    expected = np.mean([0.2 + 0.5, 0.6 + 0.3, 0.2 + 0.0]) / 4
    assert classwise_calibration_error(probabilities, targets, 2) == pytest.approx(expected)
    assert classwise_calibration_error(torch.eye(3), torch.arange(3)) == 0
    assert classwise_calibration_error(torch.ones(3, 1), torch.zeros(3, dtype=torch.long)) == 0


def area_of(errors: list[bool]) -> float:
    """Compute torch-uncertainty's AURC of ordered samples: trapezoids from a coverage of 1/n to 1."""
    risks = [sum(errors[:kept]) / kept for kept in range(1, len(errors) + 1)]
    steps = [(low + high) / 2 / len(errors) for low, high in zip(risks, risks[1:], strict=False)]
    return sum(steps) / (1 - 1 / len(errors))


@settings(deadline=None, max_examples=40)
@given(RANKED)
def test_aurc_is_the_mean_over_all_orders_of_ties(samples: list[tuple[int, bool]]) -> None:
    orders = [order for order in permutations(samples) if [s for s, _ in order] == sorted(s for s, _ in order)]
    expected = np.mean([area_of([not right for _, right in order]) for order in orders])
    doubt, correct = torch.tensor([float(s) for s, _ in samples]), torch.tensor([right for _, right in samples])
    assert risk_coverage_area(doubt, correct) == pytest.approx(expected)
    assert risk_coverage_area(doubt.flip(0), correct.flip(0)) == pytest.approx(expected)


@settings(deadline=None)
@given(RANKED, st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]))
def test_coverage_at_risk_equals_a_search_over_thresholds(samples: list[tuple[int, bool]], risk: float) -> None:
    allowed = []
    for threshold, _ in samples:
        kept = [right for s, right in samples if s <= threshold]
        if kept.count(False) / len(kept) <= risk:
            allowed.append(len(kept) / len(samples))
    doubt, correct = torch.tensor([float(s) for s, _ in samples]), torch.tensor([right for _, right in samples])
    coverage = coverage_at_risk(doubt, correct, risk)
    assert coverage == pytest.approx(max(allowed)) if allowed else math.isnan(coverage)


def test_metrics_do_not_depend_on_sample_order() -> None:
    """A third of the samples has confidence 1, which sorting alone would order arbitrarily."""
    sure = PROBABILITIES.clone()
    sure[::3] = torch.nn.functional.one_hot(PROBABILITIES[::3].argmax(-1), CLASSES).double()
    values = []
    for seed in range(3):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed))
        probabilities, targets, correct = sure[order], TARGETS[order], CORRECT[order]
        doubt = -probabilities.max(-1).values
        figures = [adaptive_calibration_error(probabilities, targets), risk_coverage_area(doubt, correct)]
        values.append([*figures, coverage_at_risk(doubt, correct)])
    np.testing.assert_allclose(values[1:], [values[0]] * 2, rtol=1e-12)
    assert mean_over_ties(torch.tensor([2.0, 1, 2, 3]), torch.tensor([0.0, 5, 1, 7])).tolist() == [0.5, 5, 0.5, 7]


def test_metrics_of_edge_cases() -> None:
    right, wrong = torch.ones(20, dtype=torch.bool), torch.zeros(20, dtype=torch.bool)
    doubt = torch.arange(20.0)
    assert risk_coverage_area(doubt, right) == 0
    assert risk_coverage_area(doubt, wrong) == pytest.approx(1)
    assert math.isnan(risk_coverage_area(doubt[:1], right[:1]))
    assert coverage_at_risk(doubt, right) == 1
    assert math.isnan(coverage_at_risk(doubt, wrong))
    one_in_twenty = doubt != 19
    assert coverage_at_risk(doubt, one_in_twenty, 0.05) == 1  # exactly 5 %
    assert math.isnan(false_alarms(doubt[:0], doubt))


def test_evaluate_includes_these_metrics() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(64) for _ in range(2)])
    se.train(ensemble, data, se.Recipe(epochs=2), quiet=True)
    noise = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8)
    others = torch.arange(60) % 20  # of more classes than the ensemble has outputs
    foreign = se.Data.from_arrays(noise, others, test=(noise, others))
    figures = se.evaluate(ensemble, data, ood=foreign)
    x, y = data.test.inputs, data.test.targets
    probabilities = ensemble.predict_proba(x, temperature=1.0)
    entropy = ensemble.uncertainty(x, temperature=1.0).entropy
    confidence, labels = probabilities.max(-1)
    correct = labels == y
    assert figures["cal/adaptive_ece"] == adaptive_calibration_error(probabilities, y, 15)
    assert figures["cal/classwise_ece"] == classwise_calibration_error(probabilities, y, 15)
    assert figures["unc/aurc"] == risk_coverage_area(-confidence, correct)
    assert figures["unc/coverage_at_5_risk"] == coverage_at_risk(-confidence, correct, 0.05)
    assert figures["unc/fpr95"] == false_acceptance(entropy[correct], entropy[~correct])
    unknown = ensemble.uncertainty(noise, temperature=1.0).entropy
    assert figures["ood/entropy_fpr95_foreign"] == false_alarms(entropy, unknown)
    rejected = entropy >= unknown.sort().values[3]  # 95 % of 60 are 57
    assert figures["ood/entropy_fpr95_foreign"] == pytest.approx(float(rejected.double().mean()))
