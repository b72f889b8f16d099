"""Estimated run times on an H200, by which the queue is planned; `measured_times.py` corrects them by finished runs.

Seconds per network and epoch were measured with fleets of four or five on 45,000 images of 32×32
(benchmarks/results, results/); WRN-28-10, added up from the times of its layers, and VGG16 are guesses until they have
been run.
"""

from __future__ import annotations

from structured_ensembles.continual.experiment import ContinualExperiment
from structured_ensembles.continual.tasks import BENCHMARKS
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.measurement import Request
from structured_ensembles.training import Recipe

START = 15.0  # seconds: imports, data, capture of the graph, evaluation
CORRUPTIONS = 25.0  # seconds for two severities
NETWORK_EPOCH = {
    "resnet20": 0.17, "resnet32": 0.15, "resnet18": 0.7, "vgg11": 0.24, "vgg16": 0.5, "lenet5": 0.1, "wrn28_10": 6.0,
}  # fmt: skip
ALONE = 2.3  # times as long for a network trained alone, which is bound by kernel launches: ResNet20, VGG11
IMAGES = {"cifar10": 1.0, "cifar100": 1.0, "svhn": 1.47, "mnist": 1.2, "tiny-imagenet": 2.0 * 4, "digits": 0.04}
SEARCH = 10 * 2.5  # a search of ten epochs, in epochs of one network
EARLY_STOP = 0.85  # of the recipe's epochs, where there is a patience
PARAMETERS = {
    "resnet20": 0.27e6, "resnet32": 0.48e6, "resnet18": 11.2e6, "vgg11": 9.8e6, "vgg16": 15.3e6, "lenet5": 0.06e6,
    "wrn28_10": 36.5e6,
}  # fmt: skip
STATE = 12  # bytes of a checkpoint per parameter: weights, momentum, best weights
CONTINUAL = {"structured": 2.0, "supsup": 2.0, "pruning": 3.0}  # passes over the data per epoch; others 1
CONTINUAL_EPOCH = 1.1  # seconds for one epoch of half-VGG11 over all tasks of CIFAR-10


def estimate_minutes(experiment: Experiment | ContinualExperiment, request: Request, correction: float = 1.0) -> float:
    """Estimate the minutes of a run. correction: measured over estimated seconds of finished runs like it."""
    measuring = CORRUPTIONS if request.corruptions else 0.0
    return (correction * estimate_training_seconds(experiment) + measuring) / 60


def estimate_training_seconds(experiment: Experiment | ContinualExperiment) -> float:
    """Estimate the seconds of a run that has the GPU to itself, without corruptions."""
    if isinstance(experiment, ContinualExperiment):
        epochs = experiment.method_arguments.get("epochs", BENCHMARKS[experiment.dataset].epochs)
        passes = CONTINUAL.get(experiment.method, 1.0)
        return START + epochs * passes * CONTINUAL_EPOCH * IMAGES[experiment.dataset]
    recipe = Recipe.named(experiment.recipe, **experiment.changes)
    epoch = NETWORK_EPOCH[experiment.model] * IMAGES[experiment.dataset]
    epoch *= experiment.model_arguments.get("width", 1) ** 1.5
    epochs = recipe.epochs * (EARLY_STOP if recipe.patience else 1.0)
    is_small = experiment.model not in ("resnet18", "wrn28_10")
    alone_epoch = epoch * (ALONE if is_small else 1.5)
    tuned = experiment.method_arguments.get("tune_epochs", epochs / 4)
    member_factor = 1.0 if is_small else _share(experiment) ** 0.25  # time follows activations more than parameters
    seconds = {
        "single": epochs * alone_epoch,
        "mc-dropout": epochs * alone_epoch * 1.3,
        "snapshot": experiment.members * experiment.method_arguments.get("cycle", 0) * alone_epoch,
        "prune-and-tune": (epochs - tuned) * alone_epoch + tuned * experiment.members * epoch,
        "taught": epochs * epoch * _taught_networks(experiment, member_factor),
        "batch-ensemble": epochs * experiment.members * epoch * 1.2,
    }.get(experiment.method, epochs * experiment.members * epoch * member_factor)
    seconds += SEARCH * epoch if experiment.method == "structured" else 0.0
    return START + seconds


def _taught_networks(experiment: Experiment, member_factor: float) -> float:
    """Return the cost of an epoch of a teacher and of its members, in epochs of one network.

    Each of the teacher's networks runs forward, a third of a step, on the batches of every member.
    """
    teachers = _count_teachers(experiment)
    return teachers + experiment.members * (member_factor + teachers / 3)


def _count_teachers(experiment: Experiment) -> float:
    """Return how many networks teach."""
    return float(experiment.method_arguments.get("teachers", experiment.members))


def _share(experiment: Experiment) -> float:
    """Return the parameters of one member over those of the network."""
    settings = experiment.method_arguments
    return float(settings.get("memory", experiment.members * (1 - settings.get("prune", 0.0)))) / experiment.members


def estimate_checkpoint_bytes(experiment: Experiment | ContinualExperiment) -> float:
    """Estimate the size of the checkpoint that an unfinished run leaves."""
    if isinstance(experiment, ContinualExperiment):
        return 4 * 2.4e6 * 2  # the learner after a task, from which it resumes
    networks = experiment.members * _share(experiment)
    if experiment.method == "taught":
        networks += _count_teachers(experiment)  # whose checkpoint stays until the members are trained
    if experiment.method in ("single", "batch-ensemble", "mc-dropout"):
        networks = 1.0
    width = experiment.model_arguments.get("width", 1)
    return STATE * networks * width**2 * PARAMETERS[experiment.model]
