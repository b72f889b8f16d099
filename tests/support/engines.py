"""Choose the training engine on a CPU, where a captured step is the step itself."""

from collections.abc import Callable
from typing import Any, Literal

import pytest

from structured_ensembles.training import fleet_checkpoint, preparation
from structured_ensembles.training.engine import Member, Result
from structured_ensembles.training.graph_engine import GraphEngine
from structured_ensembles.training.loop_engine import LoopEngine


class Stopped(Exception):  # noqa: N818
    """End a training run where a test wants it to end."""


def use_engine(monkeypatch: pytest.MonkeyPatch, engine: Literal["loop", "graph"]) -> None:
    """Let `engine="auto"` mean this engine on the CPU."""
    monkeypatch.setattr(preparation, "GRAPH_DEVICES", {"cpu"} if engine == "graph" else set())


def stop_before_epoch(monkeypatch: pytest.MonkeyPatch, stop: int | None) -> None:
    """Raise `Stopped` in place of the training epoch of this number, in both engines; None: never."""
    for engine in (LoopEngine, GraphEngine):

        def train_epoch(
            self: Any, active: Any, epoch: int, advance: Any, plain: Callable[..., list[float]] = engine.train_epoch
        ) -> list[float]:
            if epoch == stop:
                raise Stopped
            return plain(self, active, epoch, advance)

        monkeypatch.setattr(engine, "train_epoch", train_epoch)


def stop_after_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise `Stopped` after the first checkpoint of a training run is written."""
    save = fleet_checkpoint.save_checkpoint

    def save_and_stop(*arguments: Any) -> None:
        save(*arguments)
        raise Stopped

    monkeypatch.setattr(fleet_checkpoint, "save_checkpoint", save_and_stop)


def change_validation(monkeypatch: pytest.MonkeyPatch, change: Callable[[Member, Result], Result]) -> None:
    """Replace each member's validation loss and accuracy by `change` of them, in both engines."""
    for engine in (LoopEngine, GraphEngine):

        def validate(self: Any, active: Any, plain: Callable[..., list[Result]] = engine.validate) -> list[Result]:
            return [change(member, result) for member, result in zip(active, plain(self, active), strict=True)]

        monkeypatch.setattr(engine, "validate", validate)
