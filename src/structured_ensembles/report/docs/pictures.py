"""Charts of `docs/results.md`."""

from __future__ import annotations

from matplotlib.figure import Figure

from structured_ensembles.paper.studies import Study
from structured_ensembles.report.continual_figures import draw_accuracy_by_prune
from structured_ensembles.report.docs.differences import list_runs_of_row
from structured_ensembles.report.docs.records import Records
from structured_ensembles.report.front import FrontPoint, draw_front


def draw_front_of_study(records: Records, wanted: Study, temperature: bool = False) -> Figure | None:
    """Draw accuracy, NLL and ECE against memory, one point per row; return None for fewer than two.

    temperature: NLL and ECE after temperature scaling.
    """
    suffix = "_t" if temperature else ""
    points = []
    for row in wanted.rows:
        runs = records.runs(list_runs_of_row(wanted, row))
        if not runs:
            continue
        figures = [run.figures for run in runs]
        name, members = _line_name(row), int(figures[0]["size/members"])
        points.append(
            FrontPoint(
                name,
                f"N={members}" if name == "deep" else "",  # other names have the number of members
                figures[0]["size/overhead"],
                *(
                    [run_figures[name] for run_figures in figures]
                    for name in ("cls/accuracy", f"cal/nll{suffix}", f"cal/ece15{suffix}")
                ),
            )
        )
    return draw_front(points) if len(points) > 1 else None


def _line_name(row: str) -> str:
    """Return the name of a point's line: deep ensembles of any size, or one number of members in different memory."""
    method, _, rest = row.partition(" ×")
    if method == "deep":
        return method
    members, _, settings = rest.partition(", ")
    coupled = ", coupled" if settings.endswith("coupled") else ""
    return f"{method} ×{members}{coupled}" if members else method


def draw_pruning(records: Records, wanted: Study) -> Figure | None:
    """Draw accuracy against the share of pruned neurons; return None for fewer than two shares."""
    shares = {
        float(row): list(records.by_seed(list_runs_of_row(wanted, row), "cl/accuracy", "mean").values())
        for row in wanted.rows
    }
    known = {share: values for share, values in shares.items() if values}
    return draw_accuracy_by_prune(known) if len(known) > 1 else None
