"""Continual learning: task after task on one backbone, nothing forgotten.

learner = se.continual.StructuredLearner(se.zoo.lenet5_backbone())
for task in se.continual.split_tasks(data, tasks=5):
    learner.learn(task)
"""

from structured_ensembles.continual.batch_ensemble import BatchEnsembleLearner
from structured_ensembles.continual.learner import LEARNERS, Learner
from structured_ensembles.continual.matrix import AccuracyMatrix
from structured_ensembles.continual.memory import Memory, paper_memory
from structured_ensembles.continual.naive import NaiveLearner
from structured_ensembles.continual.owning import Capacity, Forgotten
from structured_ensembles.continual.pruning import PruningLearner
from structured_ensembles.continual.sequence import run_sequence
from structured_ensembles.continual.single import SingleModelLearner
from structured_ensembles.continual.structured import StructuredLearner
from structured_ensembles.continual.supsup import SupSupLearner
from structured_ensembles.continual.tasks import Task, load_tasks, split_tasks

LEARNERS.update(
    {
        learner.method: learner
        for learner in (
            NaiveLearner,
            SingleModelLearner,
            SupSupLearner,
            PruningLearner,
            BatchEnsembleLearner,
            StructuredLearner,
        )
    }
)

__all__ = [
    "LEARNERS",
    "AccuracyMatrix",
    "BatchEnsembleLearner",
    "Capacity",
    "Forgotten",
    "Learner",
    "Memory",
    "NaiveLearner",
    "PruningLearner",
    "SingleModelLearner",
    "StructuredLearner",
    "SupSupLearner",
    "Task",
    "load_tasks",
    "paper_memory",
    "run_sequence",
    "split_tasks",
]
