"""Render `docs/results.md`, its figures and the README's tables from recorded runs, and write them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from structured_ensembles.common.markdown import write_table
from structured_ensembles.paper.sections import plan_runs
from structured_ensembles.report.docs.choice import choice_table
from structured_ensembles.report.docs.gains import gains_table
from structured_ensembles.report.docs.neurons import write_neurons
from structured_ensembles.report.docs.records import (
    Records,
    estimate_hours,
    format_provenance,
    format_remaining,
    read_records,
)
from structured_ensembles.report.docs.targets import list_targets, targets_summary, targets_table
from structured_ensembles.report.docs.topics import (
    MAIN,
    Topic,
    fill_tables,
    list_topics,
    render_topic,
    write_titled_table,
)
from structured_ensembles.report.docs.wall_time import BATCH, read_steps, wall_time_table
from structured_ensembles.report.figures import as_svg
from structured_ensembles.storage.files import write_text

PAGE = Path("docs/results.md")
IMAGES = Path("docs/images")
README = Path("README.md")
BLOCK = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Docs:
    """Rendered documents: the page, the README with its tables filled in, and figures by the name of their file."""

    page: str
    readme: str
    images: dict[str, Figure]


def write_docs(results: Path) -> list[Path]:
    """Write the page, its figures and the README's tables from the runs below `results`; return the paths written.

    The checkout, which holds README.md, docs/ and benchmarks/results/, is the folder of `results`.
    """
    root = results.resolve().parent
    if not (root / README).exists():
        raise ValueError(f"{root} has no {README}: --docs takes the folder results/ of a checkout, not {results}")
    docs = render_docs(results, root)
    texts = {PAGE: docs.page, README: docs.readme}
    texts |= {IMAGES / f"{name}.svg": as_svg(figure) for name, figure in docs.images.items()}
    for path, text in texts.items():
        write_text(root / path, text)
    return [root / path for path in texts]


def render_docs(results: Path, root: Path) -> Docs:
    """Render page, README and charts without writing; the same runs give the same bytes."""
    records = read_records(results, plan_runs())
    known = list_topics()
    images = {
        name: figure
        for topic in known.values()
        for name, (draw, _) in (topic.pictures or {}).items()
        if (figure := draw(records)) is not None
    }
    texts = {name: render_topic(topic, records, images) for name, topic in known.items()}
    goals = list_targets(records)
    waiting = [run for run in records.planned if not records.is_done(run)]
    choice, neurons = choice_table(records), write_neurons(records)
    template = Environment(autoescape=False, undefined=StrictUndefined, keep_trailing_newline=True).from_string(
        files("structured_ensembles.report.docs").joinpath("results.md.jinja").read_text(encoding="utf-8")
    )
    page = template.render(
        topic=texts.__getitem__,
        done=len(records.done),
        planned=len(records.planned),
        hours_left=estimate_hours(waiting),
        targets=targets_table(goals),
        choice=choice,
        neurons=f"- {neurons} See [the test](#does-it-matter-which-neurons-are-kept).",
        progress=write_progress_table(records),
        batch=BATCH,
        wall_time=wall_time_table(records, read_steps(root / "benchmarks" / "results")),
    )
    blocks = {
        "gains": f'{gains_table(records)}\n\n{neurons} `selection="random"` saves the search. '
        "[More](docs/results.md#does-it-matter-which-neurons-are-kept).",
        "table-accuracy": write_compact_table(known, records),
        "targets": targets_summary(goals),
        "front": f"{write_readme_front(known['front-cifar10'], records, images)}\n\n"
        f"{len(records.done)} of {len(records.planned)} planned runs are done.",
    }
    return Docs(page.lstrip(), fill_blocks(_read(root / README), blocks), images)


def fill_blocks(text: str, blocks: dict[str, str]) -> str:
    """Replace the text between `<!-- results: NAME -->` and `<!-- end -->`."""
    names = [match["name"] for match in BLOCK.finditer(text)]
    if text.count("<!-- results:") != len(names):
        raise ValueError("each <!-- results: NAME --> must stand on a line of its own and be closed by <!-- end -->")
    if unknown := sorted(set(names) - blocks.keys()):
        raise ValueError(f"there are no results named {', '.join(unknown)}; there are {', '.join(blocks)}")
    return BLOCK.sub(lambda match: f"{match[1]}\n{blocks[match['name']]}\n\n{match[3]}", text)


def write_progress_table(records: Records) -> str:
    """Write a table of the runs done and the hours left in each section of the queue."""
    lines = []
    for section in dict.fromkeys(run.section for run in records.planned):
        planned = records.in_section(section)
        waiting = [run for run in planned if not records.is_done(run)]
        lines.append((section, str(len(planned) - len(waiting)), str(len(planned)), f"{estimate_hours(waiting):.1f}"))
    return write_table(("section", "runs done", "planned", "hours left"), lines, right=(1, 2, 3))


def write_compact_table(known: dict[str, Topic], records: Records) -> str:
    """Write the README's table: accuracy and ECE by both rules, and the overhead, on CIFAR-10/ResNet20."""
    planned = records.in_section(MAIN)
    if not any(map(records.is_done, planned)):
        return f"Not run yet ({format_remaining(planned)})."
    studies = [known[name].studies[0] for name in ("table-accuracy", "table-ece", "figure-memory")]
    (joined,) = fill_tables(studies, records)
    return f"{write_titled_table(joined)}\n\n{format_provenance(records.runs(studies[0].experiments))}"


def write_readme_front(topic: Topic, records: Records, drawn: Collection[str]) -> str:
    """Write the README's chart of the front, or that it was not run."""
    planned = [run for run in records.list_planned(topic.experiments) if not records.is_done(run)]
    name, (_, caption) = next(iter((topic.pictures or {}).items()))
    if name not in drawn:
        remaining = format_remaining(planned)
        return f"The front, quality against memory with ResNet18 on CIFAR-10: not run yet (left: {remaining})."
    return f"![{caption}]({IMAGES}/{name}.svg)\n\n*{caption}*"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
