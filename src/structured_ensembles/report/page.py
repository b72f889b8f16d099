"""Reports of finished runs: a Markdown file, figures as SVG and PNG, and one self-contained HTML page."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from matplotlib.figure import Figure

from structured_ensembles.common.markdown import escape_markdown
from structured_ensembles.continual.results import is_continual, read_continual_run
from structured_ensembles.paper.layout import TableData, html_table, markdown_table
from structured_ensembles.report.continual_pictures import draw_continual_pictures
from structured_ensembles.report.deep_equivalents import EXPLANATION, compute_deep_equivalents
from structured_ensembles.report.figures import as_svg
from structured_ensembles.report.pictures import Picture, draw_pictures
from structured_ensembles.runs.finished import Finished, read_run
from structured_ensembles.storage.files import write_atomically, write_text

Draw = Callable[[Mapping[str, Sequence[Finished]]], list[Picture]]
FIGURES = "## Figures:"  # a heading, with the data set and network
LONGEST_NAME = 150  # characters of a figure's file
BROAD = 6.5  # inches from which a figure gets the full width of the page
SUMMARY = (
    "cls/accuracy", "cal/nll", "cal/ece", "cal/nll_t", "cal/ece_t", "cal/deep_equivalent", "conf/coverage",
    "conf/size", "conf/width",
    "unc/kept", "unc/kept_accuracy", "cls/brier", "div/cc", "div/wc", "div/disagreement", "unc/auroc",
    "unc/aurc", "unc/coverage_at_5_risk", "unc/filtered_accuracy", "unc/discarded", "reg/rmse", "reg/member_rmse",
    "reg/spread", "reg/nll", "reg/coverage_at_90", "size/overhead", "size/file_bytes",
)  # fmt: skip
CONTINUAL_SUMMARY = ("cl/accuracy", "cl/final_accuracy", "cl/forgetting", "cl/accuracy_without_identity")


def write_report(
    folder: Path,
    title: str,
    intro: Sequence[str],
    tables: Sequence[TableData],
    runs: Sequence[Finished],
    draw: Draw = draw_pictures,
) -> Path:
    """Write `report.md`, `figures/` and `report.html`; return the path of the page.

    draw: draws the runs on one data set and network, by label.
    """
    intro = [*intro, *describe_precisions(runs)]
    by_setup = {setup: _draw_escaped(draw, labelled) for setup, labelled in group_runs(runs).items()}
    written: dict[str, list[dict[str, Any]]] = {}
    for setup, setup_pictures in by_setup.items():
        for picture in setup_pictures:
            svg = _write_figure(folder / "figures" / _file_name(setup, picture), picture)
            broad = picture.figure.get_figwidth() > BROAD
            written.setdefault(setup, []).append({"svg": svg, "caption": picture.caption, "broad": broad})
    write_text(folder / "report.md", _markdown(title, intro, tables, by_setup))
    template = Environment(autoescape=True).from_string(
        files("structured_ensembles.report").joinpath("page.html").read_text(encoding="utf-8")
    )
    html = [{"title": table_data.title, "html": html_table(*_cells(table_data))} for table_data in tables]
    path = folder / "report.html"
    write_text(path, template.render(title=title, intro=intro, tables=html, setups=written, runs=list(map(_row, runs))))
    return path


def report_runs(folders: Sequence[Path], out: Path) -> Path:
    """Write a report of run folders: one table for each data set and network, and every chart that they allow."""
    are_continual = {is_continual(folder) for folder in folders}
    if len(are_continual) != 1:
        raise ValueError("runs must be all of sens train or all of sens continual, not of both: report them apart")
    summary, read, draw = (
        (CONTINUAL_SUMMARY, read_continual_run, draw_continual_pictures)
        if are_continual.pop()
        else (SUMMARY, read_run, draw_pictures)
    )
    runs = [read(folder) for folder in folders]
    tables, number, explained = [], 0, False
    for setup, labelled in group_runs(runs).items():
        number += sum(map(len, labelled.values()))
        ours = {
            (label, name): [run.figures[name] for run in seed_runs if name in run.figures]
            for label, seed_runs in labelled.items()
            for name in summary
        }
        if equivalents := compute_deep_equivalents(labelled):
            ours |= {(label, "cal/deep_equivalent"): [value] for label, value in equivalents.items()}
            explained = True
        columns = [name for name in summary if any(ours[label, name] for label in labelled)]
        known = {key: values for key, values in ours.items() if values and key[1] in columns}
        tables.append(TableData(setup, list(labelled), columns, dict(zip(columns, columns, strict=True)), known, {}))
    intro = [f"{number} run{'s' * (number > 1)}, mean ± deviation over seeds.", *[EXPLANATION] * explained]
    if summary is SUMMARY:
        intro.append("Predictions of the members are combined by the mean of their probabilities.")
    return write_report(out, "Comparison of runs", intro, tables, runs, draw)


def describe_precisions(runs: Sequence[Finished]) -> list[str]:
    """Return a sentence on the precision of the runs' training; empty without runs."""
    counts = Counter(run.precision for run in runs)
    if len(counts) <= 1:
        return [f"Trained in {precision}." for precision in counts]
    shown = [f"{precision} ({number} run{'s' * (number > 1)})" for precision, number in sorted(counts.items())]
    return [f"Trained in {', '.join(shown)}."]


def group_runs(runs: Sequence[Finished]) -> dict[str, dict[str, list[Finished]]]:
    """Group runs by data set and network, then by label; one run per seed."""
    groups: dict[str, dict[str, list[Finished]]] = {}
    for run in runs:
        groups.setdefault(run.setup, {}).setdefault(run.label, []).append(run)
    return {setup: _distinguish_labels(labelled) for setup, labelled in groups.items()}


def _distinguish_labels(labelled: Mapping[str, Sequence[Finished]]) -> dict[str, list[Finished]]:
    """Extend the labels of runs that differ in more than the seed by the differing settings; drop duplicate runs."""
    distinct: dict[str, list[Finished]] = {}
    for label, runs in labelled.items():
        settings = [_flatten(run.config) for run in runs]
        names = sorted({name for run_settings in settings for name in run_settings} - {"seed"})
        differing = [name for name in names if len({str(run_settings.get(name)) for run_settings in settings}) > 1]
        seen = set()
        for run, run_settings in zip(runs, settings, strict=True):
            if str(run_settings) not in seen:
                suffixes = [f"{name.rpartition('.')[2]}={run_settings.get(name)}" for name in differing]
                distinct.setdefault(", ".join([label, *suffixes]), []).append(run)
            seen.add(str(run_settings))
    return distinct


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all settings by name, nested ones after a dot."""
    flat: dict[str, Any] = {}
    for name, value in sorted(config.items()):
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _cells(data: TableData) -> tuple[Any, ...]:
    """Return the arguments of `markdown_table` and `html_table`."""
    return data.rows, data.columns, data.metrics, data.ours, data.paper, data.titles, data.blank


def _markdown(
    title: str, intro: Sequence[str], tables: Sequence[TableData], by_setup: Mapping[str, Sequence[Picture]]
) -> str:
    """Write the report as Markdown."""
    blocks = [f"# {escape_markdown(title)}", *map(escape_markdown, intro)]
    for data in tables:
        blocks += [f"## {escape_markdown(data.title)}"] if data.title else []
        blocks.append(markdown_table(*_cells(data)).rstrip())
    for setup, setup_pictures in by_setup.items():
        blocks.append(f"{FIGURES} {escape_markdown(setup)}")
        blocks += [
            f"![{escape_markdown(picture.caption)}](figures/{_file_name(setup, picture)}.svg)"
            for picture in setup_pictures
        ]
    return "\n\n".join(blocks) + "\n"


def _draw_escaped(draw: Draw, labelled: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    """Draw the runs by label; dollar signs, which would begin a formula in matplotlib, are escaped for it."""
    drawn = draw({label.replace("$", r"\$"): seed_runs for label, seed_runs in labelled.items()})
    return [
        replace(picture, name=picture.name.replace(r"\$", "$"), caption=picture.caption.replace(r"\$", "$"))
        for picture in drawn
    ]


def _file_name(setup: str, picture: Picture) -> str:
    """Return a safe file name for a figure, whatever the names in run folders are."""
    plain = f"{setup}-{picture.name}".replace("/", "-").replace(":", ".")
    name = re.sub(r"[^A-Za-z0-9._=+,-]", "-", plain)[:LONGEST_NAME]
    return name if name == plain else f"{name}-{hashlib.sha256(plain.encode('utf-8', 'replace')).hexdigest()[:8]}"


def _row(run: Finished) -> dict[str, str]:
    """Format what a page says of one run; a dash for missing entries."""
    result = run.result
    versions = result.get("versions", {})
    known = {
        "folder": run.folder.name,
        "seed": run.config.get("seed"),
        "epochs": result.get("epochs"),
        "seconds": f"{result['seconds']:.0f}" if "seconds" in result else None,
        "precision": result.get("precision"),
        "device": result.get("device"),
        "torch": versions.get("torch"),
        "date": str(result.get("date") or "")[:10] or None,
    }
    return {name: "–" if value is None else str(value) for name, value in known.items()}


def _write_figure(path: Path, picture: Picture) -> str:
    """Write a figure as SVG and PNG; return the SVG text."""
    svg = as_svg(picture.figure)
    write_text(path.with_name(path.name + ".svg"), svg)
    write_atomically(path.with_name(path.name + ".png"), lambda temporary: _png(picture.figure, temporary))
    return svg


def _png(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png", dpi=150)
