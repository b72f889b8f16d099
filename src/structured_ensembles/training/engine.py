"""What the fleet and its engines share: the plan of a run, and a network in training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from structured_ensembles.common.inputs import is_several, moved
from structured_ensembles.data import Data
from structured_ensembles.data.augmentation import Augmentation
from structured_ensembles.data.drawing import stream
from structured_ensembles.data.losses import Loss
from structured_ensembles.training.execution import Execution
from structured_ensembles.training.mesh import Mesh
from structured_ensembles.training.optimizers import OptimizerState
from structured_ensembles.training.recipe import Recipe

logger = logging.getLogger(__name__)

Result = tuple[float | None, float | None]  # loss and accuracy on the validation split; None where there is none


@dataclass(frozen=True)
class Plan:
    """What every epoch of a run needs to know."""

    data: Data
    recipe: Recipe
    execution: Execution
    loss: Loss
    seed: int
    device: torch.device
    augmentation: Augmentation
    shape: Any  # of one input; of several, a tuple or dict of shapes
    steps: int  # in an epoch
    dtype: torch.dtype = torch.float32  # of the networks, and so of their inputs
    mesh: Mesh = field(default_factory=Mesh)
    fallbacks: list[str] = field(default_factory=list)  # what was told by `tell`

    def tell(self, message: str) -> None:
        """Log a fallback from the fastest way, once in a run, and keep it for the history."""
        if message not in self.fallbacks:
            self.fallbacks.append(message)
            logger.warning(message)

    def example(self, draw: Callable[..., Tensor]) -> Any:
        """Return two samples for trials of the networks, on the device: drawn by `draw`, such as `torch.zeros`.

        Ids and several inputs are samples of the data, since drawn ones could be invalid.
        """
        if self.data.ids or is_several(self.shape):
            return moved(self.data.example(dtype=self.dtype), self.device)
        return draw(2, *self.shape, dtype=self.dtype, device=self.device)

    def member_seed(self, purpose: str, member: Member, *numbers: int) -> int:
        """Derive the seed of something a member draws for itself: its "order", "crops" or "dropout"."""
        return stream(self.seed, purpose, member.number, *numbers)

    @property
    def exact(self) -> torch.dtype:
        """What losses are computed in: the networks' type, but no less than float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def halved(self) -> bool:
        """Whether passes compute in bfloat16."""
        return self.execution.precision_on(self.device) == "bfloat16"

    def autocast(self) -> AbstractContextManager[object]:
        # Without a cache of cast weights: in a graph it would hold on to those of the step that was captured.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False) if self.halved else nullcontext()


@dataclass(eq=False)
class Member:
    """One network in training."""

    network: nn.Module
    number: int  # with the run's seed, it decides the order of its batches, its crops and its dropout
    best: dict[str, Tensor]  # a true copy of the weights of the best epoch
    optimizer_state: OptimizerState = field(default_factory=OptimizerState)
    best_score: float = -math.inf
    best_epoch: int = -1  # the last one with that score
    rise: int = -1  # the last epoch that was better than all before
    stopped: str | None = None


class Engine(Protocol):
    """How epochs are computed."""

    name: str  # "loop" or "graph"

    def take(self, active: Sequence[Member]) -> None:
        """Get ready for these members, and give them optimizers of the engine's kind.

        Raises `CaptureError` if it cannot; then nothing has changed, neither the members nor their optimizers.
        """
        ...

    def train_epoch(self, active: Sequence[Member], epoch: int, advance: Callable[[], None]) -> list[float]:
        """One pass over the training split; returns the mean loss of each member."""
        ...

    def validate(self, active: Sequence[Member]) -> list[Result]:
        """Loss and accuracy of each member on the validation split."""
        ...
