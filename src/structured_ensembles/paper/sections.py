"""Sections of the queue: all runs of the paper's studies and of the front, in the order of their value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from structured_ensembles.continual.experiment import ContinualExperiment
from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.estimates import estimate_minutes
from structured_ensembles.paper.studies import EVERYTHING, NOTHING_MORE, RIVALS, SEEDS, StudyOptions
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.measurement import Request

Run = Experiment | ContinualExperiment


@dataclass(frozen=True)
class Planned:
    """Planned run of the queue: its section, its experiment, its measurements.

    correction: of the estimated time, see `follow_measured_times`.
    """

    section: str
    experiment: Run
    request: Request = NOTHING_MORE
    correction: float = 1.0

    @property
    def name(self) -> str:
        """Return its folder below `results/`."""
        return f"{self.section}/{self.experiment.folder}"

    @property
    def minutes(self) -> float:
        """Return the estimated minutes."""
        return estimate_minutes(self.experiment, self.request, self.correction)


def plan_runs(seeds: tuple[int, ...] = SEEDS, smoke: bool = False) -> list[Planned]:
    """List every run once, the most valuable first; within a section seed by seed.

    smoke: a few runs on digits instead, minutes on a CPU.
    """
    known: dict[str, Planned] = {}
    for section, experiments, request in _trial(seeds) if smoke else _sections(seeds):
        for experiment in sorted(experiments, key=lambda run: run.seed):
            known.setdefault(experiment.folder, Planned(section, experiment, request))
    return list(known.values())


def _sections(seeds: tuple[int, ...]) -> Iterator[tuple[str, list[Run], Request]]:
    """Yield the name, the experiments and the measurements of every section, the most valuable first."""
    methods = (*RIVALS, "random", "narrow")

    def table(dataset: str, model: str, methods: tuple[str, ...] = methods) -> list[Run]:
        options = StudyOptions(datasets=(dataset,), models=(model,), methods=methods, seeds=seeds)
        return study("table-accuracy", options).experiments

    def front(dataset: str) -> list[Run]:
        return study("front", StudyOptions(datasets=(dataset,), seeds=seeds)).experiments

    def continual(dataset: str, methods: tuple[str, ...] | None = None) -> list[Run]:
        options = StudyOptions(datasets=(dataset,), methods=methods, seeds=seeds)
        return study("table-continual", options).experiments

    def complete(name: str) -> list[Run]:
        return study(name, StudyOptions(seeds=seeds)).experiments

    yield "cifar10-resnet20", table("cifar10", "resnet20"), EVERYTHING
    # What targets compare comes before the rest of its section: they tell most for their time.
    yield "check-resnet18", [ABSOLUTE_CHECK], NOTHING_MORE
    yield "front-cifar10", [run for run in front("cifar10") if _is_central(run)], NOTHING_MORE
    for dataset in ("cifar10", "cifar100"):
        yield f"split-{dataset}", continual(dataset, ("structured",)), NOTHING_MORE
    ceiling = study("subsets", StudyOptions())
    yield "subsets-cifar10", ceiling.experiments, ceiling.request
    yield "front-cifar100", [run for run in front("cifar100") if _is_central(run)], NOTHING_MORE
    yield "front-cifar10", front("cifar10"), NOTHING_MORE
    yield "front-cifar100", front("cifar100"), NOTHING_MORE
    yield "front-wide-resnet20", wide_front(seeds), NOTHING_MORE
    star = study("defaults", StudyOptions(seeds=seeds))
    by_others = {run.folder for run in star.experiments if run.method in ("single", "deep") and _is_changed(run)}
    yield "defaults-cifar10", [run for run in star.experiments if run.folder not in by_others], star.request
    yield "defaults-cifar10", [run for run in star.experiments if run.folder in by_others], star.request
    tuned = tuned_members(seeds)
    yield "tuned-wide-resnet20", tuned[: 3 * len(seeds)], NOTHING_MORE  # what is promised, in all seeds, first
    yield "tuned-wide-resnet20", tuned[3 * len(seeds) :], NOTHING_MORE
    yield "pruning", complete("table-pruning"), NOTHING_MORE
    yield "initialization", complete("table-initialization"), NOTHING_MORE
    for dataset, model in (
        ("cifar100", "resnet20"), ("svhn", "resnet20"), ("cifar10", "vgg11"), ("cifar100", "vgg11"), ("svhn", "vgg11"),
    ):  # fmt: skip
        yield f"{dataset}-{model}", table(dataset, model), NOTHING_MORE
    for dataset in ("cifar100", "mnist", "cifar10"):
        yield f"split-{dataset}", continual(dataset), NOTHING_MORE
    yield "continual-ablation", complete("table-continual-ablation"), NOTHING_MORE
    yield "continual-pruning", complete("figure-continual-pruning"), NOTHING_MORE
    yield "wrn28-10", wide_resnets(seeds), NOTHING_MORE
    yield "cifar10-resnet20-magnitude", table("cifar10", "resnet20", ("magnitude",)), EVERYTHING
    for model in ("resnet32", "vgg16"):
        yield f"tiny-imagenet-{model}", table("tiny-imagenet", model), NOTHING_MORE


def _is_central(run: Run) -> bool:
    """Tell whether a run belongs to the centre of a front: four members in the memory of one, and what they rival."""
    if not isinstance(run, Experiment):
        return False
    return run.method == "single" or (run.members == 4 and run.method_arguments.get("memory", 1.0) == 1.0)


def _is_changed(experiment: Run) -> bool:
    """Tell whether a run of the study of defaults has a changed recipe, besides keeping its last epoch."""
    return isinstance(experiment, Experiment) and set(experiment.changes) != {"keep"}


def _trial(seeds: tuple[int, ...]) -> Iterator[tuple[str, list[Run], Request]]:
    """Yield the sections of a smoke test on digits."""
    options = StudyOptions(methods=("single", "structured"), seeds=seeds, smoke=True)
    yield "digits-lenet5", study("table-accuracy", options).experiments, EVERYTHING
    yield (
        "split-digits",
        study("table-continual", StudyOptions(methods=("naive",), seeds=seeds, smoke=True)).experiments,
        NOTHING_MORE,
    )


# The usual training of ResNet18 reaches 95.3 %: if ours does not, its other figures mean nothing.
ABSOLUTE_CHECK = Experiment(
    "cifar10", "resnet18", "single", 0, 1, changes={"epochs": 200, "keep": "last"}, validation=False
)


def wide_front(seeds: tuple[int, ...]) -> list[Run]:
    """List the runs at the centre of the front with a ResNet20 four times as wide."""
    rows = [
        ("single", 1, {}), ("structured", 4, {"memory": 1.0, "coupled": True}), ("structured", 4, {"memory": 1.0}),
        ("deep", 4, {}),
    ]  # fmt: skip
    return [
        Experiment("cifar10", "resnet20", method, seed, members, {"width": 4}, arguments)
        for seed in seeds
        for method, members, arguments in rows
    ]


def tuned_members(seeds: tuple[int, ...]) -> list[Run]:
    """List the runs on a trained network: members tuned for 10 epochs after 30 of the base, or trained from scratch.

    The base is a ResNet20 four times as wide. From scratch, members have either as many epochs as base and members
    after each other, 40, or as many as all networks together: (30 + 4 · 10) / 4. The one network has 40, too. The best
    epoch is chosen on validation data, and nothing by the figures of the test split.
    The first three rows, each with all seeds, are the comparison that matters most.
    """
    total, tuned, members = 40, 10, 4
    equal_cost = round((total - tuned + members * tuned) / members)
    half: dict[str, Any] = {"prune": 0.5}
    rows: list[tuple[str, int, dict[str, Any], int]] = [
        ("single", 1, {}, total),
        ("prune-and-tune", members, {**half, "tune_epochs": tuned}, total),
        ("random", members, half, total),
        ("random", members, half, equal_cost),
        ("prune-and-tune", members, {**half, "selection": "random", "tune_epochs": tuned}, total),
        ("prune-and-tune", 2, {**half, "tune_epochs": tuned}, total),
        ("random", 2, half, total),
    ]
    return [
        Experiment("cifar10", "resnet20", method, seed, number, {"width": 4}, arguments, changes={"epochs": epochs})
        for method, number, arguments, epochs in rows
        for seed in seeds
    ]


def wide_resnets(seeds: tuple[int, ...]) -> list[Run]:
    """List the runs of WRN-28-10 for 40 epochs: one, four in the memory of one, and four."""
    rows = [("single", 1, {}), ("structured", 4, {"memory": 1.0}), ("deep", 4, {})]
    return [
        Experiment(dataset, "wrn28_10", method, seed, members, {}, arguments, changes={"epochs": 40})
        for seed in seeds
        for dataset in ("cifar10", "cifar100")
        for method, members, arguments in rows
    ]
