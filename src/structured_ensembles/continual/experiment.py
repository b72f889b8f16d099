"""Continual experiments: a data set split into tasks, a backbone, a learner and a seed; run in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from structured_ensembles import zoo
from structured_ensembles.continual import LEARNERS
from structured_ensembles.continual.learner import Learner
from structured_ensembles.continual.matrix import AccuracyMatrix
from structured_ensembles.continual.owning import OwningLearner
from structured_ensembles.continual.results import check_continual_result
from structured_ensembles.continual.sequence import run_sequence
from structured_ensembles.continual.tasks import BENCHMARKS, Task, check_samples, split_tasks
from structured_ensembles.data import Data
from structured_ensembles.runs.folder import open_run
from structured_ensembles.runs.ingredients import add_data_arguments, check_dataset_name, read_data
from structured_ensembles.runs.machine import describe_machine
from structured_ensembles.runs.settings import Defaults, check_arguments, make_folder_name, read_defaults
from structured_ensembles.runs.stopwatch import ELAPSED, run_stopwatch
from structured_ensembles.storage.files import write_atomically
from structured_ensembles.storage.run_files import write_json
from structured_ensembles.zoo.by_name import build_model, find_function, find_model


@dataclass(frozen=True)
class ContinualExperiment:
    """Settings that determine the figures of a run.

    tasks: by default as many as the benchmark has. limit: the largest number of training samples.
    """

    dataset: str
    model: str
    method: str
    seed: int = 0
    tasks: int | None = None
    shuffle_labels: bool = False
    model_arguments: Mapping[str, Any] = field(default_factory=dict)
    method_arguments: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None

    def config(self) -> dict[str, Any]:
        """Return the contents of `config.yaml`."""
        usual = BENCHMARKS.get(self.dataset)
        tasks = self.tasks if usual is None or self.tasks is not None else usual.tasks
        if tasks is None:
            known = ", ".join(BENCHMARKS)
            raise ValueError(
                f"tasks must be given for {self.dataset!r}, by sens continual --tasks: only {known} have a usual number"
            )
        config = {**vars(self), "tasks": tasks, "model_arguments": dict(self.model_arguments)}
        config["method_arguments"] = {"epochs": _usual_epochs(self.dataset), **self.method_arguments}
        return {name: value for name, value in config.items() if not (name == "limit" and value is None)}

    @property
    def folder(self) -> str:
        """Return a name for its run folder that no other experiment has."""
        config = self.config()
        words = ["continual", self.dataset, f"{config['tasks']}t", self.model, self.method]
        for settings in (config["model_arguments"], config["method_arguments"]):
            words += [f"{name}={value}" for name, value in settings.items()]
        words += ["shuffled"] if self.shuffle_labels else []
        words += [] if self.limit is None else [f"limit={self.limit}"]
        return "-".join([*words, str(self.seed)]).replace(":", ".").replace("/", ".").replace(" ", "")


@dataclass(frozen=True)
class PreparedSequence:
    """Checked continual experiment with its learner and tasks."""

    experiment: ContinualExperiment
    learner: Learner
    tasks: list[Task]
    defaults: Defaults

    @property
    def folder(self) -> str:
        """Return a name for its run folder: data set, model, method, non-default settings, seed."""
        experiment, config = self.experiment, self.experiment.config()
        usual = BENCHMARKS.get(experiment.dataset)
        changed: dict[str, Any] = {}
        changed |= {} if usual is not None and config["tasks"] == usual.tasks else {"tasks": config["tasks"]}
        changed |= {f"model.{name}": value for name, value in self.defaults.changed(config, "model_arguments").items()}
        changed |= self.defaults.changed(config, "method_arguments")
        changed |= {"shuffled": True} if experiment.shuffle_labels else {}
        changed |= {"limit": experiment.limit} if experiment.limit is not None else {}
        return make_folder_name(
            ["continual", experiment.dataset, experiment.model, experiment.method], changed, experiment.seed
        )


def prepare_continual(
    experiment: ContinualExperiment, *, root: Path | None = None, device: str = "auto", quiet: bool = False
) -> PreparedSequence:
    """Check all arguments of an experiment before any work, read its data and build its learner."""
    check_dataset_name(experiment.dataset)
    config = experiment.config()
    make = find_function("method", experiment.method, LEARNERS, "class")
    reserved = ("backbone", "seed", "device", "quiet")
    check_arguments(f"method {experiment.method!r}", make, config["method_arguments"], reserved)
    data = read_data(experiment.dataset, root, experiment.seed, experiment.limit)
    tasks = split_tasks(data, config["tasks"], experiment.shuffle_labels, experiment.seed)
    check_samples(tasks)
    torch.manual_seed(experiment.seed)
    arguments = _backbone_arguments(experiment.model, data, experiment.model_arguments)
    backbone = build_model(find_backbone_name(experiment.model), **arguments)
    learner: Learner = make(backbone, seed=experiment.seed, device=device, quiet=quiet, **config["method_arguments"])
    defaults = Defaults(
        model_arguments=read_defaults(find_model(find_backbone_name(experiment.model)))
        | _backbone_arguments(experiment.model, data, {}),
        method_arguments=read_defaults(make) | {"epochs": _usual_epochs(experiment.dataset)},
        changes={},
    )
    return PreparedSequence(experiment, learner, tasks, defaults)


def run_continual(
    experiment: ContinualExperiment,
    folder: Path,
    *,
    root: Path | None = None,
    device: str = "auto",
    quiet: bool = False,
) -> tuple[dict[str, Any], bool]:
    """Learn all tasks, or resume in the folder; return the results, and whether there was anything to do."""
    return run_prepared(prepare_continual(experiment, root=root, device=device, quiet=quiet), folder)


def run_prepared(prepared: PreparedSequence, folder: Path) -> tuple[dict[str, Any], bool]:
    """Run a checked experiment, as `run_continual` does."""
    with open_run(folder, prepared.experiment.config(), prepared.defaults.comparable) as done:
        if done is not None:
            check_continual_result(folder, done)
            return done, False
        with run_stopwatch(folder) as watch:
            matrix = run_sequence(prepared.learner, prepared.tasks, folder)
            seconds = watch.seconds
        settings = prepared.defaults.resolved(prepared.experiment.config())
        return _close_run(folder, prepared.learner, matrix, seconds, settings), True


def _backbone_arguments(model: str, data: Data, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Add the arguments that follow from the data, for a network without a head."""
    return {name: value for name, value in add_data_arguments(model, data, arguments).items() if name != "num_classes"}


def _usual_epochs(dataset: str) -> int:
    return BENCHMARKS[dataset].epochs if dataset in BENCHMARKS else 30


def find_backbone_name(model: str) -> str:
    """Return the name of the zoo's backbone for a network that has one; leave a user's function as it is."""
    backbones = [name.removesuffix("_backbone") for name in zoo.__all__ if name.endswith("_backbone")]
    plain = model.replace("-", "_").removesuffix("_backbone")
    if ":" in model:
        return model
    if plain not in backbones:
        raise ValueError(
            f"model must be one of {', '.join(backbones)}, or package.module:function that returns a backbone "
            f"(inputs to pooled features), not {model!r}"
        )
    return f"{plain}_backbone"


def _close_run(
    folder: Path, learner: Learner, matrix: AccuracyMatrix, seconds: float, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the figures and the results; `result.json` comes last and says that the run is done.

    settings: all arguments of backbone and method, the defaults too.
    """
    from structured_ensembles.continual.figures import draw_capacity  # matplotlib takes long to import

    charts = {"accuracy.png": matrix.figure()}
    capacity = None
    if isinstance(learner, OwningLearner):
        capacity_now = learner.capacity()
        charts["capacity.png"] = draw_capacity(capacity_now)
        taken = {name: list(counts) for name, counts in capacity_now.taken.items()}
        capacity = {
            "sizes": dict(capacity_now.sizes),
            "taken": taken,
            "free": capacity_now.free,
            "tasks": list(capacity_now.tasks),
        }
    for name, figure in charts.items():
        write_atomically(folder / name, partial(figure.savefig, format="png", dpi=150))
    result = {
        "figures": matrix.figures,
        "matrix": matrix.to_dict(),
        "memory": learner.memory().to_dict(),
        "capacity": capacity,
        "file_bytes": (folder / "learner.safetensors").stat().st_size,
        "seconds": round(seconds, 3),
        "precision": "float32",  # the only one that `fit` computes in
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **describe_machine(learner.device),
        "resolved": settings,
    }
    write_json(folder / "result.json", result)
    (folder / ELAPSED).unlink(missing_ok=True)
    return result
