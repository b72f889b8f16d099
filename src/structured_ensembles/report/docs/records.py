"""Records: the planned and the finished runs of the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structured_ensembles.common.plurals import counted
from structured_ensembles.continual.experiment import ContinualExperiment
from structured_ensembles.continual.results import read_continual_run
from structured_ensembles.data.dataset import SplitName
from structured_ensembles.paper.measured_times import follow_measured_times
from structured_ensembles.paper.queue import is_finished
from structured_ensembles.paper.sections import Planned
from structured_ensembles.prediction.combination import Combine
from structured_ensembles.runs.finished import Finished, read_run

NOT_RUN = "not run"


@dataclass(frozen=True)
class Records:
    """Planned runs in order, and the finished ones by the name of their folder."""

    planned: Sequence[Planned]
    done: Mapping[str, Finished]

    def is_done(self, planned: Planned) -> bool:
        """Tell whether a planned run is finished."""
        return planned.experiment.folder in self.done

    def in_section(self, section: str) -> list[Planned]:
        """List the planned runs of a section of the queue."""
        return [run for run in self.planned if run.section == section]

    def list_planned(self, experiments: Iterable[Any]) -> list[Planned]:
        """List the planned runs of some experiments, in the order of the queue."""
        folders = {experiment.folder for experiment in experiments}
        return [run for run in self.planned if run.experiment.folder in folders]

    def runs(self, experiments: Iterable[Any]) -> list[Finished]:
        """List the finished runs of some experiments."""
        return [self.done[experiment.folder] for experiment in experiments if experiment.folder in self.done]

    def by_seed(
        self, experiments: Iterable[Any], figure: str, rule: Combine, split: SplitName = "test"
    ) -> dict[int, float]:
        """Collect a figure by seed from the finished ones of some experiments, which differ only in their seeds."""
        done = [experiment for experiment in experiments if experiment.folder in self.done]
        by_seed = {experiment.seed: self.done[experiment.folder].combined_by(rule, split) for experiment in done}
        return {seed: figures[figure] for seed, figures in by_seed.items() if figure in figures}


def read_records(results: Path, planned: Sequence[Planned]) -> Records:
    """Read every finished run of the queue below `results`."""
    planned, done = follow_measured_times(planned, results), {}
    for run in planned:
        if is_finished(run, results):
            read = read_continual_run if isinstance(run.experiment, ContinualExperiment) else read_run
            done[run.experiment.folder] = read(results / run.name)
    return Records(planned, done)


def format_remaining(planned: Sequence[Planned]) -> str:
    """Format the number of runs and their estimated time: "27 runs, about 1.3 GPU hours"."""
    return f"{counted(len(planned), 'run')}, about {estimate_hours(planned):.1f} GPU hours"


def estimate_hours(planned: Sequence[Planned]) -> float:
    """Estimate the hours of some runs."""
    return sum(run.minutes for run in planned) / 60


def format_provenance(runs: Sequence[Finished]) -> str:
    """Format in one line what runs were computed with: code, devices, precisions, dates."""
    versions = [run.result["versions"] for run in runs]
    code = _join_counted(
        f"{used['structured-ensembles']}, source {used.get('source', 'not recorded')}" for used in versions
    )
    dates = sorted({run.result["date"][:10] for run in runs})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    torch, devices, precisions = (
        _join_counted(values)
        for values in (
            (used["torch"] for used in versions),
            (run.result["device"] for run in runs),
            (run.precision for run in runs),
        )
    )
    return f"{counted(len(runs), 'run')}: version {code}; torch {torch}; {devices}; {precisions}; {days}."


def _join_counted(values: Iterable[str]) -> str:
    """Join distinct values, with their counts if there are several."""
    counts = Counter(values)
    return " / ".join(value if len(counts) == 1 else f"{value} ({number})" for value, number in sorted(counts.items()))
