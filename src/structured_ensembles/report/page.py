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

from structured_ensembles.common.markdown import literal
from structured_ensembles.continual.results import is_continual, read_continual_run
from structured_ensembles.paper.layout import Lines, html_table, markdown_table
from structured_ensembles.report.continual_pictures import continual_pictures
from structured_ensembles.report.deep_equivalents import EXPLANATION, deep_equivalents
from structured_ensembles.report.figures import as_svg
from structured_ensembles.report.pictures import Picture, pictures
from structured_ensembles.runs.finished import Finished, read_run
from structured_ensembles.storage.files import write_atomically, write_text

Draw = Callable[[Mapping[str, Sequence[Finished]]], list[Picture]]
FIGURES = "## Figures:"  # a heading, with the data set and network
LONGEST_NAME = 150  # characters of a figure's file
BROAD = 6.5  # inches from which a figure gets the whole width of the page
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
    tables: Sequence[Lines],
    runs: Sequence[Finished],
    draw: Draw = pictures,
) -> Path:
    """`report.md`, `figures/` and `report.html`; returns the path of the page.

    draw: the pictures of the runs on one data set and network, by label.
    """
    intro = [*intro, *precisions(runs)]
    places = {place: _drawn(draw, labelled) for place, labelled in grouped(runs).items()}
    written: dict[str, list[dict[str, Any]]] = {}
    for place, shown in places.items():
        for picture in shown:
            svg = _write_figure(folder / "figures" / _file_name(place, picture), picture)
            broad = picture.figure.get_figwidth() > BROAD
            written.setdefault(place, []).append({"svg": svg, "caption": picture.caption, "broad": broad})
    write_text(folder / "report.md", _markdown(title, intro, tables, places))
    template = Environment(autoescape=True).from_string(
        files("structured_ensembles.report").joinpath("page.html").read_text(encoding="utf-8")
    )
    html = [{"title": own.title, "html": html_table(*_cells(own))} for own in tables]
    path = folder / "report.html"
    write_text(path, template.render(title=title, intro=intro, tables=html, places=written, runs=list(map(_row, runs))))
    return path


def report_runs(folders: Sequence[Path], out: Path) -> Path:
    """A report of any run folders: one table for each data set and network, and every figure that they allow."""
    kinds = {is_continual(folder) for folder in folders}
    if len(kinds) != 1:
        raise ValueError("runs must be some of sens train, or some of sens continual: they have no figures in common")
    summary, read, draw = (
        (CONTINUAL_SUMMARY, read_continual_run, continual_pictures) if kinds.pop() else (SUMMARY, read_run, pictures)
    )
    runs = [read(folder) for folder in folders]
    tables, number, explained = [], 0, False
    for place, labelled in grouped(runs).items():
        number += sum(map(len, labelled.values()))
        ours = {
            (label, name): [run.figures[name] for run in own if name in run.figures]
            for label, own in labelled.items()
            for name in summary
        }
        if equivalents := deep_equivalents(labelled):
            ours |= {(label, "cal/deep_equivalent"): [value] for label, value in equivalents.items()}
            explained = True
        columns = [name for name in summary if any(ours[label, name] for label in labelled)]
        shown = {key: values for key, values in ours.items() if values and key[1] in columns}
        tables.append(Lines(place, list(labelled), columns, dict(zip(columns, columns, strict=True)), shown, {}))
    intro = [f"{number} run{'s' * (number > 1)}, mean ± deviation over seeds.", *[EXPLANATION] * explained]
    if summary is SUMMARY:
        intro.append("Predictions of the members are combined by the mean of their probabilities.")
    return write_report(out, "Comparison of runs", intro, tables, runs, draw)


def precisions(runs: Sequence[Finished]) -> list[str]:
    """Say in one sentence in which precision the runs were trained; nothing if there are no runs."""
    counts = Counter(run.precision for run in runs)
    if len(counts) <= 1:
        return [f"Trained in {own}." for own in counts]
    shown = [f"{own} ({number} run{'s' * (number > 1)})" for own, number in sorted(counts.items())]
    return [f"Trained in {', '.join(shown)}."]


def grouped(runs: Sequence[Finished]) -> dict[str, dict[str, list[Finished]]]:
    """By data set and network, then by what was done; one run per seed."""
    found: dict[str, dict[str, list[Finished]]] = {}
    for run in runs:
        found.setdefault(run.place, {}).setdefault(run.label, []).append(run)
    return {place: _told_apart(labelled) for place, labelled in found.items()}


def _told_apart(labelled: Mapping[str, Sequence[Finished]]) -> dict[str, list[Finished]]:
    """Runs that differ in more than the seed get labels that say so; of the same run in two places, one is left."""
    found: dict[str, list[Finished]] = {}
    for label, runs in labelled.items():
        settings = [_flat(run.config) for run in runs]
        names = sorted({name for own in settings for name in own} - {"seed"})
        differing = [name for name in names if len({str(own.get(name)) for own in settings}) > 1]
        known = set()
        for run, own in zip(runs, settings, strict=True):
            if str(own) not in known:
                told = [f"{name.rpartition('.')[2]}={own.get(name)}" for name in differing]
                found.setdefault(", ".join([label, *told]), []).append(run)
            known.add(str(own))
    return found


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Its settings by name, those of nested ones after a dot."""
    found: dict[str, Any] = {}
    for name, value in sorted(config.items()):
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def _cells(own: Lines) -> tuple[Any, ...]:
    return own.rows, own.columns, own.metrics, own.ours, own.paper, own.titles, own.blank


def _markdown(
    title: str, intro: Sequence[str], tables: Sequence[Lines], places: Mapping[str, Sequence[Picture]]
) -> str:
    parts = [f"# {literal(title)}", *map(literal, intro)]
    for own in tables:
        parts += [f"## {literal(own.title)}"] if own.title else []
        parts.append(markdown_table(*_cells(own)).rstrip())
    for place, shown in places.items():
        parts.append(f"{FIGURES} {literal(place)}")
        parts += [f"![{literal(own.caption)}](figures/{_file_name(place, own)}.svg)" for own in shown]
    return "\n\n".join(parts) + "\n"


def _drawn(draw: Draw, labelled: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    """Draw the runs by label; in figures a dollar sign would begin a formula, so that it is escaped for them."""
    found = draw({label.replace("$", r"\$"): own for label, own in labelled.items()})
    return [replace(own, name=own.name.replace(r"\$", "$"), caption=own.caption.replace(r"\$", "$")) for own in found]


def _file_name(place: str, picture: Picture) -> str:
    """Name the file of a figure; whatever names in run folders hold, it stays in the folder of figures."""
    plain = f"{place}-{picture.name}".replace("/", "-").replace(":", ".")
    name = re.sub(r"[^A-Za-z0-9._=+,-]", "-", plain)[:LONGEST_NAME]
    return name if name == plain else f"{name}-{hashlib.sha256(plain.encode('utf-8', 'replace')).hexdigest()[:8]}"


def _row(run: Finished) -> dict[str, str]:
    """Tell what a page says of one run, as text; a dash for what its folder does not hold."""
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
    svg = as_svg(picture.figure)
    write_text(path.with_name(path.name + ".svg"), svg)
    write_atomically(path.with_name(path.name + ".png"), lambda part: _png(picture.figure, part))
    return svg


def _png(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png", dpi=150)
