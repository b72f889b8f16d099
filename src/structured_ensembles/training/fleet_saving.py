"""When the checkpoint of a fleet is written: after every epoch, unless that would take too much of the time.

A checkpoint of four ResNet18s has half a gigabyte; to compute its checksum and to flush it to a disk takes seconds, as
long as a GPU needs for an epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from structured_ensembles.common.processes import decide_in_first_process
from structured_ensembles.training.engine import Member
from structured_ensembles.training.fleet_checkpoint import save_fleet
from structured_ensembles.training.history import History
from structured_ensembles.training.mesh import Mesh

MAX_SHARE = 0.1  # of the time, for writing


class FleetSaver:
    """Writes the checkpoint of a fleet. path: None if there is none. run_state: its identity and units."""

    def __init__(
        self, path: Path | None, fleet: Sequence[Member], history: History, run_state: Mapping[str, Any], mesh: Mesh
    ) -> None:
        self.path, self.fleet, self.history, self.run_state, self.mesh = path, fleet, history, run_state, mesh
        self.saved_epochs = history.epochs
        self.seconds, self.end = 0.0, -math.inf  # what the last checkpoint took, and when it was written

    def save(self) -> None:
        """Write a checkpoint of the epochs so far, unless there is one of them."""
        if self.path is None or self.saved_epochs == self.history.epochs:
            return
        start = time.monotonic()
        save_fleet(self.path, self.fleet, self.history, self.history.epochs, self.run_state, self.mesh)
        self.saved_epochs, self.end = self.history.epochs, time.monotonic()
        self.seconds = self.end - start

    def save_if_due(self) -> None:
        """Write a checkpoint, unless writing would then have taken more than its share of the time."""
        if self.path is not None and decide_in_first_process(self._is_due):
            self.save()

    def _is_due(self) -> bool:
        """Tell whether enough time has passed since the last checkpoint, by the seconds that it took."""
        return time.monotonic() - self.end >= (1 / MAX_SHARE - 1) * self.seconds
