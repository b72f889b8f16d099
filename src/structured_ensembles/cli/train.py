"""`sens train`: train an ensemble and keep everything about it in one folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import torch

from structured_ensembles.cli.printing import figures_table
from structured_ensembles.data import Data, load_data
from structured_ensembles.methods import METHODS
from structured_ensembles.models import build_model, find_function
from structured_ensembles.parallel import rank
from structured_ensembles.runs import close_run, open_run
from structured_ensembles.training import Recipe
from structured_ensembles.training.mesh import gather, processes


def train(
    out: Path | None = None,
    dataset: str = "digits",
    model: str = "resnet20",
    method: str = "structured",
    members: int = 5,
    prune: float | None = None,
    memory: float | None = None,
    scope: Literal["layer", "network"] | None = None,
    selection: Literal["learned", "random", "magnitude"] | None = None,
    seed: int = 0,
    recipe: Literal["modern", "paper"] = "modern",
    changes: dict[str, Any] | None = None,
    epochs: int | None = None,
    model_arguments: dict[str, Any] | None = None,
    method_arguments: dict[str, Any] | None = None,
    storage: Literal["float32", "float16", "int8"] = "float32",
    root: Path | None = None,
    device: str = "auto",
    quiet: bool = False,
) -> int:
    """Train an ensemble on a data set; a run folder that exists is resumed.

    Args:
        out: the run folder; by default runs/DATASET-MODEL-METHOD-SEED
        dataset: a name (sens datasets), or package.module:function that returns a Data
        model: a name (sens models), or package.module:function that returns a network
        method: single, deep, structured, random, magnitude, narrow, snapshot, batch-ensemble, mc-dropout, or
            package.module:function
        members: how many networks
        prune: the share of neurons each member loses (structured, random, magnitude, narrow)
        memory: instead of prune, how much all members may weigh, in networks (the same)
        scope: rank the neurons of each layer, or of the whole network (structured, random, magnitude)
        selection: how neurons are chosen (structured)
        seed: of everything random
        recipe: how to train
        changes: parts of the recipe to change, such as {rate: 0.01}
        epochs: how long to train; short for changes.epochs
        model_arguments: what the model function is called with, besides the classes and channels of the data
        method_arguments: further arguments of the method, such as {repeat: split} of batch-ensemble
        storage: how weights are stored in the file; what that costs is shown
        root: where data sets are kept
        device: auto, cpu, cuda, …
        quiet: no progress

    """
    folder = out or Path("runs") / "-".join([dataset, model, method, str(seed)]).replace(":", ".")
    own = {"prune": prune, "memory": memory, "scope": scope, "selection": selection}
    arguments = {name: value for name, value in own.items() if value is not None} | (method_arguments or {})
    changed = {**(changes or {}), **({} if epochs is None else {"epochs": epochs})}
    config = {
        "dataset": dataset,
        "model": model,
        "model_arguments": model_arguments or {},
        "method": method,
        "members": members,
        "method_arguments": arguments,
        "seed": seed,
        "recipe": recipe,
        "changes": changed,
        "storage": storage,
    }
    how = Recipe.named(recipe, **changed)
    make = find_function("method", method, METHODS)
    data = read_data(dataset, root, seed)
    torch.manual_seed(seed)
    network = build_model(model, **fitting_arguments(model, data, model_arguments or {}))
    with processes():
        done = gather(open_run(folder, config) if rank() == 0 else None)[0]
        if done is None:
            start = time.perf_counter()
            ensemble = make(
                network,
                data,
                members=members,
                recipe=how,
                seed=seed,
                device=device,
                folder=folder,
                quiet=quiet,
                **arguments,
            )
            if rank() == 0:
                done = close_run(folder, ensemble, data, time.perf_counter() - start, storage)
        elif rank() == 0:
            print(f"{folder} is done already")
        if rank() > 0 or done is None:
            return 0
    columns = {method: done["figures"]}
    if storage != "float32":
        columns = {f"{method}, in float32": done["figures_in_float32"], f"as stored, in {storage}": done["figures"]}
    print(figures_table(columns))
    print(f"\n{done['seconds']:.0f} s; see {folder}. Next: sens evaluate {folder}, sens predict {folder} IMAGE")
    return 0


def read_data(dataset: str, root: Path | None, seed: int) -> Data:
    if ":" in dataset:
        return find_function("dataset", dataset, {})()  # type: ignore[no-any-return]
    return load_data(dataset, root, seed=seed)


def fitting_arguments(model: str, data: Data, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that follow from the data, for a model of the zoo; a user's own function gets what it was given."""
    if ":" in model:
        return given
    shape = data.shape
    fitting: dict[str, Any] = {"num_classes": data.num_classes or 1}
    if model == "mlp":
        fitting["in_features"] = int(torch.tensor(shape).prod())
    else:
        fitting["in_channels"] = shape[0]
    return fitting | given
