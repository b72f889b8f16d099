"""run_sequence(): the protocol, task after task, with the accuracy on all tasks so far after each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from structured_ensembles.continual.learner import Learner, surest
from structured_ensembles.continual.matrix import AccuracyMatrix
from structured_ensembles.continual.storage import resume
from structured_ensembles.continual.tasks import Task
from structured_ensembles.data.splits import fingerprint_split
from structured_ensembles.evaluation.predictions import predictions
from structured_ensembles.storage.fingerprints import digest_of, module_parts
from structured_ensembles.storage.run_files import damaged, read_json, write_json

LEARNER, PROGRESS = "learner.safetensors", "matrix.json"


def run_sequence(learner: Learner, tasks: Sequence[Task], folder: str | Path | None = None) -> AccuracyMatrix:
    """Let `learner` learn the tasks in turn, and test it on all of them so far after each.

    folder: where to keep the learner and the accuracies after every task; a run that was stopped goes on from there, to
        the same numbers. The learner must then be made as it was the first time.
    """
    if not tasks:
        raise ValueError("tasks must hold at least one task")
    for task in tasks:
        task.data.split("test")
    numbers = [task.number for task in tasks]
    known = set(numbers) & set(learner.learned)
    if known or len(set(numbers)) < len(numbers):
        raise ValueError(f"tasks must be new to the learner, and different: {numbers}, known are {[*learner.learned]}")
    where = None if folder is None else Path(folder)
    identity = "" if where is None else _identity(learner, tasks)
    rows = [] if where is None else _resume(learner, tasks, where, identity)
    for index, task in enumerate(tasks):
        if task.number not in learner.learned:
            learner.learn(task)
            if where is not None:
                _write_progress(where, identity, rows)  # first: without it, nobody knows whose the learner is
                learner.save(where / LEARNER)
        if index >= len(rows):
            # After a kill between the two files the learner is one task ahead: this row is computed from it, as before.
            rows.append([accuracy_on(learner, own) for own in tasks[: index + 1]])
            if where is not None:
                _write_progress(where, identity, rows)
    unaided, inferred = without_identity(learner, tasks)
    return AccuracyMatrix(tuple(map(tuple, rows)), unaided, inferred)


def accuracy_on(learner: Learner, task: Task) -> float:
    """Of the task's test split, with its identity given."""
    logits, targets = predictions(learner.ensemble(task.number), task.data.split("test"))
    return float((logits[0].argmax(-1) == targets).double().mean())


def without_identity(learner: Learner, tasks: Sequence[Task]) -> tuple[float, float]:
    """The share of all test samples that are classified rightly when the learner has to infer the task, and of those
    whose task it finds; the rule is that of `Learner.infer_task`.
    """
    right = found = samples = 0
    for task in tasks:
        pairs = {number: predictions(learner.ensemble(number), task.data.split("test")) for number in learner.learned}
        own = surest({number: logits[0] for number, (logits, _) in pairs.items()}) == task.number
        logits, targets = pairs[task.number]
        right += int((own & (logits[0].argmax(-1) == targets)).sum())
        found += int(own.sum())
        samples += len(targets)
    return right / samples, found / samples


def _resume(learner: Learner, tasks: Sequence[Task], folder: Path, identity: str) -> list[list[float]]:
    """The accuracies that an earlier run in this folder has measured; brings the learner to where it was."""
    path, remedy = folder / PROGRESS, "delete the folder to start anew"
    if not path.exists():
        return []
    progress = read_json(path, remedy)
    if progress.get("identity") != identity:
        raise ValueError(
            f"folder {folder} holds a run with another learner, backbone or tasks: choose another, or delete it"
        )
    try:
        rows = [[_checked_accuracy(value) for value in row] for row in progress["rows"]]
        if any(len(row) != number for number, row in enumerate(rows, start=1)):
            raise ValueError("its rows are not those of a triangle")
    except KeyError as error:
        raise damaged(path, ValueError(f"it has no {error}"), remedy) from error
    except (ValueError, TypeError) as error:
        raise damaged(path, error, remedy) from error
    if (folder / LEARNER).exists():
        resume(learner, folder / LEARNER, max(math.prod(task.data.shape) for task in tasks))
    if len(learner.learned) - len(rows) not in (0, 1):
        raise damaged(path, ValueError(f"it is of {len(rows)} tasks, the learner of {len(learner.learned)}"), remedy)
    return rows


def _checked_accuracy(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"an accuracy cannot be {value!r:.80}")
    return float(value)


def _write_progress(folder: Path, identity: str, rows: Sequence[Sequence[float]]) -> None:
    write_json(folder / PROGRESS, {"identity": identity, "rows": rows})


def _identity(learner: Learner, tasks: Sequence[Task]) -> str:
    """What a run must agree on with the one that it goes on from: method, settings, weights, tasks."""
    described = [
        [task.number, task.classes, task.data.name, task.data.shape]
        + [
            fingerprint_split(split)
            for split in (task.data.train, task.data.validation, task.data.test)
            if split is not None
        ]
        for task in tasks
    ]
    return digest_of([learner.method, learner.settings, described, module_parts(learner.backbone)])
