"""`sens train`: train an ensemble and keep everything about it in one folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from structured_ensembles.cli.hints import suggest_commands
from structured_ensembles.cli.printing import format_figures
from structured_ensembles.cli.threads import describe_device, threads_for_work, work_of_batch
from structured_ensembles.common.checks import check_whole
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.progress import say
from structured_ensembles.common.tables import escape_control_characters
from structured_ensembles.data.sources import is_folder
from structured_ensembles.runs.experiment import Experiment, Prepared, prepare_experiment, train_prepared
from structured_ensembles.runs.folder import describe_finished_run
from structured_ensembles.training import Execution

AUTOMATIC = Execution()


def train(
    out: Path | None = None,
    dataset: str = "digits",
    model: str = "resnet20",
    method: str = "structured",
    members: int = 5,
    prune: float | None = None,
    memory: float | None = None,
    scope: Literal["layer", "network"] | None = None,
    selection: Literal["learned", "random", "magnitude", "mirrored"] | None = None,
    seed: int = 0,
    recipe: Literal["auto", "modern", "paper", "regression", "tune", "tune-adamw", "tune-regression"] = "auto",
    changes: dict[str, Any] | None = None,
    epochs: int | None = None,
    execution: Execution = AUTOMATIC,
    model_arguments: dict[str, Any] | None = None,
    method_arguments: dict[str, Any] | None = None,
    storage: Literal["float32", "float16", "int8"] = "float32",
    limit: int | None = None,
    root: Path | None = None,
    device: str = "auto",
    threads: int | None = None,
    quiet: bool = False,
) -> int:
    """Train an ensemble on a data set; an existing run folder is resumed.

    Args:
        out: the run folder; by default runs/DATASET-MODEL-METHOD-SEED, with what differs from the defaults
        dataset: a name (sens datasets), folder:PATH?size=64 (a folder of pictures for each class), or
            package.module:function that returns a Data
        model: a name (sens models), or package.module:function that returns a network
        method: single, deep, structured, random, magnitude, narrow, snapshot, batch-ensemble, mc-dropout,
            prune-and-tune, taught, or package.module:function
        members: how many networks
        prune: the share of neurons each member loses (structured, random, magnitude, narrow, prune-and-tune,
            taught)
        memory: instead of prune, the parameters of all members together, in multiples of the network's (the same
            methods)
        scope: rank the neurons of each layer, or of the whole network (structured, random, magnitude)
        selection: how neurons are chosen (structured)
        seed: of all random numbers
        recipe: how to train; auto is modern, or regression if the targets of the data are numbers; tune,
            tune-adamw and tune-regression are for a model that is already trained
        changes: fields of the recipe to change, such as {rate: 0.01} or {averaging: 0.25, mixup: 0.2, augmentation:
            crop+flip+cutout}
        epochs: how long to train; short for changes.epochs
        execution: how training is computed
        model_arguments: what the model function is called with; those of the zoo get the classes and channels of the
            data, too
        method_arguments: further arguments of the method, such as {repeat: split} of batch-ensemble
        storage: how weights are stored in the file; the loss in accuracy is shown
        limit: the largest number of training samples, for a quick trial
        root: where data sets are kept
        device: auto, cpu, cuda, …
        threads: of the CPU; by default OMP_NUM_THREADS, one for small networks, or the cores that this process may use
        quiet: show no progress

    """
    method_options = {"prune": prune, "memory": memory, "scope": scope, "selection": selection}
    arguments = {name: value for name, value in method_options.items() if value is not None} | (method_arguments or {})
    recipe_changes = {**(changes or {}), **({} if epochs is None else {"epochs": epochs})}
    experiment = Experiment(
        dataset,
        model,
        method,
        seed,
        members,
        model_arguments or {},
        arguments,
        recipe,
        recipe_changes,
        storage,
        limit,
        execution=execution,
    )
    check_whole("--limit", 1 if limit is None else limit)
    prepared = prepare_experiment(experiment, root=root, device=device)
    folder = out or Path("runs") / prepared.folder
    work = work_of_batch(prepared.network, prepared.data.example(), device, prepared.recipe.batch_size)
    with threads_for_work(threads, work) as count:
        say(describe_training(prepared, folder, describe_device(device, prepared.network, count)), quiet)
        done, new = train_prepared(prepared, folder, quiet=quiet)
    if int(os.environ.get("RANK", "0")) > 0:  # of several processes, only the first prints
        return 0
    if not new:
        print(describe_finished_run(folder, done))
    columns = {method: done["figures"]}
    if storage != "float32":
        columns = {
            f"{method}, in float32": done.get("figures_in_float32", {}),
            f"as stored, in {storage}": done["figures"],
        }
    print(format_figures(columns))
    print(f"\n{'it took ' * (not new)}{done['seconds']:.0f} s; see {folder}")
    print(suggest_commands(("evaluate", "report"), folder, (model,) if is_folder(dataset) else (dataset, model), root))
    return 0


def describe_training(prepared: Prepared, folder: Path, device: str) -> str:
    """Say what is trained, on what, for how long, and where it is written."""
    experiment, data, recipe = prepared.experiment, prepared.data, prepared.recipe
    parameters = sum(parameter.numel() for parameter in prepared.network.parameters())
    held_out = "none" if data.validation is None else f"{len(data.validation):,}"
    steps = recipe.epochs * data.num_batches("train", recipe.batch_size)
    members = 1 if experiment.method == "single" else experiment.members
    lines = [
        f"training  {experiment.method} of {experiment.model} ({counted(parameters, 'parameter')}), "
        f"{counted(members, 'member')}, seed {experiment.seed}",
        f"on        {experiment.dataset}: {counted(len(data.train), 'sample')} of shape {data.shape}, "
        f"{held_out} to validate, {len(data.split('test')):,} to test",
        f"for       {counted(recipe.epochs, 'epoch')}, {counted(steps, 'step')} of {recipe.batch_size} samples "
        f"for each member, by the recipe {experiment.recipe}",
        f"with      {device}",
        f"into      {folder}",
    ]
    return "\n".join(map(escape_control_characters, lines))
