"""Sections of a page on finished runs of one data set and network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from structured_ensembles.continual.results import rebuild_capacity, rebuild_matrix, rebuild_memory
from structured_ensembles.report.continual_pictures import collect_by_prune
from structured_ensembles.report.pictures import collect_corruptions, figures_of, list_front_points, split_entropies
from structured_ensembles.report.reliability import bin_confidence
from structured_ensembles.report.web.charts import (
    chart_corruptions,
    chart_coverage,
    chart_front,
    chart_kept,
    chart_learning,
    chart_overheads,
    chart_reliability,
)
from structured_ensembles.report.web.continual_charts import chart_capacity, chart_matrix, chart_memory, chart_prune
from structured_ensembles.report.web.page import Section, sample_section
from structured_ensembles.report.web.plots import Chart
from structured_ensembles.report.web.sample_details import SampleDetails, read_details
from structured_ensembles.report.web.summary import choose_subject, is_continual_run
from structured_ensembles.report.web.uncertainty_charts import chart_disagreement, chart_discarding, chart_entropies
from structured_ensembles.runs.finished import Finished
from structured_ensembles.runs.folder import read_history, read_subnets

Labelled = Mapping[str, Sequence[Finished]]


def list_sections(setup: str, runs: Labelled) -> list[Section]:
    """Return the sections on runs by label, one run per seed: every chart that was measured, and single samples."""
    first = next(iter(runs.values()))[0]
    return _list_continual(setup, runs) if is_continual_run(first) else _list_trained(setup, runs)


def _list_trained(setup: str, runs: Labelled) -> list[Section]:
    subject = choose_subject(runs)
    details = {label: one for label, seed_runs in runs.items() if (one := _details_of(seed_runs[0])) is not None}
    curves, origin = collect_corruptions(runs)
    samples = {label: seed_runs[0].samples for label, seed_runs in runs.items() if seed_runs[0].samples}
    quality = [
        *(chart_front(list_front_points(runs, memory), memory) for memory in ("parameters", "file")),
        chart_overheads({label: figures_of(seed_runs, "size/overhead") for label, seed_runs in runs.items()}),
        chart_corruptions(curves, origin),
    ]
    certainty = [
        chart_reliability(details),
        chart_coverage(details),
        chart_discarding({label: (one["entropy"], one["correct"]) for label, one in samples.items()}),
        *_charts_of_samples(runs[subject][0], subject),
    ]
    histories = {label: read_history(seed_runs[0].folder, seed_runs[0].result) for label, seed_runs in runs.items()}
    learning = {label: chart_learning(rows, label) for label, rows in histories.items()}
    kept = {
        label: chart_kept(read_subnets(seed_runs[0].folder, seed_runs[0].result), label)
        for label, seed_runs in runs.items()
    }
    sections = [
        Section(f"Quality and memory: {setup}", charts=without_missing(quality)),
        Section(f"Does it know when it does not know? {setup}", charts=without_missing(certainty)),
        *([sample_section(details[subject], subject)] if subject in details else []),
        Section(f"Members: {setup}", charts=[*kept.pop(subject), *without_missing([learning.pop(subject)])]),
        Section(
            f"Members and learning curves of the other methods: {setup}",
            charts=[chart for label in kept for chart in (*kept[label], *without_missing([learning[label]]))],
            folded=True,
        ),
    ]
    return [section for section in sections if section is not None and (section.charts or section.galleries)]


def _list_continual(setup: str, runs: Labelled) -> list[Section]:
    methods = {
        label: (figures_of(seed_runs, "cl/accuracy"), rebuild_memory(seed_runs[0].result))
        for label, seed_runs in runs.items()
    }
    capacities = {
        label: capacity
        for label, seed_runs in runs.items()
        if (capacity := rebuild_capacity(seed_runs[0].result)) is not None and capacity.sizes
    }
    subject = choose_subject(runs)
    matrices = {label: chart_matrix(rebuild_matrix(seed_runs[0].result), label) for label, seed_runs in runs.items()}
    maps = {label: chart_capacity(capacity, label) for label, capacity in capacities.items()}
    charts = [
        matrices.pop(subject),
        maps.pop(subject, None),
        chart_memory(methods),
        chart_prune(collect_by_prune(runs)),
        *matrices.values(),
        *maps.values(),
    ]
    return [Section(f"Accuracy and capacity: {setup}", charts=without_missing(charts))]


def _details_of(run: Finished) -> SampleDetails | None:
    """Read the details of a run, or what its measured samples tell of reliability."""
    details = read_details(run.folder)
    if details is None and run.samples:
        bins = tuple(bin_confidence(run.samples["confidence"], run.samples["correct"]))
        return SampleDetails(1.0, None, bins, None, (), ())
    return details


def _charts_of_samples(run: Finished, label: str) -> list[Chart | None]:
    """Chart entropies and disagreement of one run, where they were measured."""
    samples = run.samples
    if not samples:
        return []
    return [chart_entropies(split_entropies(samples), None, label), chart_disagreement(samples["disagreement"], label)]


def without_missing(charts: Sequence[Chart | None]) -> list[Chart]:
    """Leave out the charts of figures that were not measured."""
    return [chart for chart in charts if chart is not None]
