"""pictures(): draw all figures that finished runs allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from structured_ensembles.evaluation.corruptions import ORIGIN, SEVERITIES
from structured_ensembles.evaluation.discarding import discarding_curve
from structured_ensembles.evaluation.robustness import best_source, is_over_all
from structured_ensembles.report.figures import kept_neurons, reliability_of
from structured_ensembles.report.run_figures import (
    FrontPoint,
    corruption_curves,
    disagreement,
    discarding_curves,
    entropy_histograms,
    front,
    learning_curves,
    overhead_bars,
)
from structured_ensembles.runs.finished import Finished
from structured_ensembles.runs.folder import read_history, read_subnets


@dataclass(frozen=True)
class Picture:
    """A figure with a name for its file and a sentence that says what it shows."""

    name: str
    figure: Figure
    caption: str


def pictures(runs: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    """All that can be drawn of the runs on one data set and network, by label; one run per seed."""
    found = [*_of_all(runs), *_of_samples(runs)]
    structured = next((own[0] for own in runs.values() if own[0].config["method"] == "structured"), None)
    if structured is not None:
        found += _of_one(structured)
    return found


def _of_all(runs: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    found = []
    overheads = {label: _values(own, "size/overhead") for label, own in runs.items()}
    if known := {label: values for label, values in overheads.items() if values}:
        found.append(
            Picture("overhead", overhead_bars(known), "Parameters of the whole ensemble over those of one network.")
        )
    for memory, caption in (("parameters", "float32 parameters"), ("file", "bytes of the saved file")):
        if points := front_points(runs, memory):
            text = f"Quality against memory ({caption}, one network is 1): the first 1, 2, … members of every ensemble."
            found.append(Picture(f"front-{memory}", front(points, memory), text))
    every = [run.figures for own in runs.values() for run in own]
    kind = "official" if any(best_source(every, severity) == "official" for severity in SEVERITIES) else "cor"
    curves = {label: _severities(own, kind) for label, own in runs.items()}
    if known_curves := {label: curve for label, curve in curves.items() if len(curve) > 1}:
        origin = "The official corrupted images." if kind == "official" else ORIGIN
        text = f"Mean accuracy over the 15 standard corruptions; 0 is clean. {origin}"
        found.append(Picture("corruptions", corruption_curves(known_curves), text))
    return found


def _of_samples(runs: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    first = {label: own[0].samples for label, own in runs.items() if own[0].samples}
    if not first:
        return []
    reliable = [(label, own["confidence"], own["correct"]) for label, own in first.items()]
    curves = {label: discarding_curve(own["entropy"], own["correct"]) for label, own in first.items()}
    return [
        Picture("reliability", reliability_of(reliable), "Accuracy against confidence, first seed."),
        Picture("discarding", discarding_curves(curves), "Accuracy of what is kept when the least sure are discarded."),
    ]


def _of_one(run: Finished) -> list[Picture]:
    """What is drawn of the structured ensemble alone, its first seed."""
    found, samples = [], run.samples
    if samples:
        right = samples["correct"].bool()
        entropies = {"right": samples["entropy"][right], "wrong": samples["entropy"][~right]}
        entropies |= {"corrupted": samples["noisy"]} if "noisy" in samples else {}
        shown = {name: values for name, values in entropies.items() if len(values)}
        text = "Entropy of predictions; corrupted: under strong Gaussian noise (severity 5)."
        found.append(Picture("entropy", entropy_histograms(shown, None), text))
        if len(samples["disagreement"]) > 1:
            found.append(
                Picture(
                    "disagreement",
                    disagreement(samples["disagreement"]),
                    "Share of samples that two members see differently.",
                )
            )
    if subnets := read_subnets(run.folder, run.result):
        found.append(Picture("kept", kept_neurons(subnets), "What each member keeps, layer by layer; dark: kept."))
    rows = read_history(run.folder, run.result)
    if len({row["epoch"] for row in rows}) > 1:
        found.append(Picture("learning", learning_curves(rows), "Training of the structured ensemble, first seed."))
    return found


def front_points(runs: Mapping[str, Sequence[Finished]], memory: str) -> list[FrontPoint]:
    """What the first 1, 2, … members of each ensemble make, against what they weigh."""
    single = next((own for own in runs.values() if own[0].config["method"] == "single"), None)
    unit = None if single is None else single[0].figures.get("size/file_bytes")
    points = []
    for label, own in runs.items():
        figures = own[0].figures
        weight = figures.get("size/overhead")
        if memory == "file":
            weight = figures["size/file_bytes"] / unit if unit and "size/file_bytes" in figures else None
        if weight is None:
            continue
        members = figures.get("size/members", 0.0)
        shared = own[0].config["method"] in ("batch-ensemble", "mc-dropout")  # one network stands for all members
        for number in [
            number for number in _numbers(figures) if number == members or (number < members and not shared)
        ]:
            quality = {name: _values(own, f"first/{number}/{name}") for name in ("accuracy", "nll", "ece")}
            if all(quality.values()):
                share = 1.0 if shared else number / members
                points.append(FrontPoint(label, f"N={number}", weight * share, **quality))
    return points


def _numbers(figures: Mapping[str, float]) -> list[int]:
    """The numbers 1, 2, … of members that figures are known of: `first/1/accuracy` and so on."""
    names = [name.split("/") for name in figures if name.startswith("first/") and name.endswith("/accuracy")]
    return sorted(int(own[1]) for own in names if own[1].isdecimal() and int(own[1]) > 0)


def _severities(runs: Sequence[Finished], kind: str) -> dict[int, list[float]]:
    """Collect the mean accuracies at each severity; kind: "cor", computed by our code, or "official"."""
    found = {0: _values(runs, "cls/accuracy")}
    for severity in SEVERITIES:
        whole = [run for run in runs if is_over_all(run.figures, severity, kind)]
        if values := _values(whole, f"{kind}/mean@{severity}"):
            found[severity] = values
    return found


def _values(runs: Sequence[Finished], name: str) -> list[float]:
    return [run.figures[name] for run in runs if name in run.figures]
