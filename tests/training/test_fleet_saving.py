"""Checkpoints of a fleet: as often as a tenth of the time allows, and always of the last epoch."""

from pathlib import Path

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.training import fleet_saving
from structured_ensembles.training.checkpoint import load_checkpoint
from tests.support.engines import Stopped, stop_before_epoch


class Clock:
    """A clock that stands still, but for the seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fleet_saving, "time", clock)
    return clock


@pytest.fixture
def saved_epochs(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[int]:
    """List the epochs of which a checkpoint is written; each takes 2 seconds."""
    listed = []
    plain = fleet_saving.save_fleet

    def save(path, fleet, history, next_epoch, *rest) -> None:
        plain(path, fleet, history, next_epoch, *rest)
        listed.append(next_epoch)
        clock.now += 2.0

    monkeypatch.setattr(fleet_saving, "save_fleet", save)
    return listed


def train(checkpoint: Path | None, epochs: int, on_epoch=None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2)]
    ensemble = se.Ensemble(networks)
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    data = se.Data.from_arrays(inputs, torch.arange(40) % 3)
    recipe = se.Recipe(epochs=epochs, batch_size=8, rate=0.05)
    se.train(ensemble, data, recipe, checkpoint=checkpoint, device="cpu", quiet=True, on_epoch=on_epoch)
    return ensemble.state_dict()


def same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_writing_takes_a_tenth_of_the_time(tmp_path: Path, clock: Clock, saved_epochs: list[int]) -> None:
    def let_a_second_pass(_: se.EpochRow) -> None:
        clock.now += 1.0

    train(tmp_path / "checkpoint", 40, let_a_second_pass)
    assert saved_epochs == [1, 19, 37, 40]  # the first one, one for each 18 seconds of training, and the last epoch
    _, state = load_checkpoint(tmp_path / "checkpoint") or ({}, {})
    assert state["epoch"] == 40


def test_slow_epochs_have_a_checkpoint_each(tmp_path: Path, clock: Clock, saved_epochs: list[int]) -> None:
    def let_twenty_seconds_pass(_: se.EpochRow) -> None:
        clock.now += 20.0

    train(tmp_path / "checkpoint", 4, let_twenty_seconds_pass)
    assert saved_epochs == [1, 2, 3, 4]


def test_an_exception_of_on_epoch_leaves_a_checkpoint_of_its_epoch(tmp_path: Path, saved_epochs: list[int]) -> None:
    class EnoughError(Exception):
        pass

    def stop(row: se.EpochRow) -> None:
        if row.epoch == 2:
            raise EnoughError

    with pytest.raises(EnoughError):
        train(tmp_path / "checkpoint", 6, stop)
    assert saved_epochs == [1, 3]
    seen = []
    resumed = train(tmp_path / "checkpoint", 6, lambda row: seen.append(row.epoch))
    assert seen == [3, 4, 5]
    assert same(resumed, train(None, 6))


def test_epochs_without_a_checkpoint_are_trained_again_to_the_same_weights(
    tmp_path: Path, saved_epochs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_before_epoch(patch, 4)
        with pytest.raises(Stopped):
            train(tmp_path / "checkpoint", 6)
    assert saved_epochs == [1]
    assert same(train(tmp_path / "checkpoint", 6), train(None, 6))


def test_without_a_checkpoint_nothing_is_written(saved_epochs: list[int]) -> None:
    train(None, 2)
    assert saved_epochs == []
