"""continual_pictures(): draw all figures that finished runs of continual learning allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from structured_ensembles.continual.figures import capacity_used
from structured_ensembles.continual.results import rebuild_capacity, rebuild_matrix, rebuild_memory
from structured_ensembles.report.continual_figures import accuracy_against_memory, accuracy_by_prune
from structured_ensembles.report.pictures import Picture
from structured_ensembles.runs.finished import Finished


def continual_pictures(runs: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    """Of the runs on one data set and backbone, by label; one run per seed."""
    found = []
    methods = {own[0].config["method"]: own for own in runs.values()}
    if len(methods) > 1:
        known = {
            label: ([run.figures["cl/accuracy"] for run in own], rebuild_memory(own[0].result))
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
        matrix = rebuild_matrix(own[0].result)
        text = f"{label}: accuracy on every task after every task, first seed."
        found.append(Picture(f"matrix-{label.replace(', ', '-')}", matrix.figure(), text))
    structured = next((own[0] for own in runs.values() if own[0].config["method"] == "structured"), None)
    capacity = None if structured is None else rebuild_capacity(structured.result)
    if capacity is not None:
        found.append(Picture("capacity", capacity_used(capacity), "Neurons that each task took, first seed."))
    return found
