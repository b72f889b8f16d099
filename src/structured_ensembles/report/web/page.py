"""Page: sections of sentences, tables, charts and samples, written as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup, escape

from structured_ensembles.report.web.plots import Chart
from structured_ensembles.report.web.sample_details import SampleDetails, ShownSample
from structured_ensembles.report.web.svg import plain
from structured_ensembles.report.web.tables import Table, html_table
from structured_ensembles.storage.files import write_text

# From which width of the screen on a table of few, some or many columns is a table; below it is cards.
BREAKPOINTS = {"few": 620, "some": 920, "many": 1180}


@dataclass(frozen=True)
class Section:
    """Section of a page; folded: behind its title until it is opened. galleries: (title, samples)."""

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    galleries: Sequence[tuple[str, Sequence[ShownSample]]] = ()
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """Page: the title, what it means in three sentences, notes, sections."""

    title: str
    lead: Sequence[str]
    intro: Sequence[str]
    sections: Sequence[Section]


def render_page(page: Page) -> str:
    """Render a page as HTML. Its policy lets the browser run the one script below, and load nothing from outside."""
    folder = files("structured_ensembles.report.web")
    names = ("page.html", "page.css", "cards.css", "page.js")
    sources = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in names}
    cards = "\n".join(
        sources["cards.css"].replace("WIDTH", str(width)).replace("NAME", name) for name, width in BREAKPOINTS.items()
    )
    digest = base64.b64encode(hashlib.sha256(sources["page.js"].encode()).digest()).decode()
    environment = Environment(autoescape=True, finalize=_show)
    environment.filters["keep_units"] = _keep_units
    return environment.from_string(sources["page.html"]).render(
        page=page,
        style=Markup(sources["page.css"].replace("CARDS", cards)),
        script=Markup(sources["page.js"]),
        script_hash=f"sha256-{digest}",
        html_table=html_table,
    )


def _keep_units(text: str) -> Markup:
    """Escape a text, and keep a number and its unit on one line."""
    return escape(plain(text)).replace(" %", "\N{NO-BREAK SPACE}%")


def _show(value: object) -> object:
    """Write out control characters of any text on its way into the page, which is escaped after that."""
    return value if isinstance(value, Markup) else plain(value)


def write_page(path: Path, page: Page) -> Path:
    """Write a page; return its path."""
    write_text(path, render_page(page))
    return path


def sample_section(details: SampleDetails, label: str) -> Section | None:
    """Return the gallery of the most uncertain samples, discarded and kept; None without samples."""
    discarded = [sample for sample in details.samples if not sample.kept]
    kept = [sample for sample in details.samples if sample.kept]
    if not details.samples:
        return None
    text = [
        f"Test samples that {label} is least sure of. In every box: the prediction and its probability, the truth, "
        "then what each member votes for (point at a vote for its probability)."
    ]
    galleries = []
    if discarded:
        galleries.append((f"Discarded: entropy above {details.threshold:.2f}, the most uncertain first", discarded))
    if kept:
        least = (
            "Kept: the most uncertain below the threshold" if details.threshold is not None else "The most uncertain"
        )
        galleries.append((least, kept))
    return Section("The samples it is least sure of", text, galleries=galleries)
