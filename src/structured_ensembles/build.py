"""structured_ensemble(): the whole walk in one call."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path

from torch import nn

from structured_ensembles.calibration import check_temperature
from structured_ensembles.channels import trace
from structured_ensembles.common.checks import check_seed, check_type
from structured_ensembles.common.devices import Device
from structured_ensembles.common.processes import rank
from structured_ensembles.data import Data
from structured_ensembles.data.dataset import check_data
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.data.losses import Loss
from structured_ensembles.diversity import Diversity
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.examination.examine import examine
from structured_ensembles.extraction import check_rescale, extract, warn_of_small_outputs
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.resuming.identity import RunFolder, open_folder
from structured_ensembles.resuming.search_checkpoint import FILE as SEARCH
from structured_ensembles.saliency import saliency
from structured_ensembles.scaling import Initial, Placement
from structured_ensembles.search import learn_scales
from structured_ensembles.selection import Scope, Selection, Subnet, select
from structured_ensembles.train import train
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.execution import execution_or_default
from structured_ensembles.training.history import OnEpoch, check_on_epoch
from structured_ensembles.training.recipe import recipe_for

SUBNETS = "subnets.json"


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
    initial: Initial = "N(0,1)",
    placement: Placement = "output",
    reinit: bool = False,
    rescale: bool = False,
    loss: Loss | None = None,
    loss_name: str | None = None,
    temperature: float | None = None,
    device: Device = "auto",
    seed: int = 0,
    folder: str | Path | None = None,
    on_epoch: OnEpoch | None = None,
    quiet: bool = False,
) -> Ensemble:
    """Cut `members` sub-networks out of `model`, train them, and return the ensemble. The model is not changed.

    prune: the share of neurons that each member loses, by default a half; or
    memory: the size of all members together, in full networks (1.0: as many parameters as the one network).
    recipe: how the members are trained; by default `Recipe.named("modern")`, or "regression" for such data.
    execution, on_epoch: how that is computed, and a function to call after every epoch of it; see `train`.
    temperature: of the combined prediction, 1.0 for none; by default it is fitted on the validation split, by which
    training has also chosen the best epoch: see `Ensemble.calibrate`.
    folder: where to keep the choice of neurons and a checkpoint of every epoch, of the search too; a run that was
    stopped resumes from there. A folder of another run, with other weights, data or arguments, is refused: see
    `resuming.identity`.
    loss_name: tells this loss from others, where there is a folder and the loss cannot be told by itself, such as a
    lambda. The other arguments are those of `trace`, `learn_scales`, `select`, `extract` and `train`.
    """
    if prune is None and memory is None:
        prune = 0.5
    check_type("model", model, nn.Module)
    check_data(data)
    seed = check_seed(seed)
    if temperature is not None:
        temperature = check_temperature(temperature)
        if data.task != "classification":
            raise ValueError(f"temperature must be left out for a regression, not {temperature!r}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model has no parameter that requires gradients: there is nothing to train")
    recipe, execution = recipe_for(data.task, recipe), execution_or_default(execution)
    check_on_epoch(on_epoch)
    check_rescale(rescale, reinit)
    data = examine(model, data, device)
    graph = trace(model, data.example(dtype=dtype_of(model)), coupled=coupled)
    choose = partial(
        select, graph, prune=prune, memory=memory, scope=scope, members=members, seed=seed, round_to=round_to
    )
    learned = selection == "learned"
    with warnings.catch_warnings(action="ignore"):  # a trial, so that wrong arguments raise before the search
        choose(selection="random" if learned else selection)
    search = {
        "search_epochs": search_epochs,
        "strength": strength,
        "diversity": diversity,
        "initial": initial,
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
    )
    subnets = _read_subnets(run)
    if subnets is None:
        scores = None
        search_checkpoint = run.file(SEARCH) if learned else None
        if learned:
            scales = learn_scales(
                model,
                graph,
                data,
                members,
                strength,
                diversity,
                search_epochs,
                seed,
                initial=initial,
                placement=placement,
                loss=loss,
                device=device,
                checkpoint=search_checkpoint,
                quiet=quiet,
            )
            scores = saliency(model, graph, scales, data, loss=loss, device=device, quiet=quiet)
        subnets = choose(scores, selection=selection)
        run = run.write(SUBNETS, json.dumps([json.loads(subnet.to_json()) for subnet in subnets]))
        if search_checkpoint is not None and rank() == 0:
            search_checkpoint.path.unlink(missing_ok=True)
    if not (reinit or rescale):
        warn_of_small_outputs(model, graph, subnets)
    networks = [
        extract(model, graph, subnet, reinit=reinit, seed=derive_seed(seed, "weights", number), rescale=rescale)
        for number, subnet in enumerate(subnets)
    ]
    ensemble = Ensemble(networks, subnets=subnets)
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
        quiet=quiet,
    )
    if temperature is not None and data.validation is not None:
        ensemble.calibrate(data, temperature=temperature)
    elif temperature is not None:
        ensemble.temperature = temperature
    return ensemble


def _read_subnets(run: RunFolder) -> list[Subnet] | None:
    """Read the subnets that this run chose before it was stopped; None if there are none, or no folder."""
    text = run.read(SUBNETS)
    return None if text is None else [Subnet.from_json(json.dumps(rows)) for rows in json.loads(text)]
