"""`sens reproduce`: the paper's tables and figures, our numbers beside the published ones."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Literal

from structured_ensembles.paper.catalogue import study_names
from structured_ensembles.paper.queue import QUEUE, run_queue, write_queue
from structured_ensembles.paper.sections import planned_runs
from structured_ensembles.paper.studies import SEEDS, Part
from structured_ensembles.report.page import FIGURES
from structured_ensembles.report.reproduce import reproduce as carry_out
from structured_ensembles.runs.grid import Outcome
from structured_ensembles.runs.workers import Backend


def reproduce(
    name: str,
    dataset: list[str] | None = None,
    model: list[str] | None = None,
    method: list[str] | None = None,
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
    quiet: bool = False,
) -> int:
    """Run what a table or figure of the paper needs, and write it beside the published numbers; resumes what is done.

    Args:
        name: table-accuracy, figure-memory, table-ece, table-diversity, table-uncertainty, table-pruning,
            table-initialization, front, table-continual, table-continual-overhead, table-continual-memory,
            table-continual-ablation, figure-continual-pruning, all, or queue: the runs of all of them in the order of
            their value
        dataset: only these data sets
        model: only these networks
        method: only these methods; also package.module:function
        seeds: one run each; by default 0 1 2
        epochs: how long to train instead of what the recipe says
        limit: at most so many training samples
        recipe: how to train; by default paper, and modern for the front
        smoke: a trial of everything, on digits, in minutes on a CPU
        out: the folder of all runs and reports; by default runs/reproduce, and results for the queue
        root: where data sets are kept
        device: auto, cpu, cuda, …
        backend: processes of this machine (loky), or a cluster
        workers: runs at a time; by default one per GPU, or per core
        minutes: of the queue, take what can be finished in so many
        quiet: no progress

    """
    if smoke and (dataset or model):
        raise ValueError("--smoke is of digits, on a small network: leave out --dataset and --model")
    part = Part(
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
        return _queue(part, out or Path("results"), minutes, root, device, backend, workers, quiet)
    if minutes is not None:
        raise ValueError("--minutes is for the queue: sens reproduce queue --minutes 25")
    where = (out or Path("runs/reproduce")) / ("smoke" if smoke else "")
    failures = 0
    for own in study_names() if name == "all" else (name,):
        found = carry_out(own, where, part, root=root, device=device, backend=backend, workers=workers, quiet=quiet)
        failures += len(found.failed)
        news = f"{found.new} runs trained or measured, {found.known} known"
        news = news if found.new or found.failed else "nothing new to run"
        print((found.page.parent / "report.md").read_text(encoding="utf-8").partition(f"\n{FIGURES}")[0].rstrip())
        print(f"\n{own}: {news}; see {found.page}\n")
        for run, error in found.failed.items():
            print(f"sens: {run} failed: {error}", file=sys.stderr)
    return 1 if failures else 0


def _queue(
    part: Part,
    out: Path,
    minutes: float | None,
    root: Path | None,
    device: str,
    backend: Backend,
    workers: int | None,
    quiet: bool,
) -> int:
    """Take the next unfinished runs of the queue, narrowed to `part`."""
    if part.epochs is not None or part.limit is not None or part.recipe is not None:
        raise ValueError("the queue's runs are what they are: leave out --epochs, --limit and --recipe")
    planned = planned_runs(part.seeds, part.smoke)
    wanted = {"dataset": part.datasets, "model": part.models, "method": part.methods}
    chosen = [
        own
        for own in planned
        if all(names is None or getattr(own.experiment, kind) in names for kind, names in wanted.items())
    ]
    start = time.monotonic()

    def tell(outcome: Outcome) -> None:
        news = (
            f"{outcome.seconds:.0f} s"
            if outcome.state == "done"
            else f"failed: {(outcome.error or '').splitlines()[-1]}"
        )
        print(f"{(time.monotonic() - start) / 60:5.1f} min  {outcome.name}: {news}", flush=True)

    found = run_queue(
        chosen, out, minutes=minutes, workers=workers, root=root, device=device, backend=backend, quiet=quiet,
        on_outcome=tell,
    )  # fmt: skip
    write_queue(planned, out)
    for run, error in found.failed.items():
        print(f"sens: {run} failed: {error}", file=sys.stderr)
    for name, reason in found.without.items():
        print(f"sens: runs on {name} are left, since it cannot be had: {reason}", file=sys.stderr)
    print(f"{len(found.new)} runs finished, {len(found.left)} left; see {out / QUEUE}")
    return 1 if found.failed else 0
