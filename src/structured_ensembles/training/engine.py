"""Plan, Member and Engine: the types that the fleet shares with the engines that compute its epochs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from structured_ensembles.common.inputs import Inputs, is_several, move_inputs
from structured_ensembles.data import Data
from structured_ensembles.data.augmentation import Augmentation
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.data.losses import Loss
from structured_ensembles.training.execution import Execution
from structured_ensembles.training.mesh import Mesh
from structured_ensembles.training.optimizers import OptimizerState
from structured_ensembles.training.recipe import Recipe
from structured_ensembles.training.teaching import Teaching

logger = logging.getLogger(__name__)

Result = tuple[float | None, float | None]  # loss and accuracy on the validation split; None where there is none


@dataclass(frozen=True)
class Plan:
    """Data, recipe and settings of a run, the same for every epoch."""

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
    teaching: Teaching | None = None
    fallbacks: list[str] = field(default_factory=list)  # the messages of `log_fallback`

    def log_fallback(self, message: str) -> None:
        """Log a fallback to a slower path, once in a run, and keep it for the history."""
        if message not in self.fallbacks:
            self.fallbacks.append(message)
            logger.warning(message)

    def example(self, draw: Callable[..., Tensor]) -> Any:
        """Return two samples to try the networks on, on the device, made by `draw`, such as `torch.zeros`.

        Where inputs are ids, or several, they are samples of the data, since drawn ones could be invalid.
        """
        if self.data.ids or is_several(self.shape):
            return move_inputs(self.data.example(dtype=self.dtype), self.device)
        return draw(2, *self.shape, dtype=self.dtype, device=self.device)

    def teach(self, targets: Tensor, inputs: Inputs) -> Tensor:
        """Return the targets of a training batch with the teacher's beside them; without a teacher, as they are."""
        if self.teaching is None:
            return targets
        with self.autocast():
            return self.teaching.add_to(targets, inputs).to(self.loss_dtype)

    def member_seed(self, purpose: str, member: Member, *numbers: int) -> int:
        """Derive the seed of a member's own random draws: its "order", "crops" or "dropout"."""
        return derive_seed(self.seed, purpose, member.number, *numbers)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Return the dtype in which losses are computed: the networks', but at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def uses_bfloat16(self) -> bool:
        """Tell whether forward and backward passes compute in bfloat16."""
        return self.execution.precision_on(self.device) == "bfloat16"

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of forward passes; one that does nothing in float32."""
        if not self.uses_bfloat16:
            return nullcontext()
        # Without the cache of cast weights: a CUDA graph would keep those of the step that was captured.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)


@dataclass(eq=False)
class Member:
    """A network in training, its best weights and the state of its optimizer."""

    network: nn.Module
    number: int  # with the run's seed it determines the order of batches, the crops and the dropout
    best: dict[str, Tensor]  # a copy of the weights of the best epoch
    optimizer_state: OptimizerState = field(default_factory=OptimizerState)
    average: dict[str, Tensor] = field(default_factory=dict)  # of its trained parameters, where the recipe averages
    best_score: float = -math.inf
    best_epoch: int = -1  # the last epoch with that score
    last_improvement: int = -1  # the last epoch with a better score than all before
    stopped: str | None = None  # why it stopped before the last epoch


class Engine(Protocol):
    """A way to compute epochs."""

    name: str  # "loop" or "graph"

    def prepare(self, active: Sequence[Member]) -> None:
        """Prepare to train these members, and build the optimizers that they need in this engine.

        Raises `CaptureError` if that is impossible; then neither the members nor their optimizers have changed.
        """
        ...

    def train_epoch(self, active: Sequence[Member], epoch: int, advance: Callable[[], None]) -> list[float]:
        """Train for one pass over the training split; return the mean loss of each member."""
        ...

    def validate(self, active: Sequence[Member]) -> list[Result]:
        """Return loss and accuracy of each member on the validation split."""
        ...
