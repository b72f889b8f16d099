"""Learner: the common base of the continual learners, each of which has its own file."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.common.checks import check_choice, check_flags, check_seed, check_type
from structured_ensembles.common.devices import Device, pick_device
from structured_ensembles.common.inputs import is_several
from structured_ensembles.continual.fitting import fit, fold_seed
from structured_ensembles.continual.heads import HeadKind, count_features, create_head
from structured_ensembles.continual.learned import Learned
from structured_ensembles.continual.memory import Memory, count_floats
from structured_ensembles.continual.storage import load, save
from structured_ensembles.continual.tasks import SPLITS, Task, make_task
from structured_ensembles.data import Data
from structured_ensembles.data.arrays import check_labels
from structured_ensembles.data.augmentation import Augmentation
from structured_ensembles.data.dataset import check_data
from structured_ensembles.data.splits import IndexedSplit
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.networks.copying import clone_model
from structured_ensembles.prediction.combination import entropy_of
from structured_ensembles.prediction.undecided import check_decided
from structured_ensembles.training import Recipe
from structured_ensembles.training.recipe import Optimizer


class Common(TypedDict, total=False):
    """Arguments that all learners take; see `Learner`."""

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


LEARNERS: dict[str, type[Learner]] = {}  # by method, as files name it; filled by the package's `__init__`


class Learner(ABC):
    """Backbone that learns one task after the other, with one head for each.

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
        seed = check_seed(seed)
        if not any(parameter.is_floating_point() for parameter in backbone.parameters()):
            raise ValueError("backbone has no parameters to learn")
        check_choice("head", head, get_args(HeadKind))
        check_flags(quiet=quiet)
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
        self.backbone = clone_model(backbone).to(self.device)
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

    def learn(self, task: Task | Data) -> None:
        """Learn a task; on an error or an interrupt the learner stays as it was.

        task: as `split_tasks` gives them, or data: then it is the next number, and its classes are those of the labels.
        `learned[number].classes` has the labels that predictions 0, 1, … within the task stand for.
        """
        if isinstance(task, Data):
            task = make_task(task, 1 + max(self.learned, default=-1))
        self._check(task)
        changed = self._copy()
        # A new head has learned nothing: by its outputs, no search can tell a normalisation that fits better.
        data = replace(task.data.to(self.device), normalization_settled=True)
        example = self._example(data.shape)
        features = count_features(self.backbone, example)
        head = create_head(self.head, features, data.num_classes, fold_seed(self.seed, task.number, 1)).to(example)
        head, losses = changed._learn(task.number, data, head)
        changed.heads[task.number] = head.eval()
        normalization: Any = data.normalization
        changed.learned[task.number] = Learned(
            task.classes, data.classes, data.shape, normalization, tuple(losses), data.pixels
        )
        self._become(changed)

    def _copy(self) -> Self:
        """Copy the learner, so that `_learn` and `forget` can change the copy and leave the original alone.

        Past heads are shared, as they never change.
        """
        copied = copy.copy(self)
        copied.heads, copied.learned = dict(self.heads), dict(self.learned)
        return copied

    def _become(self, changed: Self) -> None:
        """Replace the state by that of a changed copy."""
        self.__dict__ = changed.__dict__  # a single assignment is safe against interrupts

    @abstractmethod
    def _learn(self, number: int, data: Data, head: nn.Module) -> tuple[nn.Module, list[float]]:
        """Train on `data`, with a new head on all features; return the head to keep and the losses.

        It is called on a copy of the learner, see `_copy`.
        """

    def _example(self, shape: tuple[int, ...]) -> Tensor:
        """Return a batch of zeros of this shape, as the backbone takes it."""
        parameter = next(self.backbone.parameters())
        return torch.zeros(2, *shape, device=self.device, dtype=parameter.dtype)

    @abstractmethod
    def _network(self, number: int) -> nn.Module:
        """Return the network of a learned task, which maps (batch, …) to logits (batch, classes)."""

    def _fit(
        self,
        network: nn.Module,
        data: Data,
        number: int,
        after_step: Callable[[], None] | None = None,
        penalty: Callable[[], Tensor] | None = None,
    ) -> list[float]:
        """Train the network of a task by the learner's recipe; return the losses."""
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

        Changes of the copy do not affect the learner.
        """
        self._check_known(task)
        return clone_model(self._network(task)).eval()

    def ensemble(self, task: int) -> Ensemble:
        """Return a copy of a task's network as an ensemble of one, such as `se.evaluate` takes."""
        return self._ensemble(task, self.network(task))

    def _ensemble(self, task: int, network: nn.Module) -> Ensemble:
        learned = self.learned[task]
        ensemble = Ensemble([network], classes=learned.names, normalization=learned.normalization).eval()
        ensemble.input_shape, ensemble.pixels = learned.shape, learned.pixels
        return ensemble

    def logits(self, x: Any, task: int, batch_size: int = 512) -> Tensor:
        """Compute logits (samples, classes of the task) of arrays, tensors, datasets or loaders, not yet normalised."""
        self._check_known(task)
        return self._ensemble(task, self._network(task).eval()).logits(x, batch_size)[0]  # no copy: it is not changed

    def predict(self, x: Any, task: int, batch_size: int = 512) -> Tensor:
        """Predict labels within the task, (samples,)."""
        return check_decided(self.logits(x, task, batch_size), "predict").argmax(-1)

    def infer_task(self, x: Any, together: bool = False, batch_size: int = 512) -> Tensor:
        """Infer the task of each sample, (samples,): the one whose head is surest, by the entropy over log(classes).

        together: all samples are from one task, that of the lowest mean entropy. A task of one class, whose head is
        always sure, cannot be told from others.
        """
        check_flags(together=together)
        if not self.learned:
            raise ValueError("no task has been learned yet: call learn(task) first")
        if alone := find_tasks_always_sure(self.learned):
            raise ValueError(
                f"the task of x cannot be inferred: task {alone[0]} has a single class, of which its head is always "
                "sure; give the task to predict(x, task=…)"
            )
        logits = {number: self.logits(x, number, batch_size) for number in self.learned}
        for outputs in logits.values():
            check_decided(outputs, "infer_task")
        return find_surest_task(logits, together)

    # Size and storage -----------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Count what it stores: floats of the backbone, of the tasks and of the heads, and bits of masks."""
        return Memory(backbone=count_floats(self.backbone), heads=sum(map(count_floats, self.heads.values())))

    def save(self, path: str | Path) -> int:
        """Write one safetensors file without pickle; return its size in bytes."""
        return save(self, path)

    @classmethod
    def load(
        cls, path: str | Path, backbone: nn.Module | None = None, trust_code: bool = False, device: Device = "auto"
    ) -> Self:
        """Read a learner that `save` wrote and that can learn further tasks. See `storage.load`."""
        methods = {name: method for name, method in LEARNERS.items() if issubclass(method, cls)}
        if hasattr(cls, "method"):  # also a user's own class
            methods[cls.method] = cls
        return load(path, methods, cls.__name__, backbone, trust_code, device)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what the method adds to the file: tensors, and details for JSON."""
        return {}, {}

    def _restore(self, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None:  # noqa: B027, many have nothing
        """Restore what `_state` returned, after backbone, heads and tasks were restored."""

    # Checks ---------------------------------------------------------------------------------------------------------

    def _check(self, task: Task) -> None:
        """Raise an error unless the task is new and the learner can learn it."""
        if not isinstance(task, Task):
            raise TypeError(f"task must be a Data, or a Task such as split_tasks() returns, not {type(task).__name__}")
        check_data(task.data, "task.data")
        if not isinstance(task.number, int) or task.number < 0:
            raise ValueError(f"task must have a number of at least 0, not {task.number!r}")
        if task.number in self.learned:
            raise ValueError(
                f"task must be new, but {task.number} has been learned already: {', '.join(map(str, self.learned))}"
            )
        if task.data.task != "classification":
            raise ValueError(f"task {task.number} must be a classification, not a {task.data.task}")
        if len(task.classes) != task.data.num_classes:
            raise ValueError(
                f"task {task.number} must have as many classes as its data, {task.data.num_classes}, not {task.classes}"
            )
        if is_several(task.data.shape):
            raise ValueError(f"task {task.number} must have one input, not a tuple or dict of several")
        if task.data.ids:
            raise ValueError(f"task {task.number} must have images or other numbers as inputs, not ids")
        for name in SPLITS:
            split = getattr(task.data, name)
            if isinstance(split, IndexedSplit) and len(split):
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
        """Return the description of a learned task; raise a ValueError for any other."""
        if task not in self.learned:
            known = ", ".join(map(str, self.learned)) or "none yet"
            raise ValueError(f"task must be one that has been learned ({known}), not {task!r}")
        return self.learned[task]


def find_tasks_always_sure(learned: Mapping[int, Learned]) -> list[int]:
    """Find the tasks of one class, whose heads are sure of any input, where there are others to tell them from."""
    return [number for number, known in learned.items() if len(known.names) == 1 and len(learned) > 1]


def find_surest_task(logits: Mapping[int, Tensor], together: bool = False) -> Tensor:
    """Find the task whose logits (samples, classes of the task) have the lowest relative entropy, (samples,)."""
    relative = [
        entropy_of(task_logits.softmax(-1)) / math.log(max(task_logits.shape[-1], 2)) for task_logits in logits.values()
    ]
    entropies = torch.stack(relative)  # (tasks, samples)
    if together:
        entropies = entropies.mean(1, keepdim=True).expand_as(entropies)
    return torch.tensor(list(logits))[entropies.argmin(0)]
