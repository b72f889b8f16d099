"""`sens reproduce`: the paper's tables and figures, our numbers beside the published ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from structured_ensembles.paper.catalogue import study_names
from structured_ensembles.paper.reproduce import reproduce as carry_out
from structured_ensembles.paper.studies import SEEDS, Part
from structured_ensembles.report.page import FIGURES


def reproduce(
    name: str,
    dataset: list[str] | None = None,
    model: list[str] | None = None,
    method: list[str] | None = None,
    seeds: list[int] | None = None,
    epochs: int | None = None,
    limit: int | None = None,
    recipe: Literal["paper", "modern"] = "paper",
    smoke: bool = False,
    out: Path = Path("runs/reproduce"),
    root: Path | None = None,
    device: str = "auto",
    backend: Literal["loky", "sequential", "dask", "ray"] = "loky",
    workers: int | None = None,
    quiet: bool = False,
) -> int:
    """Run what a table or figure of the paper needs, and write it beside the published numbers; resumes what is done.

    Args:
        name: table-accuracy, figure-memory, table-ece, table-diversity, table-uncertainty, table-pruning,
            table-initialization, front, table-continual, table-continual-overhead, table-continual-memory,
            table-continual-ablation, figure-continual-pruning, or all
        dataset: only these data sets
        model: only these networks
        method: only these methods; also package.module:function
        seeds: one run each; by default 0 1 2
        epochs: how long to train instead of what the recipe says
        limit: at most so many training samples
        recipe: how to train
        smoke: a trial of everything, on digits, in minutes on a CPU
        out: the folder of all runs and reports
        root: where data sets are kept
        device: auto, cpu, cuda, …
        backend: processes of this machine (loky), or a cluster
        workers: runs at a time; by default one per GPU, or per core
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
    where = out / "smoke" if smoke else out
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
