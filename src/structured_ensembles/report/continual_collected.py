"""Finished runs of continual learning, and the figures that can be made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from structured_ensembles.continual.matrix import AccuracyMatrix
from structured_ensembles.continual.memory import Memory
from structured_ensembles.continual.owning import Capacity
from structured_ensembles.records import check_continual
from structured_ensembles.report.collected import Finished, Picture
from structured_ensembles.report.continual_figures import (
    accuracy_against_memory,
    accuracy_by_prune,
    accuracy_matrix,
    capacity_used,
)
from structured_ensembles.runs import read_config, read_result


def is_continual(folder: Path) -> bool:
    """Whether a run folder is one of `sens continual`."""
    return "tasks" in read_config(folder)


def read_continual_result(folder: Path) -> dict[str, Any]:
    """Read the `result.json` of a run of `sens continual` that is done."""
    result = read_result(folder)
    try:
        check_continual(result)
    except ValueError as error:
        raise ValueError(
            f"{folder / 'result.json'} is damaged: {error}; delete it and give the command again"
        ) from error
    return result


def read_continual_run(folder: Path) -> Finished:
    """A folder that `sens continual` or `sens reproduce` has filled; its figures begin with `cl/`."""
    config, result = read_config(folder), read_continual_result(folder)
    return Finished(folder, config, result, {f"cl/{name}": value for name, value in result["figures"].items()})


def continual_pictures(runs: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    """Of the runs on one data set and backbone, by label; one run per seed."""
    found = []
    methods = {own[0].config["method"]: own for own in runs.values()}
    if len(methods) > 1:
        known = {label: ([run.figures["cl/accuracy"] for run in own], _memory(own[0])) for label, own in runs.items()}
        text = "Accuracy against what a method stores besides one backbone and the heads; mean and range over seeds."
        found.append(Picture("memory", accuracy_against_memory(known), text))
    shares = {
        float(prune): [run.figures["cl/accuracy"] for run in own]
        for own in runs.values()
        if isinstance(prune := own[0].config.get("method_arguments", {}).get("prune"), int | float)
    }
    if len(shares) > 1:
        found.append(Picture("prune", accuracy_by_prune(shares), "Accuracy against the share of pruned neurons."))
    for label, own in runs.items():
        matrix = AccuracyMatrix.from_dict(own[0].result["matrix"])
        text = f"{label}: accuracy on every task after every task, first seed."
        found.append(Picture(f"matrix-{label.replace(', ', '-')}", accuracy_matrix(matrix), text))
    structured = next((own[0] for own in runs.values() if own[0].config["method"] == "structured"), None)
    if structured is not None and structured.result.get("capacity") is not None:
        found.append(
            Picture("capacity", capacity_used(_capacity(structured)), "Neurons that each task took, first seed.")
        )
    return found


def _memory(run: Finished) -> Memory:
    names = ("backbone", "factors", "masks", "heads", "stored_masks")
    return Memory(**{name: run.result["memory"][name] for name in names})


def _capacity(run: Finished) -> Capacity:
    kept = run.result["capacity"]
    tasks = tuple(kept.get("tasks", range(len(next(iter(kept["taken"].values()))))))
    return Capacity(tasks, kept["sizes"], {name: tuple(own) for name, own in kept["taken"].items()})
