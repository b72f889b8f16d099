"""Topics: what `docs/results.md` shows, one table or figure of the paper each, rendered from the finished runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.layout import Key, Lines, markdown_table
from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.paper.published import Cell
from structured_ensembles.paper.studies import RIVALS, Part, Study
from structured_ensembles.paper.tables import corruption_notes, study_table
from structured_ensembles.paper.wide_studies import wide_front_study, wide_resnet_study
from structured_ensembles.report.docs.differences import difference_table
from structured_ensembles.report.docs.pictures import front_figure, pruning_figure
from structured_ensembles.report.docs.records import Records, left, provenance

NOT_RUN = "not run"
SHORT_RULES = {"mean": "mean of probabilities", "logits": "paper's rule"}
MAIN = "cifar10-resnet20"
PLACES = (
    ("cifar100", "resnet20"), ("svhn", "resnet20"), ("cifar10", "vgg11"), ("cifar100", "vgg11"), ("svhn", "vgg11"),
    ("tiny-imagenet", "resnet32"), ("tiny-imagenet", "vgg16"),
)  # fmt: skip
METHOD_PAIRS = (
    *(("structured, layer", other) for other in ("single", "random", "narrow", "deep")),
    *(("structured, network", other) for other in ("single", "deep")),
    *(("structured, layer, rescaled", other) for other in ("single", "random, rescaled", "narrow", "deep")),
)
FRONT_FIGURES = ("cls/accuracy", "cal/nll", "cal/ece15", "cal/nll_t", "cal/ece15_t")
CENTRES = ("structured ×4, 1, coupled", "structured ×4, 1")
FRONT_PAIRS = tuple(
    (centre, other)
    for centre in CENTRES
    for other in (
        "single", "random ×4, 1, coupled", "narrow ×4, 1, coupled", "deep ×4", "batch-ensemble ×4", "mc-dropout ×4",
    )
    if centre.endswith("coupled") or not other.endswith("coupled")
)  # fmt: skip
WIDE_PAIRS = tuple((centre, other) for centre in CENTRES for other in ("single", "deep ×4"))


@dataclass(frozen=True)
class Topic:
    """One table, or several of the same rows.

    sections: of the queue, whose runs it is about. Where none of them is done, a line takes the place of the tables.
    studies: shown side by side if each has one column.
    pairs, figures: rows whose differences are listed, and in which figures.
    pictures: by the name of the file, a function that draws it, and what it shows.
    """

    sections: tuple[str, ...]
    studies: tuple[Study, ...]
    pairs: Sequence[tuple[str, str]] = ()
    figures: Sequence[str] = ()
    pictures: Mapping[str, tuple[Callable[[Records], Figure | None], str]] | None = None


def topics() -> dict[str, Topic]:
    """List all topics by name; the template says where each of them goes."""
    main = Part(datasets=("cifar10",), models=("resnet20",))
    whole = Part()

    def of_main(name: str, figure: str | None = None) -> Topic:
        sections = (MAIN, f"{MAIN}-magnitude")
        own = study(name, main)
        return Topic(sections, (own,), pairs_within(own) if figure else (), (figure,) if figure else ())

    found = {
        "table-accuracy": of_main("table-accuracy", "cls/accuracy"),
        "figure-memory": of_main("figure-memory"),
        "table-ece": of_main("table-ece", "cal/ece"),
        "table-diversity": of_main("table-diversity"),
        "table-uncertainty": of_main("table-uncertainty"),
        "pruning": Topic(("pruning",), (study("table-pruning", whole),)),
        "initialization": Topic(("initialization",), (study("table-initialization", whole),)),
        "continual-ablation": Topic(("continual-ablation",), (study("table-continual-ablation", whole),)),
        "continual-overhead": Topic((), (study("table-continual-overhead", whole),)),
        "continual-memory": Topic((), (study("table-continual-memory", whole),)),
    }
    for dataset in ("cifar10", "cifar100"):
        found[f"front-{dataset}"] = front_topic(
            f"front-{dataset}", study("front", Part(datasets=(dataset,))), FRONT_PAIRS
        )
        own = wide_resnet_study(dataset)
        found[own.name] = Topic(("wrn28-10",), (own,), WIDE_PAIRS[2:], FRONT_FIGURES)
    found["front-wide-resnet20"] = front_topic("front-wide-resnet20", wide_front_study(), WIDE_PAIRS)
    for dataset, model in PLACES:
        part = Part(datasets=(dataset,), models=(model,), methods=(*RIVALS, "random", "narrow"))
        both = tuple(study(name, part) for name in ("table-accuracy", "table-ece"))
        figures = ("cls/accuracy", "cal/ece")
        found[f"{dataset}-{model}"] = Topic((f"{dataset}-{model}",), both, pairs_within(both[0]), figures)
    for dataset in ("mnist", "cifar10", "cifar100"):
        own = study("table-continual", Part(datasets=(dataset,)))
        others = [("structured", row) for row in own.rows if row != "structured"]
        found[f"split-{dataset}"] = Topic((f"split-{dataset}",), (own,), others, ("cl/accuracy",))
    pruning = study("figure-continual-pruning", whole)
    text = "Accuracy against the share of pruned neurons."
    drawn = {"continual-pruning": (lambda records: pruning_figure(records, pruning), text)}
    found["continual-pruning"] = Topic(("continual-pruning",), (pruning,), pictures=drawn)
    return found


def pairs_within(wanted: Study) -> list[tuple[str, str]]:
    """List the comparisons of methods that a study has both rows of."""
    return [pair for pair in METHOD_PAIRS if set(pair) <= set(wanted.rows)]


def front_topic(name: str, wanted: Study, pairs: Sequence[tuple[str, str]]) -> Topic:
    """Quality against memory: a table, its figure before and after temperature, and the differences."""
    text = "Accuracy, NLL and ECE (15 bins) against memory, one point for each whole ensemble, mean of probabilities"
    pictures = {
        name: (lambda records: front_figure(records, wanted), f"{text}."),
        f"{name}-temperature": (lambda records: front_figure(records, wanted, True), f"{text}; after temperature."),
    }
    return Topic((name,), (wanted,), pairs, FRONT_FIGURES, pictures)


def rendered(topic: Topic, records: Records, drawn: Collection[str] = ()) -> str:
    """Write a topic as Markdown: its tables, where they come from, differences, figures; or that nothing was run.

    drawn: the names of the figures that exist.
    """
    experiments = {own.folder: own for wanted in topic.studies for own in wanted.experiments}
    planned = [own for own in records.in_sections(topic.sections) if own.experiment.folder in experiments]
    if planned and not any(map(records.is_done, planned)):
        return f"Not run yet ({left(planned)})."
    parts = [table_text(own, counted=bool(topic.studies[0].counted)) for own in topic_tables(topic.studies, records)]
    for own in topic.studies:
        parts += [" ".join(corruption_notes(own, records.done))]
    if runs := records.runs(experiments.values()):
        parts.append(provenance(runs))
    if topic.pairs:
        parts.append(difference_table(records, topic.studies[0], topic.pairs, topic.figures))
    for name, (_, caption) in (topic.pictures or {}).items():
        if name in drawn:
            parts.append(f"![{caption}](images/{name}.svg)\n\n*{caption}*")
    return "\n\n".join(part for part in parts if part)


def topic_tables(studies: Sequence[Study], records: Records) -> list[Lines]:
    """Fill the tables of some studies of the same rows: side by side if each has one column, else one for each rule."""
    filled = [(wanted, rule, study_table(wanted, records.done, rule)) for wanted in studies for rule in wanted.rules]
    if any(len(wanted.columns) > 1 for wanted in studies):
        return [replace(own, titles=_by_metric(own)) for _, _, own in filled]
    shown = {}
    for wanted, rule, own in filled:
        words = [] if len(studies) == 1 < len(wanted.rules) else [metric_of(own.metrics[own.columns[0]]).title]
        words += [SHORT_RULES[rule]] if len(wanted.rules) > 1 else []
        shown[", ".join(words)] = own
    if len(shown) == 1:
        return list(shown.values())
    return [side_by_side(shown)]


def _by_metric(own: Lines) -> dict[str, str]:
    """Title columns by their metric alone, where that tells them apart."""
    titles = {column: metric_of(own.metrics[column]).title for column in own.columns}
    return titles if len(set(titles.values())) == len(titles) else {}


def side_by_side(tables: Mapping[str, Lines]) -> Lines:
    """Join tables of one column each, by the title that the column gets; rows are all that any of them has."""
    rows = tuple(dict.fromkeys(row for own in tables.values() for row in own.rows))
    metrics: dict[str, str] = {}
    ours: dict[Key, Sequence[float]] = {}
    paper: dict[Key, Cell] = {}
    blank: set[Key] = set()
    for title, own in tables.items():
        (column,) = own.columns
        metrics[title] = own.metrics[column]
        ours |= {(row, title): values for (row, _), values in own.ours.items()}
        paper |= {(row, title): cell for (row, _), cell in own.paper.items()}
        blank |= {(row, title) for row in rows if row not in own.rows or (row, column) in own.blank}
    return Lines("", rows, tuple(tables), metrics, ours, paper, blank)


def table_text(own: Lines, counted: bool = False) -> str:
    """Write a table as Markdown, with the seeds of every row, and what was not run."""
    table = markdown_table(
        own.rows, own.columns, own.metrics, own.ours, own.paper, own.titles, own.blank, NOT_RUN, seeds=not counted
    ).rstrip()
    return f"**{own.title}**\n\n{table}" if own.title else table
