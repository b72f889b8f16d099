"""run_sequence(): the continual protocol, which tests all tasks so far after learning each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from structured_ensembles.common.checks import check_type
from structured_ensembles.continual.learner import Learner, find_surest_task, find_tasks_always_sure
from structured_ensembles.continual.matrix import AccuracyMatrix
from structured_ensembles.continual.storage import resume
from structured_ensembles.continual.tasks import Task, check_samples
from structured_ensembles.data.splits import fingerprint_split
from structured_ensembles.evaluation.predictions import gather_foreign_logits, gather_predictions
from structured_ensembles.storage.fingerprints import digest_json, digest_module
from structured_ensembles.storage.run_files import damaged_file_error, read_json, write_json

LEARNER, PROGRESS = "learner.safetensors", "matrix.json"


def run_sequence(learner: Learner, tasks: Sequence[Task], folder: str | Path | None = None) -> AccuracyMatrix:
    """Let `learner` learn the tasks in turn, and test it on all tasks so far after each.

    folder: where to keep the learner and the accuracies after every task; a stopped run resumes from there, to the same
        numbers. The learner must then be built as it was the first time.
    """
    check_type("learner", learner, Learner, "such as StructuredLearner(backbone)")
    if not isinstance(tasks, Sequence) or not tasks or not all(isinstance(task, Task) for task in tasks):
        raise ValueError("tasks must hold at least one task, as a list of Task such as split_tasks() returns")
    check_samples(tasks)
    numbers = [task.number for task in tasks]
    known = set(numbers) & set(learner.learned)
    if known or len(set(numbers)) < len(numbers):
        raise ValueError(f"tasks must be new to the learner, and different: {numbers}, known are {[*learner.learned]}")
    path = None if folder is None else Path(folder)
    identity = "" if path is None else _fingerprint(learner, tasks)
    rows = [] if path is None else _resume(learner, tasks, path, identity)
    for index, task in enumerate(tasks):
        if task.number not in learner.learned:
            learner.learn(task)
            if path is not None:
                _write_progress(path, identity, rows)  # first: it says which run the learner belongs to
                learner.save(path / LEARNER)
        if index >= len(rows):
            # After a kill between the two files the learner is one task ahead: this row is computed from it again.
            rows.append([measure_accuracy(learner, tested) for tested in tasks[: index + 1]])
            if path is not None:
                _write_progress(path, identity, rows)
    unaided, inferred = measure_without_identity(learner, tasks)
    return AccuracyMatrix(tuple(map(tuple, rows)), unaided, inferred, tuple(numbers))


def measure_accuracy(learner: Learner, task: Task) -> float:
    """Measure the accuracy on the task's test split, given the task."""
    logits, targets = gather_predictions(learner.ensemble(task.number), task.data.split("test"))
    return float((logits[0].argmax(-1) == targets).double().mean())


def measure_without_identity(learner: Learner, tasks: Sequence[Task]) -> tuple[float, float] | tuple[None, None]:
    """Measure accuracy and task inference when the learner has to infer the task by `Learner.infer_task`.

    Both are shares of all test samples: correctly classified, and assigned to the right task. None where a task has one
    class only, which cannot be inferred.
    """
    if find_tasks_always_sure(learner.learned):
        return None, None
    right = inferred = samples = 0
    for task in tasks:
        split = task.data.split("test")
        (logits,), targets = gather_predictions(learner.ensemble(task.number), split)
        by_task = {
            number: logits if number == task.number else gather_foreign_logits(learner.ensemble(number), split)[0]
            for number in learner.learned
        }
        is_inferred = find_surest_task(by_task) == task.number
        right += int((is_inferred & (logits.argmax(-1) == targets)).sum())
        inferred += int(is_inferred.sum())
        samples += len(targets)
    return right / samples, inferred / samples


def _resume(learner: Learner, tasks: Sequence[Task], folder: Path, identity: str) -> list[list[float]]:
    """Return the accuracies of an earlier run in this folder, and bring the learner to its state."""
    path, remedy = folder / PROGRESS, "delete the folder to start anew"
    if not path.exists():
        return []
    progress = read_json(path, remedy)
    if progress.get("identity") != identity:
        raise ValueError(
            f"folder {folder} holds a run with another learner, backbone or tasks: choose another, or delete it; a "
            "backbone made without torch.manual_seed has other weights every time"
        )
    try:
        rows = [[_check_accuracy(value) for value in row] for row in progress["rows"]]
        if any(len(row) != number for number, row in enumerate(rows, start=1)):
            raise ValueError("its rows are not a lower triangle")
    except KeyError as error:
        raise damaged_file_error(path, ValueError(f"it has no {error}"), remedy) from error
    except (ValueError, TypeError) as error:
        raise damaged_file_error(path, error, remedy) from error
    if (folder / LEARNER).exists():
        resume(learner, folder / LEARNER, max(math.prod(task.data.shape) for task in tasks))
    learned = sum(task.number in learner.learned for task in tasks)  # it may know others from before
    if learned - len(rows) not in (0, 1):
        raise damaged_file_error(path, ValueError(f"it is of {len(rows)} tasks, the learner of {learned}"), remedy)
    return rows


def _check_accuracy(value: Any) -> float:
    """Return an accuracy of a file; raise a ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"an accuracy cannot be {value!r:.80}")
    return float(value)


def _write_progress(folder: Path, identity: str, rows: Sequence[Sequence[float]]) -> None:
    """Write the identity of the run and its accuracies so far."""
    write_json(folder / PROGRESS, {"identity": identity, "rows": rows})


def _fingerprint(learner: Learner, tasks: Sequence[Task]) -> str:
    """Compute the fingerprint of a run, by which it is resumed: method, settings, weights, tasks."""
    descriptions = [
        [task.number, task.classes, task.data.name, task.data.shape]
        + [
            fingerprint_split(split)
            for split in (task.data.train, task.data.validation, task.data.test)
            if split is not None
        ]
        for task in tasks
    ]
    return digest_json([learner.method, learner.settings, descriptions, digest_module(learner.backbone)])
