"""`print(ensemble)` and `print(uncertainty)`."""

import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.prediction.combination import Uncertainty


def test_an_ensemble_prints_members_parameters_task_and_calibration() -> None:
    ensemble = se.Ensemble([nn.Linear(4, 3), nn.Linear(4, 3)], classes=("a", "b", "c"))
    assert repr(ensemble) == (
        "Ensemble(2 (2 × Linear), 30 parameters, classification of 3 classes, calibration: none yet)"
    )
    wide = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))  # 67 parameters
    graph = se.trace(wide, torch.randn(2, 4))
    halves = se.select(graph, prune=0.5, selection="random", members=2)  # 35 each
    ensemble = se.Ensemble([se.extract(wide, graph, half) for half in halves], classes=("a", "b", "c"))
    ensemble.input_shape = (4,)
    x, y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    ensemble.conformal((x, y), coverage=0.8)
    ensemble.threshold = 0.5
    assert str(ensemble).splitlines() == [
        "Ensemble",
        "  members     2 (2 × Sequential)",
        "  parameters  70, 1.04 × those of the network that they were cut from",
        "  task        classification of 3 classes",
        "  inputs      of shape (4,)",
        "  calibration discards above an entropy of 0.5, sets of 80 %",
    ]
    assert "70 parameters (1.04 × the base)" in repr(ensemble)


def test_a_regression_names_its_intervals() -> None:
    ensemble = se.Ensemble([nn.Linear(4, 1), nn.Linear(4, 1)], task="regression")
    ensemble.conformal((torch.randn(60, 4), torch.randn(60)), coverage=0.9)
    assert repr(ensemble).endswith("regression, calibration: intervals of 90 %)")


def test_uncertainty_prints_its_first_samples_and_the_means() -> None:
    values = torch.arange(12) / 10
    uncertainty = Uncertainty(values, values / 2, torch.zeros(12))
    assert repr(uncertainty) == (
        "Uncertainty(12 samples, on average: entropy 0.550, mutual information 0.275, disagreement 0.000)"
    )
    lines = str(uncertainty).splitlines()
    assert lines[0].split() == ["sample", "entropy", "mutual", "information", "disagreement"]
    assert lines[5].split() == ["3", "0.300", "0.150", "0.000"]
    assert lines[-2].split()[0] == "…"
    assert lines[-1].split() == ["mean", "0.550", "0.275", "0.000"]
    assert len(lines) == 2 + 10 + 2
