"""compare_with_base(): the table's figures are those of evaluate(), of the base and of the ensemble."""

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.evaluation.comparison import compare_with_base


def mlp(seed: int, outputs: int, hidden: int = 16) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def cells(table: str) -> tuple[list[str], list[str], list[str]]:
    header, _, base, ensemble = table.splitlines()
    return header.split()[2:], base.split()[1:], ensemble.split()[3:]


def test_classifier_is_compared_by_accuracy_nll_and_ece() -> None:
    x, y = torch.randn(60, 5), torch.arange(60) % 3
    data = se.Data.from_arrays(x, y, test=(x, y))
    base, ensemble = mlp(0, 3), se.Ensemble([mlp(1, 3, 8), mlp(2, 3, 8)])
    ensemble.adopt(data)
    single = se.Ensemble([base])
    single.adopt(data)
    base.train()
    header, *rows = cells(compare_with_base(ensemble, base, data, base_seconds=12.4, seconds=30.6))
    assert header == ["accuracy", "NLL", "ECE", "memory", "seconds"]
    for row, measured, memory, seconds in zip(rows, (single, ensemble), (1.0, 2 * 75 / 147), ("12", "31"), strict=True):
        figures = se.evaluate(measured, data)
        assert row[:3] == [
            f"{100 * figures['cls/accuracy']:.2f}%",
            f"{figures['cal/nll']:.4f}",
            f"{100 * figures['cal/ece15']:.2f}%",
        ]
        assert row[3:] == [f"{memory:.2f}", seconds]
    assert base.training


def test_regression_is_compared_by_rmse_on_the_validation_split_if_there_is_no_test() -> None:
    x = torch.randn(60, 5)
    data = se.Data.from_arrays(x, 100 + 50 * x[:, 0])
    base = mlp(0, 1)
    ensemble = se.Ensemble([mlp(1, 1)])
    se.train(ensemble, data, se.Recipe(epochs=1), device="cpu", quiet=True)
    table = compare_with_base(ensemble, base, data)
    assert table.startswith("validation split ")
    header, row, others = cells(table)
    assert header == ["RMSE", "memory", "seconds"]
    inputs, targets = next(data.batches("validation", 99))
    with torch.no_grad():  # an untrained network gives standardised values
        trained = data.train.targets[data.train.index]  # type: ignore[attr-defined]
        values = base(inputs)[:, 0] * trained.std(correction=0) + trained.mean()
    assert float(row[0]) == pytest.approx(float((values - targets).square().mean().sqrt()), rel=1e-3)
    assert float(others[0]) == pytest.approx(se.evaluate(ensemble, data, "validation")["reg/rmse"], abs=1e-4)
    assert row[-1] == others[-1] == "–"


def test_no_table_without_samples_or_figures() -> None:
    x, y = torch.randn(60, 5), torch.arange(60) % 3
    ensemble = se.Ensemble([mlp(0, 3)])
    assert compare_with_base(ensemble, mlp(0, 3), se.Data.from_arrays(x, y, validation=0.0)) == ""
    with pytest.warns(UserWarning, match="base and ensemble cannot be compared"):
        assert compare_with_base(ensemble, nn.Linear(7, 3), se.Data.from_arrays(x, y)) == ""
