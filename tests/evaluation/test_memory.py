"""Memory of ensembles: peak of prediction, file size, overhead."""

from pathlib import Path

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.evaluation.memory import measure_file_bytes, measure_peak_memory, measure_prediction_bytes


def test_peak_memory_equals_a_hand_computation(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        first = torch.empty(1000, 1000)
        second = torch.empty(500, 1000)
        del first
        third = torch.empty(100, 1000)
        del second, third

    assert measure_peak_memory(run) == 4 * (1000 + 500) * 1000
    assert measure_peak_memory(lambda: None) == 0
    assert capfd.readouterr().err == ""  # the profiler's own messages are silenced
    with pytest.raises(ZeroDivisionError):
        measure_peak_memory(lambda: 1 // 0)
    assert measure_peak_memory(run) == 6_000_000


def test_prediction_memory_is_that_of_the_largest_layers_of_one_member() -> None:
    ensemble = se.Ensemble([nn.Sequential(nn.Linear(10, 1000), nn.Linear(1000, 3)) for _ in range(4)])
    hidden = 4 * 200 * 1000
    peak_bytes = measure_prediction_bytes(ensemble, torch.rand(200, 10))
    assert hidden < peak_bytes < 1.2 * hidden


def test_file_bytes_equals_the_size_of_the_file(tmp_path: Path) -> None:
    ensemble = se.Ensemble([se.zoo.mlp(64) for _ in range(2)])
    assert measure_file_bytes(ensemble) == ensemble.save(tmp_path / "ensemble.safetensors")
    assert measure_file_bytes(ensemble) == (tmp_path / "ensemble.safetensors").stat().st_size


def test_overhead_counts_trainable_parameters() -> None:
    base = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))  # 40 and 18 parameters
    members = [nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)) for _ in range(3)]  # 15 and 8
    assert se.Ensemble(members).overhead(base) == pytest.approx(3 * 23 / 58)
    base[0].requires_grad_(False)
    assert se.Ensemble(members).overhead(base) == pytest.approx(3 * 23 / 18)
    with pytest.raises(ValueError, match="base must have parameters"):
        se.Ensemble(members).overhead(base.requires_grad_(False))


def test_the_size_of_the_file_is_measured_without_a_warning_of_loading_it(recwarn: pytest.WarningsRecorder) -> None:
    assert measure_file_bytes(se.Ensemble([nn.Linear(2, 2)])) > 0
    assert not recwarn.list
