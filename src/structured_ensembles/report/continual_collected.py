"""Finished runs of continual learning, and the figures that can be made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from structured_ensembles.continual.figures import capacity_used
from structured_ensembles.continual.results import capacity_of, matrix_of, memory_of, read_continual_result
from structured_ensembles.report.collected import Finished, Picture
from structured_ensembles.report.continual_figures import accuracy_against_memory, accuracy_by_prune
from structured_ensembles.runs.folder import read_config


def is_continual(folder: Path) -> bool:
    """Whether a run folder is one of `sens continual`."""
    return "tasks" in read_config(folder)


def read_continual_run(folder: Path) -> Finished:
    """A folder that `sens continual` or `sens reproduce` has filled; its figures begin with `cl/`."""
    config, result = read_config(folder), read_continual_result(folder)
    return Finished(folder, config, result, {f"cl/{name}": value for name, value in result["figures"].items()})


def continual_pictures(runs: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    """Of the runs on one data set and backbone, by label; one run per seed."""
    found = []
    methods = {own[0].config["method"]: own for own in runs.values()}
    if len(methods) > 1:
        known = {
            label: ([run.figures["cl/accuracy"] for run in own], memory_of(own[0].result))
            for label, own in runs.items()
        }
        text = "Accuracy against what a method stores besides one backbone and the heads; mean and range over seeds."
        found.append(Picture("memory", accuracy_against_memory(known), text))
    shares = {
        float(prune): [run.figures["cl/accuracy"] for run in own]
        for own in runs.values()
        if isinstance(prune := own[0].config["method_arguments"].get("prune"), int | float)
    }
    if len(shares) > 1:
        found.append(Picture("prune", accuracy_by_prune(shares), "Accuracy against the share of pruned neurons."))
    for label, own in runs.items():
        matrix = matrix_of(own[0].result)
        text = f"{label}: accuracy on every task after every task, first seed."
        found.append(Picture(f"matrix-{label.replace(', ', '-')}", matrix.figure(), text))
    structured = next((own[0] for own in runs.values() if own[0].config["method"] == "structured"), None)
    capacity = None if structured is None else capacity_of(structured.result)
    if capacity is not None:
        found.append(Picture("capacity", capacity_used(capacity), "Neurons that each task took, first seed."))
    return found
