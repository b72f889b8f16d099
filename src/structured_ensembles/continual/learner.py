"""Learner: what all continual learners share; what one of them does with a task is in its own file."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.common.checks import check_choice, check_type, checked_seed
from structured_ensembles.common.devices import Device, pick_device
from structured_ensembles.common.inputs import is_several
from structured_ensembles.continual.fitting import derived, fit
from structured_ensembles.continual.heads import HeadKind, new_head, num_features
from structured_ensembles.continual.learned import Learned
from structured_ensembles.continual.memory import Memory, count
from structured_ensembles.continual.storage import load, save
from structured_ensembles.continual.tasks import SPLITS, Task
from structured_ensembles.data import Data
from structured_ensembles.data.arrays import check_labels
from structured_ensembles.data.augmentation import Augmentation
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.networks.copying import clone_of
from structured_ensembles.prediction.combination import entropy_of
from structured_ensembles.training import Recipe
from structured_ensembles.training.recipe import Optimizer


class Common(TypedDict, total=False):
    """The arguments that all learners take; see `Learner`."""

    epochs: int
    seed: int
    head: HeadKind
    optimizer: Optimizer
    rate: float
    momentum: float
    weight_decay: float
    batch_size: int
    augmentation: Augmentation
    device: Device
    quiet: bool


LEARNERS: dict[str, type[Learner]] = {}  # by the method that files name; the room's `__init__` lists them


class Learner(ABC):
    """A backbone that learns one task after the other, with one head for each.

    backbone: maps inputs (batch, …) to pooled features (batch, features); it is copied, never changed.
    epochs, optimizer, rate, momentum (of "sgd"), weight_decay, batch_size: how a task is trained; the optimizer is new
        for every task, and all its batches are of equal size, give or take one, and at most `batch_size`.
    augmentation: "auto" crops and flips colour images.
    head: "linear", or the authors' three layers ("paper").
    seed: of everything random; with another number of threads the last digits may differ.
    """

    method: ClassVar[str]

    def __init__(
        self,
        backbone: nn.Module,
        *,
        epochs: int = 30,
        seed: int = 0,
        head: HeadKind = "linear",
        optimizer: Optimizer = "adam",
        rate: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        batch_size: int = 128,
        augmentation: Augmentation = "auto",
        device: Device = "auto",
        quiet: bool = False,
    ) -> None:
        check_type("backbone", backbone, nn.Module)
        seed = checked_seed(seed)
        if not any(parameter.is_floating_point() for parameter in backbone.parameters()):
            raise ValueError("backbone has no parameters to learn")
        check_choice("head", head, get_args(HeadKind))
        self.recipe = Recipe(
            epochs=epochs,
            batch_size=batch_size,
            optimizer=optimizer,
            rate=rate,
            momentum=momentum,
            nesterov=False,
            weight_decay=weight_decay,
            schedule="constant",
            warmup=0.0,
            keep="last",
            augmentation=augmentation,
        )
        self.head: HeadKind = head
        self.seed = seed
        self.quiet = quiet
        self.device = pick_device(device, backbone)
        self.backbone = clone_of(backbone).to(self.device)
        self.heads: dict[int, nn.Module] = {}
        self.learned: dict[int, Learned] = {}  # in the order of learning
        self.settings: dict[str, Any] = {
            name: getattr(self.recipe, name)
            for name in ("epochs", "optimizer", "rate", "momentum", "weight_decay", "batch_size", "augmentation")
        } | {"seed": seed, "head": head}

    def __repr__(self) -> str:
        tasks = ", ".join(map(str, self.learned)) or "none yet"
        return f"{type(self).__name__}({type(self.backbone).__name__}, tasks learned: {tasks})"

    # Learning -------------------------------------------------------------------------------------------------------

    def learn(self, task: Task) -> None:
        """Learn a task. If anything goes wrong, or an interrupt comes, the learner is as it was before."""
        self._check(task)
        changed = self._copy()
        data = task.data.to(self.device)
        example = self._example(data.shape)
        features = num_features(self.backbone, example)
        head = new_head(self.head, features, data.num_classes, derived(self.seed, task.number, 1)).to(example)
        head, losses = changed._learn(task.number, data, head)
        changed.heads[task.number] = head.eval()
        normalization: Any = data.normalization
        changed.learned[task.number] = Learned(
            task.classes, data.classes, data.shape, normalization, tuple(losses), data.pixels
        )
        self._become(changed)

    def _copy(self) -> Self:
        """Copy the learner so that whatever `_learn` or `forget` changes in the copy leaves the original as it is.

        Past heads are shared: nothing changes them any more.
        """
        copied = copy.copy(self)
        copied.heads, copied.learned = dict(self.heads), dict(self.learned)
        return copied

    def _become(self, changed: Self) -> None:
        """Take over the state of a changed copy."""
        self.__dict__ = changed.__dict__  # one assignment: an interrupt comes before it, or after it

    @abstractmethod
    def _learn(self, number: int, data: Data, head: nn.Module) -> tuple[nn.Module, list[float]]:
        """Train on `data`, with a new head on all features; returns the head to keep and the losses.

        It is called on a copy of the learner, see `_copy`.
        """

    def _example(self, shape: tuple[int, ...]) -> Tensor:
        """A batch of inputs of this shape, as the backbone takes them."""
        parameter = next(self.backbone.parameters())
        return torch.zeros(2, *shape, device=self.device, dtype=parameter.dtype)

    @abstractmethod
    def _network(self, number: int) -> nn.Module:
        """The network of a learned task: (batch, …) to logits (batch, classes)."""

    def _fit(
        self,
        network: nn.Module,
        data: Data,
        number: int,
        after_step: Callable[[], None] | None = None,
        penalty: Callable[[], Tensor] | None = None,
    ) -> list[float]:
        """Train the network of a task as the arguments of the learner say; returns the losses."""
        return fit(
            network,
            data,
            self.recipe,
            (self.seed, number),
            self.device,
            after_step=after_step,
            penalty=penalty,
            description=f"task {number}",
            quiet=self.quiet,
        )

    # Prediction -----------------------------------------------------------------------------------------------------

    def network(self, task: int) -> nn.Module:
        """Return a copy of a task's network as an ordinary module: normalised inputs (batch, …) to logits.

        Whatever is done to it, the learner stays as it is.
        """
        self._check_known(task)
        return clone_of(self._network(task)).eval()

    def ensemble(self, task: int) -> Ensemble:
        """Return a copy of a task's network as an ensemble of one, such as `se.evaluate` takes."""
        return self._ensemble(task, self.network(task))

    def _ensemble(self, task: int, network: nn.Module) -> Ensemble:
        known = self.learned[task]
        ensemble = Ensemble([network], classes=known.names, normalization=known.normalization).eval()
        ensemble.input_shape, ensemble.pixels = known.shape, known.pixels
        return ensemble

    def logits(self, x: Any, task: int, batch_size: int = 512) -> Tensor:
        """Logits (samples, classes of the task) for arrays, tensors, datasets or loaders, pixels as users have them."""
        self._check_known(task)
        return self._ensemble(task, self._network(task).eval()).logits(x, batch_size)[0]  # no copy: it only looks

    def predict(self, x: Any, task: int, batch_size: int = 512) -> Tensor:
        """Labels within the task, (samples,)."""
        return self.logits(x, task, batch_size).argmax(-1)

    def infer_task(self, x: Any, together: bool = False, batch_size: int = 512) -> Tensor:
        """Which task each sample is from, (samples,): the one whose head is surest, by the entropy over log(classes).

        together: all samples are from one task, that of the lowest mean entropy.
        """
        if not self.learned:
            raise ValueError("no task has been learned yet")
        return surest({number: self.logits(x, number, batch_size) for number in self.learned}, together)

    # Size and storage -----------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """What it stores: floats of the backbone, of the tasks and of the heads, and bits of masks."""
        return Memory(backbone=count(self.backbone), heads=sum(map(count, self.heads.values())))

    def save(self, path: str | Path) -> int:
        """Write one safetensors file without pickle; returns its size in bytes."""
        return save(self, path)

    @classmethod
    def load(
        cls, path: str | Path, backbone: nn.Module | None = None, trust_code: bool = False, device: Device = "auto"
    ) -> Self:
        """Read a learner that `save` wrote; it can go on learning. See `storage.load`."""
        methods = {name: method for name, method in LEARNERS.items() if issubclass(method, cls)}
        return load(path, methods, cls.__name__, backbone, trust_code, device)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What the method itself has to save: tensors, and what can be written as JSON."""
        return {}, {}

    def _restore(self, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None:  # noqa: B027, many have nothing
        """The inverse of `_state`; backbone, heads and tasks are there already."""

    # Checks ---------------------------------------------------------------------------------------------------------

    def _check(self, task: Task) -> None:
        if not isinstance(task, Task):
            raise TypeError(f"task must be a Task, such as split_tasks() gives, not {type(task).__name__}")
        if not isinstance(task.number, int) or task.number < 0:
            raise ValueError(f"task must have a number of at least 0, not {task.number!r}")
        if task.number in self.learned:
            raise ValueError(f"task {task.number} has been learned already: {', '.join(map(str, self.learned))}")
        if task.data.task != "classification":
            raise ValueError(f"task {task.number} must be a classification, not a {task.data.task}")
        if is_several(task.data.shape):
            raise ValueError(f"task {task.number} must have one input: learners take no tuples or dicts of several")
        if task.data.ids:
            raise ValueError(f"task {task.number} must have images or other numbers as inputs, not ids")
        for name in SPLITS:
            split = getattr(task.data, name)
            if isinstance(split, TensorSplit) and len(split):
                labels = split.targets[split.index]
                check_labels(f"the {name} labels of task {task.number}", labels, task.data.num_classes)
        if len(task.data.train) == 0:
            raise ValueError(f"task {task.number} has no samples to learn from")
        expected = next((known.shape for known in self.learned.values()), task.data.shape)
        if task.data.shape != expected:
            raise ValueError(
                f"task {task.number} has inputs of shape {task.data.shape}, but the learner has learned on {expected}"
            )

    def _check_known(self, task: int) -> Learned:
        if task not in self.learned:
            known = ", ".join(map(str, self.learned)) or "none yet"
            raise ValueError(f"task must be one that has been learned ({known}), not {task!r}")
        return self.learned[task]


def surest(logits: Mapping[int, Tensor], together: bool = False) -> Tensor:
    """The task whose logits (samples, classes of the task) have the lowest relative entropy, (samples,)."""
    classes = [max(own.shape[-1], 2) for own in logits.values()]
    entropies = [entropy_of(own.softmax(-1)) / math.log(k) for own, k in zip(logits.values(), classes, strict=True)]
    every = torch.stack(entropies)  # (tasks, samples)
    if together:
        every = every.mean(1, keepdim=True).expand_as(every)
    return torch.tensor(list(logits))[every.argmin(0)]
