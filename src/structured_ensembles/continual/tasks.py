"""Task and split_tasks(): a data set as a sequence of tasks with disjoint classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from structured_ensembles.common.checks import check_flags, check_seed
from structured_ensembles.common.inputs import join_batches, move_inputs, select_rows
from structured_ensembles.data import Data, Split, load_data
from structured_ensembles.data.dataset import SplitName, check_data
from structured_ensembles.data.splits import Batch, IndexedSplit

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


class Benchmark(NamedTuple):
    """Usual number of tasks of a data set, and of epochs per task."""

    tasks: int
    epochs: int


# The paper's benchmarks, Tiny ImageNet of its code, and the digits, which need no download.
BENCHMARKS = {
    "digits": Benchmark(5, 30),
    "mnist": Benchmark(5, 10),
    "cifar10": Benchmark(5, 30),
    "cifar100": Benchmark(10, 50),
    "tiny-imagenet": Benchmark(10, 50),
}


@dataclass(frozen=True)
class Task:
    """Classes of a data set that are learned together.

    number: identifies the task, from 0. classes: the labels of its classes in the full data set.
    data: its samples, labelled 0, 1, … within the task.
    """

    number: int
    classes: tuple[int, ...]
    data: Data

    def __str__(self) -> str:
        return f"task {self.number}: {', '.join(self.data.classes)}"


def split_tasks(data: Data, tasks: int, shuffle_labels: bool = False, seed: int = 0) -> list[Task]:
    """Split a classification into `tasks` tasks with equally many classes each.

    Consecutive labels form a task; with `shuffle_labels` they are permuted first, with `seed`. The images of data in
    memory are not copied.
    """
    check_data(data)
    check_flags(shuffle_labels=shuffle_labels)
    if data.task != "classification":
        raise ValueError("data must be a classification: a regression has no classes to split")
    if isinstance(tasks, bool) or not isinstance(tasks, int) or tasks < 1 or data.num_classes % tasks:
        fitting = [count for count in range(1, data.num_classes + 1) if data.num_classes % count == 0]
        raise ValueError(f"tasks must divide the {data.num_classes} classes: one of {fitting}, not {tasks!r}")
    labels = torch.arange(data.num_classes)
    if shuffle_labels:
        labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(check_seed(seed)))]
    groups = labels.view(tasks, -1)
    within = torch.empty_like(labels)  # the label of every class within its task
    within[groups] = torch.arange(groups.shape[1]).expand_as(groups)
    result = []
    for number, group in enumerate(groups):
        task_data = _restrict_data(data, group, within, f"{data.name}, task {number} of {tasks}")
        result.append(Task(number, tuple(group.tolist()), task_data))
    return result


def check_samples(tasks: Sequence[Task]) -> None:
    """Raise a ValueError unless every task has samples to learn from and a test split."""
    for task in tasks:
        if not len(task.data.train):
            raise ValueError(f"task {task.number} ({', '.join(task.data.classes)}) has no samples to learn from")
        task.data.split("test")


def make_task(data: Data, number: int) -> Task:
    """Make a task of a data set: its classes are those that its samples have, labelled 0, 1, … within the task.

    Data with all of their classes stay as they are; of others, such as the digits 3 and 7 of ten, the rest is left out.
    """
    check_data(data)
    if data.task != "classification":
        raise ValueError(
            f"data must be a classification, with whole numbers as labels, to be a task, not a {data.task}"
        )
    splits = [split for split in (data.train, data.validation, data.test) if split is not None]
    labels = torch.cat([_list_labels(split) for split in splits]).unique()
    if len(labels) and (int(labels[0]) < 0 or int(labels[-1]) >= data.num_classes):
        raise ValueError(f"labels of data must be from 0 to {data.num_classes - 1}, not {labels.tolist()}")
    if len(labels) in (0, data.num_classes):
        return Task(number, tuple(range(data.num_classes)), data)
    within = torch.zeros(data.num_classes, dtype=torch.int64)
    within[labels] = torch.arange(len(labels))
    return Task(number, tuple(labels.tolist()), _restrict_data(data, labels, within, data.name))


def _list_labels(split: Split) -> Tensor:
    """List the labels of a split, some of them several times; those of a streamed one take a pass over it."""
    if isinstance(split, IndexedSplit):
        return split.targets[split.index].cpu().unique()
    return torch.cat(
        [targets.cpu().unique() for _, targets in split.batches(512)] or [torch.empty(0, dtype=torch.int64)]
    )


def _restrict_data(data: Data, labels: Tensor, within: Tensor, name: str) -> Data:
    """Restrict data to some classes. within: the new label of every label."""
    return replace(
        data,
        classes=tuple(data.classes[label] for label in labels.tolist()),
        train=_select_classes(data.train, labels, within),
        validation=_select_classes_if_any(data.validation, labels, within),
        test=_select_classes_if_any(data.test, labels, within),
        name=name,
    )


def load_tasks(
    name: str,
    root: str | Path | None = None,
    *,
    tasks: int | None = None,
    shuffle_labels: bool = False,
    seed: int = 0,
) -> list[Task]:
    """Load a benchmark by the name of its data set: Split-MNIST is `load_tasks("mnist")`, five tasks of two classes.

    tasks: by default the benchmark's number. The other arguments are those of `load_data` and `split_tasks`.
    """
    if tasks is None and name not in BENCHMARKS:
        raise ValueError(f"tasks must be given for {name!r}: only {', '.join(BENCHMARKS)} have a usual number")
    tasks = BENCHMARKS[name].tasks if tasks is None else tasks
    return split_tasks(load_data(name, root, seed=seed), tasks, shuffle_labels, seed)


def _select_classes(split: Split, classes: Tensor, within: Tensor) -> Split:
    """Select the samples of some classes and relabel them. within: the new label of every label."""
    if not isinstance(split, IndexedSplit):
        return StreamedClasses.of(split, classes, within)
    device = split.targets.device
    chosen = torch.isin(split.targets[split.index], classes.to(device))
    return replace(split, targets=within.to(device)[split.targets], index=split.index[chosen])  # type: ignore[type-var]


def _select_classes_if_any(split: Split | None, classes: Tensor, within: Tensor) -> Split | None:
    """Select samples as `_select_classes` does; return None if there is no split, or no sample."""
    selected = None if split is None else _select_classes(split, classes, within)
    return selected if selected is not None and len(selected) else None


def _join_batches(batches: Sequence[Batch]) -> Batch:
    return join_batches([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])


@dataclass(frozen=True)
class StreamedClasses:
    """Streamed split restricted to some classes.

    classes: the labels to keep. within: the new label of every label. samples: how many there are.
    """

    split: Split
    classes: Tensor
    within: Tensor
    samples: int

    @classmethod
    def of(cls, split: Split, classes: Tensor, within: Tensor) -> StreamedClasses:
        """Restrict a split to some classes; counting their samples takes a pass over it."""
        return cls(split, classes, within, sum(int(torch.isin(y, classes).sum()) for _, y in split.batches(512)))

    def __len__(self) -> int:
        return self.samples

    def num_batches(self, size: int) -> int:
        """Return the number of batches of this size."""
        return -(-self.samples // size)

    def batches(
        self, size: int, seed: int | tuple[int, ...] | None = None, device: torch.device | str = "cpu"
    ) -> Iterator[Batch]:
        """Yield batches of this size, the last one with the rest."""
        collected: list[Batch] = []
        for inputs, targets in self.split.batches(size, seed):
            chosen = torch.isin(targets, self.classes)
            collected.append((select_rows(inputs, chosen), self.within[targets[chosen]]))
            if sum(len(labels) for _, labels in collected) >= size:
                x, y = _join_batches(collected)
                complete = len(y) - len(y) % size
                for start in range(0, complete, size):
                    rows = slice(start, start + size)
                    yield move_inputs(select_rows(x, rows), device), y[rows].to(device)
                collected = [(select_rows(x, slice(complete, None)), y[complete:])]
        x, y = _join_batches(collected)
        if len(y):
            yield move_inputs(x, device), y.to(device)

    def to(self, device: torch.device | str) -> StreamedClasses:
        """Return itself: batches are moved one by one."""
        return self
