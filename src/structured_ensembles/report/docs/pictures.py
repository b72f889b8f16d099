"""The figures of `docs/results.md`."""

from __future__ import annotations

from matplotlib.figure import Figure

from structured_ensembles.paper.studies import Study
from structured_ensembles.report.continual_figures import accuracy_by_prune
from structured_ensembles.report.docs.differences import runs_of_row
from structured_ensembles.report.docs.records import Records
from structured_ensembles.report.run_figures import FrontPoint, front


def front_figure(records: Records, wanted: Study, temperature: bool = False) -> Figure | None:
    """Draw accuracy, NLL and ECE against memory: one point for each row, a whole ensemble; None for fewer than two.

    temperature: NLL and ECE after temperature scaling.
    """
    after = "_t" if temperature else ""
    points = []
    for row in wanted.rows:
        runs = records.runs(runs_of_row(wanted, row))
        if not runs:
            continue
        figures = [run.figures for run in runs]
        name, members = _line_name(row), int(figures[0]["size/members"])
        points.append(
            FrontPoint(
                name,
                f"N={members}" if name == "deep" else "",  # other names tell the number of members
                figures[0]["size/overhead"],
                *([own[name] for own in figures] for name in ("cls/accuracy", f"cal/nll{after}", f"cal/ece15{after}")),
            )
        )
    return front(points) if len(points) > 1 else None


def _line_name(row: str) -> str:
    """Name the line that a point belongs to: deep ensembles of any size, or as many members in different memory."""
    method, _, rest = row.partition(" ×")
    if method == "deep":
        return method
    members, _, settings = rest.partition(", ")
    coupled = ", coupled" if settings.endswith("coupled") else ""
    return f"{method} ×{members}{coupled}" if members else method


def pruning_figure(records: Records, wanted: Study) -> Figure | None:
    """Draw the accuracy of a continual learner against the share of pruned neurons; None for fewer than two shares."""
    shares = {
        float(row): list(records.by_seed(runs_of_row(wanted, row), "cl/accuracy", "mean").values())
        for row in wanted.rows
    }
    known = {share: values for share, values in shares.items() if values}
    return accuracy_by_prune(known) if len(known) > 1 else None
