"""draw_pictures(): all charts that finished runs allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from torch import Tensor

from structured_ensembles.evaluation.corruptions import ORIGIN, SEVERITIES
from structured_ensembles.evaluation.discarding import discarding_curve
from structured_ensembles.evaluation.robustness import best_source, is_over_all
from structured_ensembles.report.figures import draw_kept_neurons, draw_reliability_of_confidence
from structured_ensembles.report.front import FrontPoint, draw_front
from structured_ensembles.report.run_figures import (
    draw_corruption_curves,
    draw_disagreement,
    draw_discarding_curves,
    draw_entropy_histograms,
    draw_learning_curves,
    draw_overheads,
)
from structured_ensembles.runs.finished import Finished
from structured_ensembles.runs.folder import read_history, read_subnets


@dataclass(frozen=True)
class Picture:
    """Figure with a name for its file and a caption."""

    name: str
    figure: Figure
    caption: str


def draw_pictures(runs: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    """Draw the runs on one data set and network, by label; one run per seed."""
    drawn = [*_draw_all(runs), *_draw_samples(runs)]
    structured = next(
        (seed_runs[0] for seed_runs in runs.values() if seed_runs[0].config["method"] == "structured"), None
    )
    if structured is not None:
        drawn += _draw_one(structured)
    return drawn


def _draw_all(runs: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    """Draw memory, the front and corruptions of all runs."""
    drawn = []
    overheads = {label: figures_of(seed_runs, "size/overhead") for label, seed_runs in runs.items()}
    if known := {label: values for label, values in overheads.items() if values}:
        drawn.append(
            Picture("overhead", draw_overheads(known), "Parameters of the whole ensemble over those of one network.")
        )
    for memory, caption in (("parameters", "float32 parameters"), ("file", "bytes of the saved file")):
        if points := list_front_points(runs, memory):
            text = f"Quality against memory ({caption}, one network is 1): the first 1, 2, … members of every ensemble."
            drawn.append(Picture(f"front-{memory}", draw_front(points, memory), text))
    curves, origin = collect_corruptions(runs)
    if curves:
        text = f"Mean accuracy over the 15 standard corruptions; 0 is clean. {origin}"
        drawn.append(Picture("corruptions", draw_corruption_curves(curves), text))
    return drawn


def _draw_samples(runs: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    """Draw reliability and discarding from the samples of each first seed."""
    first = {label: seed_runs[0].samples for label, seed_runs in runs.items() if seed_runs[0].samples}
    if not first:
        return []
    reliable = [(label, samples["confidence"], samples["correct"]) for label, samples in first.items()]
    curves = {label: discarding_curve(samples["entropy"], samples["correct"]) for label, samples in first.items()}
    return [
        Picture("reliability", draw_reliability_of_confidence(reliable), "Accuracy against confidence, first seed."),
        Picture(
            "discarding", draw_discarding_curves(curves), "Accuracy of what is kept when the least sure are discarded."
        ),
    ]


def _draw_one(run: Finished) -> list[Picture]:
    """Draw the first seed of the structured ensemble alone."""
    drawn, samples = [], run.samples
    if samples:
        text = "Entropy of predictions."
        text += " Corrupted: under strong Gaussian noise (severity 5)." if "noisy" in samples else ""
        drawn.append(Picture("entropy", draw_entropy_histograms(split_entropies(samples), None), text))
        if len(samples["disagreement"]) > 1:
            drawn.append(
                Picture(
                    "disagreement",
                    draw_disagreement(samples["disagreement"]),
                    "Share of samples that two members see differently.",
                )
            )
    if subnets := read_subnets(run.folder, run.result):
        drawn.append(Picture("kept", draw_kept_neurons(subnets), "What each member keeps, layer by layer; dark: kept."))
    rows = read_history(run.folder, run.result)
    if len({row["epoch"] for row in rows}) > 1:
        drawn.append(
            Picture("learning", draw_learning_curves(rows), "Training of the structured ensemble, first seed.")
        )
    return drawn


def split_entropies(samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split the entropies of a run's samples by outcome: "right", "wrong" and, where measured, "corrupted"."""
    right = samples["correct"].bool()
    entropies = {"right": samples["entropy"][right], "wrong": samples["entropy"][~right]}
    return entropies | ({"corrupted": samples["noisy"]} if "noisy" in samples else {})


def list_front_points(runs: Mapping[str, Sequence[Finished]], memory: str) -> list[FrontPoint]:
    """Return the quality of the first 1, 2, … members of each ensemble against their memory."""
    single = next((seed_runs for seed_runs in runs.values() if seed_runs[0].config["method"] == "single"), None)
    unit = None if single is None else single[0].figures.get("size/file_bytes")
    points = []
    for label, seed_runs in runs.items():
        figures = seed_runs[0].figures
        overhead = figures.get("size/overhead")
        if memory == "file":
            overhead = figures["size/file_bytes"] / unit if unit and "size/file_bytes" in figures else None
        if overhead is None:
            continue
        members = figures.get("size/members", 0.0)
        is_shared = seed_runs[0].config["method"] in ("batch-ensemble", "mc-dropout")  # all members share one network
        for number in [
            number
            for number in _list_member_numbers(figures)
            if number == members or (number < members and not is_shared)
        ]:
            quality = {name: figures_of(seed_runs, f"first/{number}/{name}") for name in ("accuracy", "nll", "ece")}
            if all(quality.values()):
                share = 1.0 if is_shared else number / members
                points.append(FrontPoint(label, f"N={number}", overhead * share, **quality))
    return points


def _list_member_numbers(figures: Mapping[str, float]) -> list[int]:
    """List the numbers 1, 2, … of members with figures: `first/1/accuracy` and so on."""
    names = [name.split("/") for name in figures if name.startswith("first/") and name.endswith("/accuracy")]
    return sorted(int(words[1]) for words in names if words[1].isdecimal() and int(words[1]) > 0)


def collect_corruptions(runs: Mapping[str, Sequence[Finished]]) -> tuple[dict[str, dict[int, list[float]]], str]:
    """Collect the accuracies under corruptions by label and severity, and say where the images are from."""
    all_figures = [run.figures for seed_runs in runs.values() for run in seed_runs]
    family = "official" if any(best_source(all_figures, severity) == "official" for severity in SEVERITIES) else "cor"
    curves = {label: _accuracies_by_severity(seed_runs, family) for label, seed_runs in runs.items()}
    origin = "The official corrupted images." if family == "official" else ORIGIN
    return {label: curve for label, curve in curves.items() if len(curve) > 1}, origin


def _accuracies_by_severity(runs: Sequence[Finished], family: str) -> dict[int, list[float]]:
    """Collect the mean accuracies at each severity; family: "cor", computed by our code, or "official"."""
    by_severity = {0: figures_of(runs, "cls/accuracy")}
    for severity in SEVERITIES:
        complete = [run for run in runs if is_over_all(run.figures, severity, family)]
        if values := figures_of(complete, f"{family}/mean@{severity}"):
            by_severity[severity] = values
    return by_severity


def figures_of(runs: Sequence[Finished], name: str) -> list[float]:
    """Collect a figure of those runs that have it."""
    return [run.figures[name] for run in runs if name in run.figures]
