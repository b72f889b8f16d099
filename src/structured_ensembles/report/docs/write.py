"""Render `docs/results.md`, its figures and the README's tables from recorded runs, and write them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from structured_ensembles.paper.sections import Planned, planned_runs
from structured_ensembles.report.docs.records import Records, hours, left, provenance, read_records, table
from structured_ensembles.report.docs.targets import targets, targets_summary, targets_table
from structured_ensembles.report.docs.topics import MAIN, Topic, rendered, table_text, topic_tables, topics
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


def write_docs(results: Path, root: Path | None = None) -> list[Path]:
    """Write the page, its figures and the README's tables from the runs below `results`; returns what was written.

    root: the checkout, which holds README.md, docs/ and benchmarks/results/; by default the folder of `results`.
    """
    root = results.resolve().parent if root is None else root
    if not (root / README).exists():
        raise ValueError(f"{root} has no {README}: --docs takes the folder results/ of a checkout, not {results}")
    found = render_docs(results, root)
    texts = {PAGE: found.page, README: found.readme}
    texts |= {IMAGES / f"{name}.svg": as_svg(figure) for name, figure in found.images.items()}
    for path, text in texts.items():
        write_text(root / path, text)
    return [root / path for path in texts]


def render_docs(results: Path, root: Path, planned: Sequence[Planned] | None = None) -> Docs:
    """Render everything without writing; the same runs give the same bytes."""
    records = read_records(results, planned_runs() if planned is None else planned)
    known = topics()
    images = {
        name: figure
        for own in known.values()
        for name, (draw, _) in (own.pictures or {}).items()
        if (figure := draw(records)) is not None
    }
    texts = {name: rendered(own, records, images) for name, own in known.items()}
    goals = targets(records)
    waiting = [own for own in records.planned if not records.is_done(own)]
    template = Environment(autoescape=False, undefined=StrictUndefined, keep_trailing_newline=True).from_string(
        files("structured_ensembles.report.docs").joinpath("results.md.jinja").read_text(encoding="utf-8")
    )
    page = template.render(
        topic=texts.__getitem__,
        done=len(records.done),
        planned=len(records.planned),
        hours_left=hours(waiting),
        targets=targets_table(goals),
        progress=progress_table(records),
        batch=BATCH,
        wall_time=wall_time_table(records, read_steps(root / "benchmarks" / "results")),
    )
    blocks = {
        "progress": f"{len(records.done)} of {len(records.planned)} planned runs are done.",
        "table-accuracy": compact_table(known, records),
        "targets": targets_summary(goals),
        "front": readme_front(known["front-cifar10"], records, images),
    }
    return Docs(page.lstrip(), filled(_read(root / README), blocks), images)


def filled(text: str, blocks: dict[str, str]) -> str:
    """Replace what stands between `<!-- results: NAME -->` and `<!-- end -->`."""
    names = [found["name"] for found in BLOCK.finditer(text)]
    if text.count("<!-- results:") != len(names):
        raise ValueError("each <!-- results: NAME --> must stand on a line of its own and be closed by <!-- end -->")
    if unknown := sorted(set(names) - blocks.keys()):
        raise ValueError(f"there are no results named {', '.join(unknown)}; there are {', '.join(blocks)}")
    return BLOCK.sub(lambda found: f"{found[1]}\n{blocks[found['name']]}\n\n{found[3]}", text)


def progress_table(records: Records) -> str:
    """Write how many runs of each section of the queue are done, and the hours that are left."""
    lines = []
    for section in dict.fromkeys(own.section for own in records.planned):
        own = records.in_sections([section])
        waiting = [run for run in own if not records.is_done(run)]
        lines.append((section, str(len(own) - len(waiting)), str(len(own)), f"{hours(waiting):.1f}"))
    return table(("section", "runs done", "planned", "hours left"), lines, right=(1, 2, 3))


def compact_table(known: dict[str, Topic], records: Records) -> str:
    """The README's table: accuracy and ECE by both rules, and the overhead, on CIFAR-10/ResNet20."""
    planned = records.in_sections([MAIN])
    if not any(map(records.is_done, planned)):
        return f"Not run yet ({left(planned)})."
    studies = [known[name].studies[0] for name in ("table-accuracy", "table-ece", "figure-memory")]
    (joined,) = topic_tables(studies, records)
    return f"{table_text(joined)}\n\n{provenance(records.runs(studies[0].experiments))}"


def readme_front(topic: Topic, records: Records, drawn: Collection[str]) -> str:
    """The README's figure of the front, or that it is not run."""
    planned = [own for own in records.in_sections(topic.sections) if not records.is_done(own)]
    name, (_, caption) = next(iter((topic.pictures or {}).items()))
    if name not in drawn:
        return f"The front, quality against memory with ResNet18 on CIFAR-10: not run yet (left: {left(planned)})."
    return f"![{caption}]({IMAGES}/{name}.svg)\n\n*{caption}*"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
