"""`sens reproduce`: the paper's tables and figures, our numbers beside the published ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from structured_ensembles.paper.catalogue import study_names
from structured_ensembles.paper.queue import QUEUE, run_queue, write_queue
from structured_ensembles.paper.sections import Planned, plan_runs
from structured_ensembles.paper.studies import SEEDS, StudyOptions
from structured_ensembles.report.page import FIGURES, count_runs
from structured_ensembles.report.reproduce import reproduce as carry_out
from structured_ensembles.runs.grid import Outcome
from structured_ensembles.runs.workers import Backend


def reproduce(
    name: str,
    dataset: list[str] | None = None,
    model: list[str] | None = None,
    method: list[str] | None = None,
    section: list[str] | None = None,
    seeds: list[int] | None = None,
    epochs: int | None = None,
    limit: int | None = None,
    recipe: Literal["paper", "modern"] | None = None,
    smoke: bool = False,
    out: Path | None = None,
    root: Path | None = None,
    device: str = "auto",
    backend: Literal["loky", "sequential", "dask", "ray"] = "loky",
    workers: int | None = None,
    minutes: float | None = None,
    checkpoint_mib: float | None = None,
    quiet: bool = False,
) -> int:
    """Run the experiments of a table or figure of the paper and write it beside the published numbers; resumable.

    Args:
        name: table-accuracy, figure-memory, table-ece, table-diversity, table-uncertainty, table-pruning,
            table-initialization, front, defaults, subsets, table-continual, table-continual-overhead,
            table-continual-memory, table-continual-ablation, figure-continual-pruning, all, or queue: the runs of all
            of them in the order of their value
        dataset: only these data sets
        model: only these networks
        method: only these methods; also package.module:function
        section: only these sections of the queue, the folders in results, e.g. front-cifar10
        seeds: one run each; by default 0 1 2
        epochs: how long to train, instead of the recipe's epochs
        limit: the largest number of training samples
        recipe: how to train; by default paper, and modern for the front
        smoke: a trial of everything, on digits, in minutes on a CPU
        out: the folder of all runs and reports; by default runs/reproduce, and results for the queue without --smoke
        root: where data sets are kept
        device: auto, cpu, cuda, …
        backend: processes of this machine (loky), or a cluster
        workers: runs at a time; by default one per GPU, or per core
        minutes: stop the queue after so many; what is not finished goes on from its checkpoint next time
        checkpoint_mib: the largest checkpoint that will be there next time, on a lent machine; runs of the queue with
            larger ones are started only if they can be finished
        quiet: show no progress

    """
    if smoke and (dataset or model):
        raise ValueError("--smoke runs on digits with a small network: leave out --dataset and --model")
    options = StudyOptions(
        datasets=None if dataset is None else tuple(dataset),
        models=None if model is None else tuple(model),
        methods=None if method is None else tuple(method),
        seeds=tuple(seeds) if seeds else (0, 1) if smoke else SEEDS,
        epochs=epochs,
        limit=limit,
        recipe=recipe,
        smoke=smoke,
    )
    if name == "queue":
        folder = out or Path("runs/reproduce/smoke" if smoke else "results")  # a trial must not replace the queue
        return _run_queue(options, section, folder, minutes, checkpoint_mib, root, device, backend, workers, quiet)
    if checkpoint_mib is not None:
        raise ValueError("--checkpoint-mib is for the queue: sens reproduce queue --minutes 25 --checkpoint-mib 60")
    if minutes is not None:
        raise ValueError("--minutes is for the queue: sens reproduce queue --minutes 25")
    if section is not None:
        raise ValueError("--section is for the queue: sens reproduce queue --section front-cifar10")
    folder = (out or Path("runs/reproduce")) / ("smoke" if smoke else "")
    if name not in (*study_names(), "all"):
        raise ValueError(f"name must be one of {', '.join((*study_names(), 'all', 'queue'))}, not {name!r}")
    failures = 0
    for study_name in study_names() if name == "all" else (name,):
        reproduced = carry_out(
            study_name, folder, options, root=root, device=device, backend=backend, workers=workers, quiet=quiet
        )
        failures += len(reproduced.failed)
        news = f"{count_runs(reproduced.new)} trained or measured, {reproduced.known} known"
        news = news if reproduced.new or reproduced.failed else "nothing new to run"
        print((reproduced.page.parent / "report.md").read_text(encoding="utf-8").partition(f"\n{FIGURES}")[0].rstrip())
        print(f"\n{study_name}: {news}; see {reproduced.page}\n")
        for run, error in reproduced.failed.items():
            print(f"sens: {run} failed: {error}", file=sys.stderr)
    return 1 if failures else 0


def _choose_runs(planned: Sequence[Planned], options: StudyOptions, sections: Collection[str] | None) -> list[Planned]:
    """Choose the runs of these sections, data sets, networks and methods; None means all of them."""
    known_sections = list(dict.fromkeys(run.section for run in planned))
    unknown = sorted(set(sections or ()) - set(known_sections))
    if unknown:
        raise ValueError(f"--section must be among {', '.join(known_sections)}, not {', '.join(unknown)}")
    allowed = {"dataset": options.datasets, "model": options.models, "method": options.methods}
    return [
        run
        for run in planned
        if (sections is None or run.section in sections)
        and all(names is None or getattr(run.experiment, field) in names for field, names in allowed.items())
    ]


def _run_queue(
    options: StudyOptions,
    sections: Collection[str] | None,
    out: Path,
    minutes: float | None,
    checkpoint_mib: float | None,
    root: Path | None,
    device: str,
    backend: Backend,
    workers: int | None,
    quiet: bool,
) -> int:
    """Run the next unfinished runs of the queue, restricted by `options`."""
    if options.epochs is not None or options.limit is not None or options.recipe is not None:
        raise ValueError("the queue's runs have fixed settings: leave out --epochs, --limit and --recipe")
    planned = plan_runs(options.seeds, options.smoke)
    chosen = _choose_runs(planned, options, sections)
    start = time.monotonic()

    def print_outcome(outcome: Outcome) -> None:
        news = (
            f"{outcome.seconds:.0f} s"
            if outcome.state == "done"
            else f"failed: {(outcome.error or 'no reason known').splitlines()[-1]}"
        )
        print(f"{(time.monotonic() - start) / 60:5.1f} min  {outcome.name}: {news}", flush=True)

    try:
        progress = run_queue(
            chosen, out, minutes=minutes, checkpoint_mib=checkpoint_mib, workers=workers, root=root, device=device,
            backend=backend, quiet=quiet, on_outcome=print_outcome,
        )  # fmt: skip
    finally:  # also after Ctrl-C, when some runs may be done
        # The file lists all runs, whichever seeds this call was restricted to.
        write_queue(plan_runs(tuple(sorted({*SEEDS, *options.seeds}))) if not options.smoke else planned, out)
    for run, error in progress.failed.items():
        print(f"sens: {run} failed: {error}", file=sys.stderr)
    for name, reason in progress.without.items():
        print(f"sens: runs on {name} are left, since it cannot be had: {reason}", file=sys.stderr)
    print(f"{count_runs(len(progress.new))} finished, {len(progress.left)} left; see {out / QUEUE}")
    return 1 if progress.failed else 0
