"""Reports of finished runs: a Markdown file with figures as SVG and PNG, and one self-contained HTML page."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from structured_ensembles.common.markdown import escape_markdown
from structured_ensembles.common.plurals import counted
from structured_ensembles.continual.results import is_continual, read_continual_run
from structured_ensembles.paper.layout import TableData, write_table_data
from structured_ensembles.report.continual_pictures import draw_continual_pictures
from structured_ensembles.report.deep_equivalents import EXPLANATION, compute_deep_equivalents
from structured_ensembles.report.figures import as_svg
from structured_ensembles.report.pictures import Picture, draw_pictures
from structured_ensembles.report.web.page import Page, Section, write_page
from structured_ensembles.report.web.run_sections import list_sections
from structured_ensembles.report.web.summary import choose_subject, is_continual_run, summarise
from structured_ensembles.report.web.tables import Table, plain_table, split_columns, table_of_figures
from structured_ensembles.runs.finished import Finished, read_run
from structured_ensembles.storage.files import write_atomically, write_text

FIGURES = "## Figures:"  # a heading, with the data set and network
LONGEST_NAME = 150  # characters of a figure's file
SENTENCES = 3  # at the top of a page
SUMMARY = (
    "cls/accuracy", "cal/nll", "cal/ece", "cal/nll_t", "cal/ece_t", "cal/deep_equivalent", "conf/coverage",
    "conf/size", "conf/width",
    "unc/kept", "unc/kept_accuracy", "cls/brier", "div/cc", "div/wc", "div/disagreement", "unc/auroc",
    "unc/aurc", "unc/coverage_at_5_risk", "unc/filtered_accuracy", "unc/discarded", "reg/rmse", "reg/member_rmse",
    "reg/spread", "reg/nll", "reg/coverage_at_90", "size/overhead", "size/file_bytes",
)  # fmt: skip
# Tables of a page with so many figures; what is in none of them comes last.
GROUPS = (
    (
        "accuracy, calibration and memory",
        ("cls/accuracy", "cal/nll", "cal/ece", "cal/nll_t", "cal/ece_t", "cls/brier", "cal/deep_equivalent",
         "size/overhead", "size/file_bytes"),
    ),
    (
        "prediction sets and discarding",
        ("conf/coverage", "conf/size", "conf/width", "unc/kept", "unc/kept_accuracy", "unc/auroc", "unc/aurc",
         "unc/coverage_at_5_risk", "unc/filtered_accuracy", "unc/discarded"),
    ),
    ("diversity", ("div/cc", "div/wc", "div/disagreement")),
)  # fmt: skip
CONTINUAL_SUMMARY = ("cl/accuracy", "cl/final_accuracy", "cl/forgetting", "cl/accuracy_without_identity")


def write_report(
    folder: Path,
    title: str,
    intro: Sequence[str],
    tables: Sequence[TableData],
    runs: Sequence[Finished],
) -> Path:
    """Write `report.md`, its `figures/`, and `report.html`; return the path of the page."""
    intro = [*intro, *describe_precisions(runs)]
    grouped = group_runs(runs)
    by_setup = {setup: _draw_escaped(labelled) for setup, labelled in grouped.items()}
    for setup, setup_pictures in by_setup.items():
        for picture in setup_pictures:
            _write_figure(folder / "figures" / _file_name(setup, picture), picture)
    write_text(folder / "report.md", _markdown(title, intro, tables, by_setup))
    return write_page(folder / "report.html", compose_page(title, intro, tables, runs))


def compose_page(
    title: str,
    intro: Sequence[str],
    tables: Sequence[TableData],
    runs: Sequence[Finished],
) -> Page:
    """Compose the page: what it means, tables, charts of each setup, the runs behind them."""
    grouped = group_runs(runs)
    sentences = {setup: summarise(setup, labelled) for setup, labelled in grouped.items()}
    lead = next(iter(sentences.values()), [])
    if len(sentences) > 1:  # one for each, and the others at the charts
        lead = [lines[0] for lines in sentences.values() if lines][:SENTENCES]
    subjects = {choose_subject(labelled) for labelled in grouped.values()}
    pieces = [piece for data in tables for piece in split_columns(data, GROUPS)]
    sections = [Section("Figures in numbers", tables=[table_of_figures(piece, subjects) for piece in pieces])]
    for setup, labelled in grouped.items():
        setup_sections = list_sections(setup, labelled)
        if len(grouped) > 1 and setup_sections:
            setup_sections[0] = replace(setup_sections[0], text=sentences[setup])
        sections += setup_sections
    if runs:
        sections.append(Section(count_runs(len(runs)), tables=[_table_of_runs(runs)], folded=True))
    shaded = " Shaded: what the sentences above are about." if lead else ""
    notes = [*intro, f"Bold: the best of a column.{shaded}"]
    return Page(title, lead, notes, sections)


def report_runs(folders: Sequence[Path], out: Path) -> Path:
    """Write a report of run folders: one table for each data set and network, and every chart that they allow."""
    runs = [(read_continual_run if is_continual(folder) else read_run)(folder) for folder in folders]
    grouped = group_runs(runs)
    number = sum(len(seed_runs) for labelled in grouped.values() for seed_runs in labelled.values())
    tables = tabulate_runs(grouped)
    explained = any("cal/deep_equivalent" in data.columns for data in tables)
    intro = [f"{count_runs(number)}, mean ± deviation over seeds.", *[EXPLANATION] * explained]
    if not all(map(is_continual_run, runs)):
        intro.append("Predictions of the members are combined by the mean of their probabilities.")
    return write_report(out, "Comparison of runs" if number > 1 else "Report of a run", intro, tables, runs)


def tabulate_runs(grouped: Mapping[str, Mapping[str, Sequence[Finished]]]) -> list[TableData]:
    """Tabulate the figures of runs: a table for each data set and network, a row for each label."""
    tables = []
    for setup, labelled in grouped.items():
        summary = CONTINUAL_SUMMARY if is_continual_run(next(iter(labelled.values()))[0]) else SUMMARY
        ours = {
            (label, name): [run.figures[name] for run in seed_runs if name in run.figures]
            for label, seed_runs in labelled.items()
            for name in summary
        }
        equivalents = compute_deep_equivalents(labelled)
        ours |= {(label, "cal/deep_equivalent"): [value] for label, value in equivalents.items()}
        columns = [name for name in summary if any(ours[label, name] for label in labelled)]
        known = {key: values for key, values in ours.items() if values and key[1] in columns}
        tables.append(TableData(setup, list(labelled), columns, dict(zip(columns, columns, strict=True)), known, {}))
    return tables


def count_runs(number: int) -> str:
    """Write a number of runs: "1 run", "2 runs"."""
    return counted(number, "run")


def describe_precisions(runs: Sequence[Finished]) -> list[str]:
    """Return a sentence on the precision of the runs' training; empty without runs."""
    counts = Counter(run.precision for run in runs)
    if len(counts) <= 1:
        return [f"Trained in {precision}." for precision in counts]
    shown = [f"{precision} ({count_runs(number)})" for precision, number in sorted(counts.items())]
    return [f"Trained in {', '.join(shown)}."]


def group_runs(runs: Sequence[Finished]) -> dict[str, dict[str, list[Finished]]]:
    """Group runs by data set and network, then by label; one run per seed."""
    groups: dict[str, dict[str, list[Finished]]] = {}
    are_mixed = len({is_continual_run(run) for run in runs}) > 1
    for run in runs:
        setup = run.setup + (", task after task" if are_mixed and is_continual_run(run) else "")
        groups.setdefault(setup, {}).setdefault(run.label, []).append(run)
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


def _markdown(
    title: str, intro: Sequence[str], tables: Sequence[TableData], by_setup: Mapping[str, Sequence[Picture]]
) -> str:
    """Write the report as Markdown."""
    blocks = [f"# {escape_markdown(title)}", *map(escape_markdown, intro)]
    for data in tables:
        blocks += [f"## {escape_markdown(data.title)}"] if data.title else []
        blocks.append(write_table_data(data))
    for setup, setup_pictures in by_setup.items():
        blocks.append(f"{FIGURES} {escape_markdown(setup)}")
        blocks += [
            f"![{escape_markdown(picture.caption)}](figures/{_file_name(setup, picture)}.svg)"
            for picture in setup_pictures
        ]
    return "\n\n".join(blocks) + "\n"


def _draw_escaped(labelled: Mapping[str, Sequence[Finished]]) -> list[Picture]:
    """Draw the runs on one data set and network, by label: all of `sens continual`, or all of `sens train`.

    Dollar signs, which would begin a formula in matplotlib, are escaped for it.
    """
    draw = draw_continual_pictures if is_continual_run(next(iter(labelled.values()))[0]) else draw_pictures
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


def _table_of_runs(runs: Sequence[Finished]) -> Table:
    """List the runs behind a page; a dash for missing entries."""
    rows = []
    for run in runs:
        result = run.result
        date = str(result.get("date") or "")[:10] or None
        torch_version = result.get("versions", {}).get("torch")
        known = (result.get("epochs"), run.seconds, result.get("precision"), result.get("device"))
        rows.append([run.folder.name, run.config.get("seed"), *known, torch_version, date])
    return plain_table("", ("run", "seed", "epochs", "seconds", "precision", "device", "torch", "date"), rows)


def _write_figure(path: Path, picture: Picture) -> None:
    """Write a figure as SVG and PNG."""
    write_text(path.with_name(path.name + ".svg"), as_svg(picture.figure))
    # Without the version of matplotlib, by which the bytes would differ.
    save = partial(picture.figure.savefig, format="png", dpi=150, metadata={"Software": None})
    write_atomically(path.with_name(path.name + ".png"), save)
