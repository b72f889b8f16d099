"""`sens report`: tables and figures of any runs."""

from __future__ import annotations

from pathlib import Path

from structured_ensembles.common.tables import escape_control_characters
from structured_ensembles.continual.results import is_continual
from structured_ensembles.paper.queue import QUEUE
from structured_ensembles.report.docs import write_docs
from structured_ensembles.report.page import report_runs
from structured_ensembles.report.web.sample_details import measure_run_details
from structured_ensembles.runs.measurement import Request, measure_experiment


def report(
    runs: list[Path],
    out: Path = Path("runs/report"),
    measure: bool = True,
    root: Path | None = None,
    device: str = "auto",
    trust_code: bool = False,
    docs: bool = False,
) -> int:
    """Compare any runs: Markdown, figures, and one self-contained HTML page.

    Args:
        runs: run folders of sens train and of sens continual; with --docs the folder results
        out: the folder of the report
        measure: evaluate runs that lack figures, and the samples that the page shows
        root: where data sets are kept
        device: auto, cpu, cuda, …
        trust_code: let the folders import the functions that build their networks and data
        docs: write docs/results.md, its figures and the README's tables from the recorded runs of the queue instead

    """
    if docs:
        if len(runs) != 1 or not (runs[0] / QUEUE).exists():
            raise ValueError(
                f"--docs takes one folder, with the queue and its runs, not {', '.join(map(str, runs))}: "
                "sens report results --docs"
            )
        for path in write_docs(runs[0]):
            print(f"wrote {path}")
        return 0
    for run in [folder for folder in runs if measure and not is_continual(folder)]:
        if not (run / "result.json").exists():
            continue  # not done yet: `report_runs` refuses it
        if not (run / "ensemble.safetensors").exists():
            print(
                f"{escape_control_characters(str(run))} has no ensemble.safetensors: its page shows what was recorded"
            )
            continue
        figures, _ = measure_experiment(run, Request(), root=root, device=device, trust_code=trust_code)
        if "cls/accuracy" in figures:  # a regression has no samples to show
            measure_run_details(run, root=root, device=device, trust_code=trust_code)
    page = report_runs(runs, out)
    print((out / "report.md").read_text(encoding="utf-8").rstrip())
    print(f"\nsee {page}")
    return 0
