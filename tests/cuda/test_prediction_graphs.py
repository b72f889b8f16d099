"""Shapes that come very often are predicted by programs: run here on a CPU, where a graph is the step itself."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda import prediction_graphs
from structured_ensembles.cuda.capture import Step, logger
from structured_ensembles.cuda.prediction import MemberPredictions
from structured_ensembles.cuda.stacking import Stack
from tests.support.programs import Model, conv, images, norm


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_graphs, "COMPILE_AFTER", 6)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """List the members that were computed by programs, at each prediction."""
    numbers: list[tuple[int, ...]] = []
    outputs = MemberPredictions.outputs

    def note(self: MemberPredictions, inputs: Tensor) -> Tensor:
        numbers.append(self.numbers)
        return outputs(self, inputs)

    monkeypatch.setattr(MemberPredictions, "outputs", note)
    return numbers


def ensemble_of(*networks: nn.Module) -> se.Ensemble:
    torch.manual_seed(0)
    layers = [nn.Sequential(conv(3, 8), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)) for _ in range(2)]
    return se.Ensemble([*layers, *networks]).eval()


@torch.no_grad()
def check(ensemble: se.Ensemble, x: Tensor) -> None:
    """Ask for a prediction as the ensemble does on a GPU, and compare with the members' own outputs."""
    outputs = ensemble.replays.replay(ensemble, x)
    if outputs is not None:
        expected = torch.stack([member(x.clone()) for member in ensemble.members])
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


def test_a_shape_that_comes_very_often_is_compiled(programs: list[tuple[int, ...]]) -> None:
    ensemble = ensemble_of()
    for number in range(8):
        check(ensemble, images(5, seed=number))
        check(ensemble, images(2 + number % 3, seed=number))  # other shapes, not often enough
    assert set(programs) == {(0, 1)}
    assert len(programs) == 1 + 3  # a trial, and the predictions since


def test_weights_that_change_in_place_or_move_are_seen(programs: list[tuple[int, ...]]) -> None:
    ensemble = ensemble_of()
    for number in range(8):
        check(ensemble, images(5, seed=number))
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.data.mul_(2)
        ensemble.members[0][1].running_var.mul_(3)  # type: ignore[index,union-attr]
    used = len(programs)
    check(ensemble, images(5))
    assert len(programs) == used + 1
    ensemble.members[1][0].weight.data = torch.randn(8, 3, 3, 3)  # type: ignore[index,union-attr]
    assert ensemble.replays.replay(ensemble, images(5)) is None  # all graphs are dropped
    assert ensemble.replays.graphs == {}


def test_a_graph_keeps_the_weights_that_its_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[weakref.ref[Stack]] = []
    init = MemberPredictions.__init__

    def note(self: MemberPredictions, *arguments: Any) -> None:
        init(self, *arguments)
        stacks.append(weakref.ref(self.stack))

    def without_the_step(step: Step, *_: object, **__: object) -> Step:
        step()
        return int  # as a CUDA graph does, it has no reference to what was captured

    monkeypatch.setattr(MemberPredictions, "__init__", note)
    monkeypatch.setattr(prediction_graphs, "captured", without_the_step)
    ensemble, x = ensemble_of(), images(5)
    for _ in range(8):
        ensemble.replays.replay(ensemble, x)
    gc.collect()
    (stack,) = stacks
    assert stack() is not None
    ensemble.replays.clear()
    assert stack() is None  # at once, without a garbage collection


def test_members_without_a_program_run_beside_it(
    programs: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    def overwriting(self: Model, x: Tensor) -> Tensor:
        return self.line(self.c(x.mul_(2) if bool(x.sum() > -1e9) else x).flatten(1))

    ensemble = ensemble_of(Model(overwriting, c=conv(3, 3), line=nn.Linear(108, 3)))
    for number in range(8):
        check(ensemble, images(5, seed=number))
    assert set(programs) == {(0, 1)}
    assert len(logged(caplog)) == 1


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the library has logged; it was expected, see conftest.py."""
    texts = [record.getMessage() for record in caplog.records if record.name == logger.name]
    caplog.clear()
    return texts


def test_a_program_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = MemberPredictions.outputs
    monkeypatch.setattr(MemberPredictions, "outputs", lambda self, inputs: outputs(self, inputs) * 1.5)
    ensemble = ensemble_of()
    for number in range(8):
        check(ensemble, images(5, seed=number))
    (text,) = logged(caplog)
    assert "without our own kernels, slower: its outputs differ" in text


def test_the_log_says_once_why_there_is_no_program(caplog: pytest.LogCaptureFixture) -> None:
    branching = Model(lambda self, x: self.c(x).flatten(1) * (2 if bool(x.sum() > 0) else 1), c=conv())
    ensemble = se.Ensemble([branching]).eval()
    for number in range(16):
        check(ensemble, images(5 + number % 2, seed=number))
    (text,) = logged(caplog)
    assert "prediction: PyTorch's own kernels are used, slower: the network cannot be exported" in text


def test_without_tf32_float32_stays_with_pytorch(
    monkeypatch: pytest.MonkeyPatch, programs: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(prediction_graphs, "allows_tf32", lambda device: False)
    ensemble = ensemble_of()
    for number in range(8):
        check(ensemble, images(5, seed=number))
    assert programs == []


def test_predictions_under_autocast_are_computed_in_its_type(programs: list[tuple[int, ...]]) -> None:
    ensemble = ensemble_of()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for number in range(8):
            x = images(5, seed=number)
            outputs = ensemble.replays.replay(ensemble, x)
            if outputs is not None:
                assert outputs.dtype == torch.bfloat16
                expected = torch.stack([member(x) for member in ensemble.members])
                torch.testing.assert_close(outputs, expected, rtol=0.05, atol=0.05)
    assert programs
