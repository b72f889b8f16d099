"""structured_ensemble(): the whole walk in one call."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from structured_ensembles.calibration import check_temperature
from structured_ensembles.channels import ChannelGraph, trace
from structured_ensembles.common.checks import check_choice, check_seed
from structured_ensembles.common.devices import Device, pick_device
from structured_ensembles.common.gradients import gradients_on
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.precision import Precision
from structured_ensembles.common.processes import rank
from structured_ensembles.common.progress import say
from structured_ensembles.data import Data
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.data.losses import Loss, check_training_loss
from structured_ensembles.diversity import Diversity
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.comparison import compare_with_base
from structured_ensembles.examination.examine import check_arguments, examine
from structured_ensembles.examination.trained import count_outputs, judge_trained
from structured_ensembles.extraction import check_rescale, extract, warn_of_small_outputs
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.resuming.folder import RunFile, RunFolder, open_folder
from structured_ensembles.resuming.search_checkpoint import FILE as SEARCH
from structured_ensembles.saliency import Scores, saliency
from structured_ensembles.scaling import Initial, Placement
from structured_ensembles.search import learn_scales
from structured_ensembles.searching.checks import check_search
from structured_ensembles.selection import Scope, Selection, Subnet, select
from structured_ensembles.train import train, try_lessons
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import OnEpoch, check_on_epoch
from structured_ensembles.training.recalibration import layers_with_statistics, recalibrate_statistics
from structured_ensembles.training.recipe import check_recipe, recipe_for
from structured_ensembles.training.teaching import Teacher

SUBNETS = "subnets.json"
MUCH_KEPT, HARDLY_SMALLER = 0.8, 0.9  # shares of channels and of parameters that members keep
Trained = bool | Literal["auto"]


def structured_ensemble(
    model: nn.Module,
    data: Data,
    members: int = 5,
    prune: float | None = None,
    recipe: Recipe | None = None,
    selection: Selection = "learned",
    *,
    execution: Execution | None = None,
    memory: float | None = None,
    scope: Scope = "layer",
    round_to: int = 1,
    coupled: bool = False,
    strength: float = 0.1,
    diversity: Diversity | None = "mmd",
    search_epochs: int = 10,
    initial: Initial | None = None,
    placement: Placement = "output",
    reinit: bool = False,
    rescale: bool = False,
    loss: Loss | None = None,
    loss_name: str | None = None,
    temperature: float | None = None,
    trained: Trained = "auto",
    device: Device = "auto",
    seed: int = 0,
    folder: str | Path | None = None,
    on_epoch: OnEpoch | None = None,
    teacher: nn.Module | Teacher | None = None,
    quiet: bool = False,
) -> Ensemble:
    """Cut `members` sub-networks out of `model`, train them, and return the ensemble. The model is not changed.

    prune: the share of neurons that each member loses, by default a half; or
    memory: the size of all members together, in full networks (1.0: as many parameters as the one network).
    recipe: how the members are trained; by default `Recipe.named("modern")`, or "regression" for such data; for a
    trained model "tune", or "tune-regression".
    trained: whether the model is already trained for these data. "auto" finds out: on validation samples its accuracy
    must be above chance by a binomial test at a level of 1e-6 (its R² above 0 by an F test, and at least 0.5), its
    probabilities better than the class frequencies, and all that far better than with newly drawn weights; a line says
    what came out. Then the defaults are those that keep what it has learned: scales that start near 1
    (`initial="N(1,0.1)"`), the recipe "tune", and batch norm's statistics are measured anew for every member after
    cutting, see `recalibrate_statistics`. A table of base and ensemble ends the run, unless quiet. A model that
    `with_head` gave a new classifier needs True.
    execution, on_epoch: how that is computed, and a function to call after every epoch of it; see `train`. The search
    computes in the same precision, see `learn_scales`.
    temperature: of the combined prediction, 1.0 for none; by default it is fitted on the validation split, by which
    training has also chosen the best epoch: see `Ensemble.calibrate`.
    teacher: a trained network or ensemble that members learn from, beside the labels; see `train`. A larger ensemble
    can make small members better, see docs/how-to/teacher.md.
    folder: where to keep the choice of neurons and checkpoints, of the search too; a run that was stopped resumes
    from there. A folder of another run, with other weights, data or arguments, is refused: see
    `resuming.identity`.
    loss_name: tells this loss from others, where there is a folder and the loss cannot be told by itself, such as a
    lambda. The other arguments are those of `trace`, `learn_scales`, `select`, `extract` and `train`.
    """
    start = time.perf_counter()
    if prune is None and memory is None:
        prune = 0.5
    check_arguments(model, data, coupled=coupled, reinit=reinit, quiet=quiet)
    check_choice("trained", trained, (True, False, "auto"))
    if trained is True and reinit:
        raise ValueError("trained=True must not be given together with reinit=True, which draws new weights")
    seed = check_seed(seed)
    if temperature is not None:
        temperature = check_temperature(temperature)
        if data.task != "classification":
            raise ValueError(f"temperature must be left out for a regression, not {temperature!r}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model has no parameter that requires gradients: there is nothing to train")
    check_recipe(recipe)
    execution = execution_or_default(execution)
    check_on_epoch(on_epoch)
    check_rescale(rescale, reinit)
    check_training_loss(loss)
    check_search(strength, diversity, search_epochs, initial or "N(0,1)", placement, "search_epochs")
    data = examine(model, data, device, loss)
    lessons = try_lessons(teacher, data, loss, pick_device(device, model))
    graph = trace(model, data.example(dtype=dtype_of(model)), coupled=coupled)
    choose = partial(
        select, graph, prune=prune, memory=memory, scope=scope, members=members, seed=seed, round_to=round_to
    )
    learned = selection == "learned"
    with warnings.catch_warnings(action="ignore"):  # a trial, so that wrong arguments raise before the search
        choose(selection="random" if learned else selection)
    trained = False if reinit else _decide_trained(trained, model, data, device, loss, quiet)
    recipe = recipe_for(data.task, recipe, trained)
    search: dict[str, Any] = {
        "search_epochs": search_epochs,
        "strength": strength,
        "diversity": diversity,
        "initial": initial or ("N(1,0.1)" if trained else "N(0,1)"),
        "placement": placement,
    }
    run = open_folder(
        folder,
        "structured",
        model,
        data,
        recipe=recipe,
        execution=execution,
        loss=loss,
        loss_name=loss_name,
        members=members,
        seed=seed,
        selection=selection,
        prune=prune,
        memory=memory,
        scope=scope,
        round_to=round_to,
        coupled=coupled,
        reinit=reinit,
        rescale=rescale,
        **(search if learned else {}),
        **({"trained": True} if trained else {}),
        **({} if lessons is None or folder is None else {"teacher": lessons.identity()}),
    )
    subnets = _read_subnets(run)
    if subnets is None:
        learn = partial(
            _learn_scores, model, graph, data, members, search, seed, loss, device, execution.precision, quiet
        )
        run, subnets = _choose_subnets(run, choose, selection, learn if learned else None)
    if not (reinit or rescale):
        warn_of_small_outputs(model, graph, subnets)
    networks = [
        extract(model, graph, subnet, reinit=reinit, seed=derive_seed(seed, "weights", number), rescale=rescale)
        for number, subnet in enumerate(subnets)
    ]
    ensemble = Ensemble(networks, subnets=subnets)
    say(explain_small_savings(ensemble, graph), quiet)
    if trained:
        recalibrate_members(ensemble, data, device)
    checkpoint = run.file("checkpoint.safetensors")
    train(
        ensemble,
        data,
        recipe,
        device,
        seed,
        execution=execution,
        loss=loss,
        checkpoint=checkpoint,
        on_epoch=on_epoch,
        teacher=teacher,
        quiet=quiet,
    )
    if temperature is not None:
        _set_temperature(ensemble, data, temperature)
    if trained and not quiet:
        say(compare_with_base(ensemble, model, data, seconds=time.perf_counter() - start, loss=loss))
    return ensemble


def explain_small_savings(ensemble: Ensemble, graph: ChannelGraph) -> str:
    """Explain why an ensemble whose channels were cut hardly has fewer parameters; nothing where it has."""
    counts = [(len(kept), size) for subnet in ensemble.subnets or () for _, size, kept in subnet.groups]
    kept_channels = sum(kept for kept, _ in counts) / max(sum(size for _, size in counts), 1)
    kept_parameters = ensemble.num_parameters / (len(ensemble) * (ensemble.base_parameters or 1))
    if kept_channels > MUCH_KEPT or kept_parameters <= HARDLY_SMALLER:
        return ""
    return (
        f"members keep {kept_channels:.0%} of the channels that can be pruned, but {kept_parameters:.0%} of the "
        f"network's parameters, as {len(graph.prunable)} of its {counted(len(graph.groups), 'group')} can be pruned: "
        "print(trace(model, data.example())) says why the others are fixed"
    )


def _learn_scores(
    model: nn.Module,
    graph: ChannelGraph,
    data: Data,
    members: int,
    search: Mapping[str, Any],
    seed: int,
    loss: Loss | None,
    device: Device,
    precision: Precision,
    quiet: bool,
    checkpoint: RunFile | None,
) -> list[Scores]:
    """Learn the members' scales and return the saliency of every neuron. search: the search's own arguments."""
    settings = {"epochs" if name == "search_epochs" else name: value for name, value in search.items()}
    common: dict[str, Any] = {"loss": loss, "device": device, "quiet": quiet}
    settings |= {"seed": seed, "precision": precision, "checkpoint": checkpoint}
    scales = learn_scales(model, graph, data, members, **settings, **common)
    return saliency(model, graph, scales, data, **common)


def _choose_subnets(
    run: RunFolder,
    choose: Callable[..., list[Subnet]],
    selection: Selection,
    learn: Callable[[RunFile | None], list[Scores]] | None,
) -> tuple[RunFolder, list[Subnet]]:
    """Choose what members keep and write it into the run's folder. learn: returns the scores, if any are needed."""
    checkpoint = None if learn is None else run.file(SEARCH)
    subnets = choose(None if learn is None else learn(checkpoint), selection=selection)
    run = run.write(SUBNETS, json.dumps([json.loads(subnet.to_json()) for subnet in subnets]))
    if checkpoint is not None and rank() == 0:
        checkpoint.path.unlink(missing_ok=True)
    return run, subnets


def _set_temperature(ensemble: Ensemble, data: Data, temperature: float) -> None:
    """Set the user's temperature, and refit what depends on it where the validation split allows it."""
    if data.validation is not None:
        try:
            ensemble.calibrate(data, temperature=temperature)
            return
        except ValueError as error:  # such as outputs that are NaN: the training must not fail at its end
            warnings.warn(f"the ensemble has no threshold and no conformal sets: {error}", stacklevel=3)
    ensemble.temperature = temperature


def _decide_trained(
    trained: Trained, model: nn.Module, data: Data, device: Device, loss: Loss | None, quiet: bool
) -> bool:
    """Return whether the model counts as trained, and say why; raise a ValueError if it cannot be for these data.

    A network with more outputs than there are classes is probably a trained one for other data, such as ImageNet: a
    warning says how to keep what it has learned. A loss of the user's own may need these outputs.
    """
    if trained == "auto":
        outputs = count_outputs(model, data) if loss is None and data.task == "classification" else 0
        if outputs > data.num_classes:
            warnings.warn(
                f"model has {outputs} outputs, but data has {counted(data.num_classes, 'class')}: "
                "it counts as not trained, and its members are trained as new networks are. To keep what it has "
                f"learned on other data, give with_head(model, {data.num_classes}) and trained=True; for a model "
                "that is not trained, give trained=False",
                stacklevel=3,
            )
        judgement = judge_trained(model, data, device)
        say(f"the model counts as {'trained' if judgement.trained else 'not trained'}: {judgement.reason}", quiet)
        return judgement.trained
    outputs = count_outputs(model, data) if trained and data.task == "classification" else 0
    if outputs not in (0, data.num_classes):
        raise ValueError(
            f"trained=True needs a model for the classes of data, {data.num_classes}, but it has {outputs} outputs: "
            f"with_head(model, {data.num_classes}) gives it a new classifier"
        )
    return trained


def recalibrate_members(ensemble: Ensemble, data: Data, device: Device) -> None:
    """Measure batch norm's statistics of every member anew, on the device that will train it."""
    with gradients_on():  # on another device, parameters made under inference mode could not be trained
        ensemble.to(pick_device(device, ensemble))
        for member in ensemble.members:
            if layers_with_statistics(member):
                recalibrate_statistics(member, data)


def _read_subnets(run: RunFolder) -> list[Subnet] | None:
    """Read the subnets that this run chose before it was stopped; None if there are none, or no folder."""
    text = run.read(SUBNETS)
    return None if text is None else [Subnet.from_json(json.dumps(rows)) for rows in json.loads(text)]
