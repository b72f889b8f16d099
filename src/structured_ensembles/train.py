"""train(): train all members of an ensemble at once, and calibrate it on held-out samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from structured_ensembles.common.checks import check_flags, check_path, check_type
from structured_ensembles.common.devices import Device
from structured_ensembles.common.gaussian import gaussian_nll
from structured_ensembles.common.gradients import gradients_on
from structured_ensembles.common.threads import warn_of_slowness
from structured_ensembles.data import Data
from structured_ensembles.data.dataset import check_data
from structured_ensembles.data.losses import Loss, check_training_loss
from structured_ensembles.data.splits import TensorSplit, take_samples
from structured_ensembles.data.target_scaling import fit_units
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import examine
from structured_ensembles.examination.trained import output_shape
from structured_ensembles.prediction.calibration_fit import fit_all
from structured_ensembles.prediction.combination import combine_logs, entropy_of
from structured_ensembles.prediction.held_out import gather_outputs
from structured_ensembles.resuming.folder import RunFile
from structured_ensembles.training.execution import Execution, execution_or_default
from structured_ensembles.training.fleet import train_fleet
from structured_ensembles.training.history import History, OnEpoch, check_on_epoch
from structured_ensembles.training.optimizers import check_rules
from structured_ensembles.training.preparation import prepare_training
from structured_ensembles.training.recipe import Recipe, recipe_for
from structured_ensembles.training.teaching import Lessons, Teacher

SAMPLES = 512  # of the validation split on which `warn_of_one_class` looks at predictions
MAX_SURPRISE = 0.95  # cross-entropy relative to that of the class frequencies, below which a network has learned
MIN_EPOCHS = 5  # after which a network should tell classes apart
FAR = 100  # mean or deviation of targets that a network, whose outputs start around 0, hardly reaches


def train(
    ensemble: Ensemble,
    data: Data,
    recipe: Recipe | None = None,
    device: Device = "auto",
    seed: int = 0,
    *,
    execution: Execution | None = None,
    numbers: Sequence[int] | None = None,
    loss: Loss | None = None,
    loss_name: str | None = None,
    checkpoint: str | Path | RunFile | None = None,
    on_epoch: OnEpoch | None = None,
    teacher: nn.Module | Teacher | None = None,
    quiet: bool = False,
) -> History:
    """Train every member of `ensemble` in place; each ends with the weights of its best validation epoch.

    Every member sees the data in its own order, with its own crops, flips and dropout, drawn from `seed` and its
    number. The batches of `Data.from_loaders` are the loader's, and the same for all members.

    Where there is a validation split, the ensemble ends calibrated on it: see `Ensemble.calibrate`, `threshold_for` and
    `conformal`. The same samples have chosen the best epoch.

    recipe: what training does, by default `Recipe.named("modern")`, or "regression" for such data.
    execution: how it is computed: engine, precision, streams, compile; by default `Execution()`.
    device: "auto" takes a GPU if there is one; the ensemble stays on the device.
    numbers: the members' numbers, by default 0, 1, …: to train some members of a larger ensemble, here or on another
        machine, give theirs. The network trained alone as `numbers=[3]` is member 3 of the fleet. Members of the same
        number see the same batches, crops and dropout.
    loss: a function of (outputs, targets) that averages over samples; by default that of the task. For a regression it
        is the squared error of standardised targets: networks learn values of mean 0 and deviation 1, unless their
        outputs are like the targets already; the ensemble converts outputs to the units of the targets. With a loss of
        your own, networks that are trained for the first time learn the targets as they are; parameters of the loss
        itself are not trained, and must be frozen. `gaussian_nll` is for
        networks that give a mean and a variance for every value: targets are standardised as by default, and the
        ensemble predicts distributions; see `Ensemble.distribution`.
    checkpoint: a file to write after every epoch, or as often as a tenth of the time allows; if it exists already,
        training resumes from it, to the same weights. A file of another run (other initial weights, data, recipe,
        precision, seed, loss, …) is refused.
    on_epoch: a function that is called with an `EpochRow` after every epoch, such as a logger's: see
        docs/how-to/loggers.md. An exception that it raises ends the training, with a checkpoint of that epoch, and is
        raised here. A run that resumes from a checkpoint calls it for the epochs after that one only. Of several
        processes, the first one calls it.
    teacher: a trained network or ensemble, whose probabilities members learn beside the labels of a classification; a
        `Teacher` says how much, and how softened. It is copied, and sees every batch as the member does.
    loss_name: tells this loss from others, where there is a checkpoint and the loss cannot be told by itself, such as a
        lambda.
    """
    check_type("ensemble", ensemble, Ensemble, "Ensemble([network, …]) makes one, also of one network")
    check_data(data)
    check_flags(quiet=quiet)
    check_on_epoch(on_epoch)
    check_training_loss(loss)
    if checkpoint is not None and not isinstance(checkpoint, RunFile):
        checkpoint = check_path("checkpoint", checkpoint)
    recipe = recipe_for(data.task, recipe)
    check_rules(recipe, ensemble)
    lessons = lessons_of(teacher, data, loss)
    with gradients_on():
        run = prepare_training(
            ensemble.members,
            data,
            recipe,
            execution_or_default(execution),
            device,
            seed,
            numbers=numbers,
            loss=loss,
            loss_name=loss_name,
            checkpoint=checkpoint,
            units=ensemble.units,
            gaussian=ensemble.gaussian,
            lessons=lessons,
        )
        data = examine(ensemble.members[0], data, run.device, loss)
        teaching = None if lessons is None else lessons.prepare(data, run.device)
        loss = ensemble.adopt(data, loss)
        ensemble.to(run.device)
        ensemble.units = run.units(ensemble.members, data, loss, ensemble.units)
        warn_of_far_targets(ensemble, data, loss)
        if run.device.type == "cpu":
            warn_of_slowness()
        ensemble.history = train_fleet(run, ensemble.members, data, loss, ensemble.units, on_epoch, quiet, teaching)
        calibrate_trained(ensemble, data)
        warn_of_one_class(ensemble, data, recipe.epochs)
    return ensemble.history


def warn_of_far_targets(ensemble: Ensemble, data: Data, loss: Loss | None) -> None:
    """Warn if a loss of the user's own, for which nothing is standardised, has targets far from what networks give."""
    if loss in (None, gaussian_nll) or ensemble.units is not None or not isinstance(data.train, TensorSplit):
        return
    shape = output_shape(ensemble.members[0], data)
    if shape is None or math.prod(shape[1:]) != math.prod(data.target_shape):  # outputs may be of any kind
        return
    units = fit_units(ensemble.members, data)  # type: ignore[arg-type]  # a ModuleList is a sequence of networks
    if units is not None and max(*map(abs, units.mean), units.deviation) > FAR:
        mean = ", ".join(f"{value:.3g}" for value in units.mean[:3]) + (", …" if len(units.mean) > 3 else "")
        warnings.warn(
            f"targets have a mean of {mean} and a deviation of {units.deviation:.3g}, which a loss of your own gets as "
            "they are: networks start around 0 and may never get there. Give standardised targets, or leave loss out, "
            "which standardises them",
            stacklevel=3,
        )


def lessons_of(teacher: nn.Module | Teacher | None, data: Data, loss: Loss | None) -> Lessons | None:
    """Take the networks out of a teacher; raise an error if it cannot teach members by these data and this loss."""
    if teacher is None:
        return None
    if not isinstance(teacher, Teacher):
        check_type("teacher", teacher, nn.Module, "a trained network or Ensemble, or a Teacher")
        teacher = Teacher(teacher)
    network = getattr(teacher.network, "_orig_mod", teacher.network)  # what torch.compile was given
    how = teacher.share, teacher.temperature
    if data.task != "classification" or (isinstance(network, Ensemble) and network.task != "classification"):
        raise ValueError("teacher must be left out for a regression: classes are taught, by their probabilities")
    if loss is not None:
        raise ValueError("teacher must be left out with a loss of your own, which gets labels and no probabilities")
    if not isinstance(network, Ensemble):
        return Lessons([network], 1.0, "data", *how)
    numbers = {name: number for number, name in enumerate(network.classes)}
    for number, name in enumerate(data.classes):
        if numbers.get(name, number) != number:
            raise ValueError(
                f"teacher must have the classes of data in the same order, but {name!r} is its class {numbers[name]} "
                f"and class {number} of data"
            )
    return Lessons(list(network.members), network.temperature, network.normalization, *how)


def try_lessons(
    teacher: nn.Module | Teacher | None, data: Data, loss: Loss | None, device: torch.device
) -> Lessons | None:
    """Return `lessons_of` a teacher that was tried on samples, for methods whose members are not the first to train."""
    lessons = lessons_of(teacher, data, loss)
    if lessons is not None:
        lessons.prepare(data, device)
    return lessons


def calibrate_trained(ensemble: Ensemble, data: Data) -> None:
    """Fit what the validation split allows: temperature, thresholds, and conformal sets or intervals of 90 %.

    Warns if the outputs allow no fit, such as those for a user's loss: training must not fail at its end.
    """
    if data.validation is None:
        return
    outputs, targets = gather_outputs(lambda inputs, *_: ensemble.logits(inputs), data.validation)
    try:
        ensemble.calibration = fit_all(ensemble.calibration, outputs, targets, data.task, ensemble.gaussian)
    except ValueError as error:
        warnings.warn(f"the ensemble stays uncalibrated: {error}", stacklevel=3)


def warn_of_one_class(ensemble: Ensemble, data: Data, epochs: int) -> None:
    """Warn if after some epochs every member predicts one class for all validation samples, though they have several.

    Do not warn where the probabilities are better than the class frequencies: those of a rare class may all be below a
    half.
    """
    if data.task != "classification" or epochs < MIN_EPOCHS or data.validation is None or len(data.validation) == 0:
        return
    inputs, targets = take_samples(data.validation, SAMPLES)
    logits = ensemble.logits(inputs)  # (members, samples, classes)
    labels = logits.argmax(-1)
    if len(targets.unique()) < 2 or bool((labels != labels[:, :1]).any()):
        return
    frequencies = torch.bincount(targets, minlength=logits.shape[-1]).double() / len(targets)
    cost = F.nll_loss(combine_logs(logits.double()), targets)
    if float(cost) < MAX_SURPRISE * float(entropy_of(frequencies)):
        return
    class_names = dict(enumerate(data.classes))  # a network may have more outputs than there are classes
    names = sorted({class_names.get(label, str(label)) for label in labels[:, 0].tolist()})
    warnings.warn(
        f"every member predicts one class whatever the input ({', '.join(names)}), for all {len(targets)} validation "
        f"samples looked at: it has learned nothing. Look at the scale of the inputs (`Data`'s normalization= and "
        "standardize=), the rate, and the number of epochs",
        stacklevel=3,
    )
