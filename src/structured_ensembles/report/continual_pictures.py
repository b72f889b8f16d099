"""draw_continual_pictures(): all charts that finished runs of continual learning allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from structured_ensembles.continual.figures import draw_capacity
from structured_ensembles.continual.results import rebuild_capacity, rebuild_matrix, rebuild_memory
from structured_ensembles.report.continual_figures import draw_accuracy_against_memory, draw_accuracy_by_prune
from structured_ensembles.report.pictures import Picture
from structured_ensembles.runs.finished import Finished


def draw_continual_pictures(runs: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    """Draw the runs on one data set and backbone, by label; one run per seed."""
    pictures = []
    methods = {seed_runs[0].config["method"] for seed_runs in runs.values()}
    if len(methods) > 1:
        known = {
            label: ([run.figures["cl/accuracy"] for run in seed_runs], rebuild_memory(seed_runs[0].result))
            for label, seed_runs in runs.items()
        }
        text = "Accuracy against what a method stores besides one backbone and the heads; mean and range over seeds."
        pictures.append(Picture("memory", draw_accuracy_against_memory(known), text))
    shares = collect_by_prune(runs)
    if len(shares) > 1:
        pictures.append(
            Picture("prune", draw_accuracy_by_prune(shares), "Accuracy against the share of pruned neurons.")
        )
    for label, seed_runs in runs.items():
        matrix = rebuild_matrix(seed_runs[0].result)
        text = f"{label}: accuracy on every task after every task, first seed."
        pictures.append(Picture(f"matrix-{label.replace(', ', '-')}", matrix.figure(), text))
    structured = next(
        (seed_runs[0] for seed_runs in runs.values() if seed_runs[0].config["method"] == "structured"), None
    )
    capacity = None if structured is None else rebuild_capacity(structured.result)
    if capacity is not None:
        pictures.append(Picture("capacity", draw_capacity(capacity), "Neurons that each task took, first seed."))
    return pictures


def collect_by_prune(runs: Mapping[str, Sequence[Finished]]) -> dict[float, list[float]]:
    """Collect the accuracies by the share of pruned neurons, that of a default too.

    Runs that differ in anything else make another chart: the result is of those that have the most shares.
    """
    charts: dict[str, dict[float, list[float]]] = {}
    for seed_runs in runs.values():
        config, resolved = seed_runs[0].config, seed_runs[0].result.get("resolved")
        arguments = resolved.get("method_arguments") if isinstance(resolved, Mapping) else None
        settings = {**config["method_arguments"], **(arguments if isinstance(arguments, Mapping) else {})}
        prune = settings.pop("prune", None)
        if isinstance(prune, int | float):
            alike = charts.setdefault(f"{config['method']} {sorted(settings.items(), key=str)}", {})
            alike[float(prune)] = [run.figures["cl/accuracy"] for run in seed_runs]
    return max(charts.values(), key=len, default={})
