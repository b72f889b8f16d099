"""The queue of runs, whose next unfinished ones run whenever a GPU is free; finished runs are kept in `results/`.

`results/queue.yaml` lists all runs in the order of their value, with an estimate of their minutes and whether they are
done. `results/SECTION/RUN/` has the files of a finished run: `config.yaml`, `result.json`, `history.csv` and the
figures on the test split; weights stay on the machine that trained them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from structured_ensembles.continual.experiment import ContinualExperiment
from structured_ensembles.data import load_data
from structured_ensembles.data.dataset import SplitName
from structured_ensembles.paper.carry_out import carry_out
from structured_ensembles.paper.estimates import estimate_checkpoint_bytes
from structured_ensembles.paper.measured_times import follow_measured_times
from structured_ensembles.paper.sections import Planned
from structured_ensembles.runs.evaluations import RULES, evaluation_path, read_figures
from structured_ensembles.runs.finished import read_run_seconds
from structured_ensembles.runs.folder import read_result
from structured_ensembles.runs.grid import Job, Outcome, run_grid
from structured_ensembles.runs.measurement import NOTHING, lacks_validation
from structured_ensembles.runs.workers import Backend
from structured_ensembles.storage.files import write_text

QUEUE = "queue.yaml"
SPLITS: tuple[SplitName, ...] = ("test", "validation")
KEPT = (
    "config.yaml",
    "result.json",
    "history.csv",
    "matrix.json",
    *(evaluation_path(Path(), rule, split).name for split in SPLITS for rule in RULES),
)
HEADER = """\
# All runs of the paper's studies and of the front, in the order of their value. Written by `sens reproduce queue`,
# which takes the next unfinished ones: `sens reproduce queue --minutes 25 --workers 2` on a machine with a GPU.
# minutes: what the finished run took, or an estimate for an H200, which follows the times of finished runs like it.
"""
SHARED_GPU_COST = 0.8  # of the GPU's time that each further worker costs the others
WORTH_STARTING = 90.0  # seconds: in less time a run would only start up


@dataclass(frozen=True)
class Progress:
    """Outcome of a pass over the queue.

    new, left: names of the finished runs, and of the remaining ones. failed: errors by name of the run.
    without: data sets that are not available, and why.
    """

    new: list[str]
    left: list[str]
    failed: dict[str, str]
    without: dict[str, str]


def run_queue(
    planned: Sequence[Planned],
    out: Path,
    *,
    minutes: float | None = None,
    checkpoint_mib: float | None = None,
    workers: int | None = None,
    root: Path | None = None,
    device: str = "auto",
    backend: Backend = "loky",
    quiet: bool = False,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Progress:
    """Run the next unfinished runs, several at a time, each in its folder below `out`.

    minutes: when to stop. Unfinished runs resume from their checkpoints next time.
    checkpoint_mib: the largest checkpoint that will be there next time, where it must be copied from a lent machine; a
        run with a larger one is started only if its estimate fits. By default there is no limit.
    Runs on data sets that are not available are left, see `find_missing_data`.
    """
    unfinished = [run for run in follow_measured_times(planned, out) if not is_finished(run, out)]
    without = find_missing_data({run.experiment.dataset for run in unfinished}, root)
    waiting = [run for run in unfinished if run.experiment.dataset not in without]
    jobs = [
        Job(
            run.name,
            carry_out,
            {
                "experiment": run.experiment,
                "folder": out / run.name,
                "request": run.request,
                "root": root,
                "device": device,
            },
            _seconds_needed(run, workers or 1, checkpoint_mib),
        )
        for run in waiting
    ]
    limit = None if minutes is None else 60 * minutes
    outcomes = run_grid(jobs, backend, workers, quiet, time_limit=limit, on_outcome=on_outcome)
    by_state: dict[str, list[Outcome]] = {"done": [], "failed": [], "left": []}
    for outcome in outcomes:
        by_state[outcome.state].append(outcome)
    new, left = ([outcome.name for outcome in by_state[state]] for state in ("done", "left"))
    left += [run.name for run in unfinished if run.experiment.dataset in without]
    return Progress(new, left, {outcome.name: outcome.error or "" for outcome in by_state["failed"]}, without)


def find_missing_data(datasets: Collection[str], root: Path | None) -> dict[str, str]:
    """Find the data sets that are not available, and why; download the others once, before several runs need them."""
    reasons = {}
    for name in sorted(datasets):
        try:
            load_data(name, root)
        except (RuntimeError, OSError, ValueError) as error:
            reasons[name] = str(error)
    return reasons


def _seconds_needed(planned: Planned, workers: int, checkpoint_mib: float | None) -> float:
    """Return how many seconds must be left to start a run."""
    if checkpoint_mib is None or estimate_checkpoint_bytes(planned.experiment) <= checkpoint_mib * 2**20:
        return WORTH_STARTING
    return 60 * planned.minutes * (1 + SHARED_GPU_COST * (workers - 1))


def is_finished(planned: Planned, out: Path) -> bool:
    """Tell whether a run is trained and has all requested figures; its weights may be missing."""
    folder = out / planned.name
    if not (folder / "result.json").exists():
        return False
    if isinstance(planned.experiment, ContinualExperiment):
        return True
    figures = [read_figures(evaluation_path(folder, rule)) for rule in RULES]
    return not lacks_validation(folder, planned.request) and all(
        "size/overhead" in rule_figures and planned.request.missing(rule_figures) == NOTHING for rule_figures in figures
    )


def write_queue(planned: Sequence[Planned], out: Path) -> None:
    """Write `queue.yaml`: every run in order, whether it is done, its minutes."""
    rows = [_row(run, out) for run in follow_measured_times(planned, out)]
    left = [row for row in rows if "done" not in row]
    total = {"runs": len(rows), "left": len(left), "hours_left": round(sum(row["minutes"] for row in left) / 60, 1)}
    lines = yaml.safe_dump({"total": total}, sort_keys=False)
    lines += "runs:\n" + "".join(
        f"- {yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=500)}" for row in rows
    )
    write_text(out / QUEUE, HEADER + lines)


def _row(planned: Planned, out: Path) -> dict[str, Any]:
    """Describe a run for `queue.yaml`."""
    if is_finished(planned, out):
        folder = out / planned.name
        seconds = read_run_seconds(folder, read_result(folder))
        return {"run": planned.name, "minutes": round(seconds / 60, 1), "done": True}
    return {"run": planned.name, "minutes": round(planned.minutes, 1)}
