"""run_sequence(): the protocol, task after task, with the accuracy on all tasks so far after each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from structured_ensembles.continual.learner import Learner, surest
from structured_ensembles.continual.matrix import AccuracyMatrix
from structured_ensembles.continual.storage import resume
from structured_ensembles.continual.tasks import Task
from structured_ensembles.copying import all_tensors
from structured_ensembles.data.splits import digest
from structured_ensembles.evaluation.predictions import predictions
from structured_ensembles.files import write_text

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
    rows = [] if where is None else _resume(learner, where, identity)
    for index, task in enumerate(tasks):
        if task.number not in learner.learned:
            learner.learn(task)
            if where is not None:
                learner.save(where / LEARNER)
        if index >= len(rows):
            # After a kill between the two files the learner is one task ahead: this row is computed from it, as before.
            rows.append([accuracy_on(learner, own) for own in tasks[: index + 1]])
            if where is not None:
                write_text(where / PROGRESS, json.dumps({"identity": identity, "rows": rows}))
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


def _resume(learner: Learner, folder: Path, identity: str) -> list[list[float]]:
    """The accuracies that an earlier run in this folder has measured; brings the learner to where it was."""
    path = folder / PROGRESS
    if not path.exists():
        write_text(path, json.dumps({"identity": identity, "rows": []}))
        return []
    try:
        progress = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}; delete the folder to start anew") from error
    if progress.get("identity") != identity:
        raise ValueError(
            f"folder {folder} holds a run with another learner, backbone or tasks: choose another, or delete it"
        )
    if (folder / LEARNER).exists():
        resume(learner, folder / LEARNER)
    return [list(row) for row in progress["rows"]]


def _identity(learner: Learner, tasks: Sequence[Task]) -> str:
    """What a run must agree on with the one that it goes on from: method, settings, weights, tasks."""
    described = [
        [task.number, task.classes, task.data.name, task.data.shape]
        + [digest(task.data.split(name)) for name in ("train", "test")]
        for task in tasks
    ]
    found = hashlib.sha256(json.dumps([learner.method, learner.settings, described]).encode())
    for name, tensor in all_tensors(learner.backbone).items():
        found.update(name.encode() + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
