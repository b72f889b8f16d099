"""Records: the finished runs of the queue, and what is left of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structured_ensembles.continual.experiment import ContinualExperiment
from structured_ensembles.continual.results import read_continual_run
from structured_ensembles.paper.queue import is_finished
from structured_ensembles.paper.sections import Planned
from structured_ensembles.prediction.combination import Combine
from structured_ensembles.runs.finished import Finished, read_run


@dataclass(frozen=True)
class Records:
    """All runs that are planned, in order, and by the name of their folder those that are done."""

    planned: Sequence[Planned]
    done: Mapping[str, Finished]

    def is_done(self, planned: Planned) -> bool:
        return planned.experiment.folder in self.done

    def in_sections(self, sections: Collection[str]) -> list[Planned]:
        """List the planned runs of some sections of the queue."""
        return [own for own in self.planned if own.section in sections]

    def runs(self, experiments: Iterable[Any]) -> list[Finished]:
        """List the finished runs of some experiments."""
        return [self.done[own.folder] for own in experiments if own.folder in self.done]

    def by_seed(self, experiments: Iterable[Any], figure: str, rule: Combine) -> dict[int, float]:
        """Collect a figure of the finished ones of some experiments, which differ in their seeds only."""
        found = {own.seed: self.done[own.folder].combined_by(rule) for own in experiments if own.folder in self.done}
        return {seed: figures[figure] for seed, figures in found.items() if figure in figures}


def read_records(results: Path, planned: Sequence[Planned]) -> Records:
    """Read every finished run of the queue below `results`."""
    done = {}
    for own in planned:
        if is_finished(own, results):
            read = read_continual_run if isinstance(own.experiment, ContinualExperiment) else read_run
            done[own.experiment.folder] = read(results / own.name)
    return Records(planned, done)


def left(planned: Sequence[Planned]) -> str:
    """Say how many runs these are, and how long a GPU is busy with them: "27 runs, about 1.3 GPU hours"."""
    return f"{_runs(len(planned))}, about {hours(planned):.1f} GPU hours"


def hours(planned: Sequence[Planned]) -> float:
    return sum(own.minutes for own in planned) / 60


def provenance(runs: Sequence[Finished]) -> str:
    """Say in one line what runs were computed with: code, devices, precisions, dates."""
    versions = [run.result["versions"] for run in runs]
    code = _counted(f"{own['structured-ensembles']}, source {own.get('source', 'not recorded')}" for own in versions)
    dates = sorted({run.result["date"][:10] for run in runs})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    torch, devices, precisions = (
        _counted(values)
        for values in (
            (own["torch"] for own in versions),
            (run.result["device"] for run in runs),
            (run.precision for run in runs),
        )
    )
    return f"{_runs(len(runs))}: version {code}; torch {torch}; {devices}; {precisions}; {days}."


def table(header: Sequence[str], lines: Iterable[Sequence[str]], right: Collection[int]) -> str:
    """Write a Markdown table; right: the columns that are aligned so."""
    rule = ["---:" if column in right else "---" for column in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def _counted(values: Iterable[str]) -> str:
    """List different values, with how often each occurs where there are several."""
    counts = Counter(values)
    return " / ".join(own if len(counts) == 1 else f"{own} ({number})" for own, number in sorted(counts.items()))


def _runs(number: int) -> str:
    return f"{number} run{'s' * (number != 1)}"
