"""Experiments: a data set, a network, a method and a seed; trained once in a folder, evaluated any number of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from structured_ensembles.common.checks import check_seed, check_whole
from structured_ensembles.common.devices import pick_device
from structured_ensembles.common.processes import gather, rank
from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.methods import METHODS
from structured_ensembles.runs.folder import (
    close_run,
    open_run,
)
from structured_ensembles.runs.ingredients import (
    add_data_arguments,
    read_data,
)
from structured_ensembles.runs.settings import (
    Defaults,
    check_method_arguments,
    make_folder_name,
    read_defaults,
    takes_execution,
)
from structured_ensembles.runs.stopwatch import Stopwatch, run_stopwatch
from structured_ensembles.storage.weight_encoding import Storage
from structured_ensembles.training import Execution, Recipe
from structured_ensembles.training.mesh import join_processes
from structured_ensembles.training.recipe import default_recipe_name
from structured_ensembles.zoo.by_name import build_model, find_function, find_model

BACKBONE = "_backbone"  # the end of the names of networks without a head


@dataclass(frozen=True)
class Experiment:
    """Settings that determine the figures of a run.

    dataset, model, method: names, or `package.module:function`. limit: the largest number of training samples.
    validation: False trains on the validation samples too; then no best epoch is chosen and nothing is calibrated.
    recipe: the name of one, or "auto" for the task's usual one. changes: fields of it that are changed.
    execution: how training is computed. `config.yaml` has all of it, unless it is the default.
    storage: how weights are stored in the ensemble's file.
    """

    dataset: str
    model: str
    method: str
    seed: int = 0
    members: int = 5
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    method_arguments: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = "modern"
    changes: Mapping[str, Any] = field(default_factory=dict)
    storage: Storage = "float32"
    limit: int | None = None
    validation: bool = True
    execution: Execution = field(default_factory=Execution)

    def config(self) -> dict[str, Any]:
        """Return the contents of `config.yaml`; settings added later are left out at their defaults."""
        config = {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(self).items()}
        config["execution"] = self.execution.to_dict()
        defaults = {"limit": None, "validation": True, "execution": Execution().to_dict()}
        return {name: value for name, value in config.items() if name not in defaults or value != defaults[name]}

    @property
    def folder(self) -> str:
        """Return a name for its run folder that no other experiment has."""
        words = [self.dataset, self.model, self.method, f"{self.members}x"]
        recipe, execution = {"recipe": self.recipe}, self.execution.changes()
        for settings in (self.model_arguments, self.method_arguments, recipe, self.changes, execution):
            words += [f"{name}={value}" for name, value in settings.items()]
        words += [] if self.storage == "float32" else [f"storage={self.storage}"]
        words += [] if self.limit is None else [f"limit={self.limit}"]
        words += [] if self.validation else ["all-images"]
        return "-".join([*words, str(self.seed)]).replace(":", ".").replace("/", ".").replace(" ", "")


@dataclass(frozen=True)
class Prepared:
    """Checked experiment with its method, data, network and recipe; the recipe is no longer "auto"."""

    experiment: Experiment
    make: Callable[..., Ensemble]
    data: Data
    network: nn.Module
    recipe: Recipe
    device: str
    defaults: Defaults

    @property
    def folder(self) -> str:
        """Return a name for its run folder: data set, model, method, non-default settings, seed."""
        experiment = self.experiment
        config = experiment.config()
        changed: dict[str, Any] = {}
        changed |= {"members": experiment.members} if experiment.members != Experiment.members else {}
        changed |= {f"model.{name}": value for name, value in self.defaults.changed(config, "model_arguments").items()}
        changed |= self.defaults.changed(config, "method_arguments")
        changed |= {"recipe": experiment.recipe} if experiment.recipe != default_recipe_name(self.data.task) else {}
        settings = [(name, "recipe", value) for name, value in self.defaults.changed(config, "changes").items()]
        settings += [(name, "execution", value) for name, value in experiment.execution.changes().items()]
        for name, family, value in sorted(settings):  # sorted together, as when all were settings of the recipe
            changed[f"{family}.{name}" if name in changed else name] = value
        changed |= {"storage": experiment.storage} if experiment.storage != Experiment.storage else {}
        changed |= {"limit": experiment.limit} if experiment.limit is not None else {}
        changed |= {} if experiment.validation else {"validation": False}
        return make_folder_name([experiment.dataset, experiment.model, experiment.method], changed, experiment.seed)

    @property
    def resolved(self) -> dict[str, Any]:
        """Return every setting that training used, for `result.json`; `config.yaml` lacks the defaults."""
        arguments = self.defaults.resolved(self.experiment.config())
        return {**arguments, "recipe": self.recipe.to_dict(), "execution": self.experiment.execution.to_dict()}


def prepare_experiment(experiment: Experiment, *, root: Path | None = None, device: str = "auto") -> Prepared:
    """Check all arguments of an experiment before any work, and read its data."""
    automatic = experiment.recipe == "auto"
    Recipe.named("modern" if automatic else experiment.recipe, **experiment.changes)  # raises if it is wrong
    check_whole("members", experiment.members)
    check_seed(experiment.seed)
    make = find_function("method", experiment.method, METHODS)
    if experiment.model.replace("-", "_").endswith(BACKBONE) and ":" not in experiment.model:
        whole = experiment.model[: -len(BACKBONE)]
        raise ValueError(f"model must have a head: {experiment.model!r} is for `sens continual`, use {whole!r} here")
    check_method_arguments(experiment.method, make, experiment.method_arguments)
    if experiment.execution != Execution() and not takes_execution(make):
        raise ValueError(
            f"execution must be left out, or method {experiment.method!r} must take execution=: it would ignore "
            f"{experiment.execution}"
        )
    data = read_data(experiment.dataset, root, experiment.seed, experiment.limit, experiment.validation)
    data.split("test")  # raises without one: figures are measured there
    if automatic:
        experiment = replace(experiment, recipe=default_recipe_name(data.task))
    torch.manual_seed(experiment.seed)
    arguments = add_data_arguments(experiment.model, data, experiment.model_arguments)
    network = build_model(experiment.model, **arguments)
    defaults = Defaults(
        model_arguments=read_defaults(find_model(experiment.model)) | add_data_arguments(experiment.model, data, {}),
        method_arguments=read_defaults(make),
        changes=Recipe.named(experiment.recipe).to_dict(),
    )
    recipe = Recipe.named(experiment.recipe, **experiment.changes)
    pick_device(device, network)  # raises if it is wrong
    return Prepared(experiment, make, data, network, recipe, device, defaults)


def train_experiment(
    experiment: Experiment, folder: Path, *, root: Path | None = None, device: str = "auto", quiet: bool = False
) -> tuple[dict[str, Any], bool]:
    """Train an experiment, or resume it in its folder; return the results, and whether there was anything to do.

    In a group of processes (`torchrun`), all take part and the first one writes.
    """
    return train_prepared(prepare_experiment(experiment, root=root, device=device), folder, quiet=quiet)


def train_prepared(prepared: Prepared, folder: Path, *, quiet: bool = False) -> tuple[dict[str, Any], bool]:
    """Train a checked experiment, as `train_experiment` does."""
    experiment = prepared.experiment
    with join_processes(), _open_in_first_process(prepared, folder) as result:
        done = gather(result)[0]
        if done is not None:
            return done, False
        execution = {"execution": experiment.execution} if takes_execution(prepared.make) else {}
        with run_stopwatch(folder) if rank() == 0 else nullcontext(Stopwatch()) as watch:
            ensemble = prepared.make(
                prepared.network,
                prepared.data,
                members=experiment.members,
                recipe=prepared.recipe,
                seed=experiment.seed,
                device=prepared.device,
                folder=folder,
                quiet=quiet,
                **execution,
                **experiment.method_arguments,
            )
            seconds = watch.seconds
        if rank() == 0:
            precision = experiment.execution.precision_on(pick_device(prepared.device, prepared.network))
            done = close_run(folder, ensemble, prepared.data, seconds, experiment.storage, precision, prepared.resolved)
        return gather(done)[0], True


@contextmanager
def _open_in_first_process(prepared: Prepared, folder: Path) -> Iterator[dict[str, Any] | None]:
    """Open the run folder in the first of several processes, see `open_run`."""
    if rank() > 0:
        yield None
        return
    with open_run(folder, prepared.experiment.config(), prepared.defaults.comparable) as result:
        yield result
