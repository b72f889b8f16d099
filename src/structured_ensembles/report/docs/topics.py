"""Topics of `docs/results.md`: one table or figure of the paper each, rendered from the finished runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.defaults import defaults, defaults_on_test
from structured_ensembles.paper.layout import Key, TableData, write_table_data
from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.paper.published import Cell
from structured_ensembles.paper.studies import RIVALS, Study, StudyOptions
from structured_ensembles.paper.subsets import subsets
from structured_ensembles.paper.tables import fill_study_table, write_corruption_notes
from structured_ensembles.paper.wide_studies import tuned_study, wide_front_study, wide_resnet_study
from structured_ensembles.report.docs.defaults import write_choice_of_defaults
from structured_ensembles.report.docs.differences import difference_table
from structured_ensembles.report.docs.neurons import write_subset_analysis
from structured_ensembles.report.docs.pictures import draw_front_of_study, draw_pruning
from structured_ensembles.report.docs.records import NOT_RUN, Records, format_provenance, format_remaining

SHORT_RULES = {"mean": "mean of probabilities", "logits": "paper's rule"}
MAIN = "cifar10-resnet20"
SETUPS = (
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
TUNED_PAIRS = (
    *(
        ("prune-and-tune ×4, 30 + 10 epochs", other)
        for other in (
            "single, 40 epochs", "random ×4, 40 epochs", "random ×4, 18 epochs",
            "prune-and-tune ×4, random, 30 + 10 epochs",
        )
    ),
    *(("prune-and-tune ×2, 30 + 10 epochs", other) for other in ("single, 40 epochs", "random ×2, 40 epochs")),
)  # fmt: skip
WIDE_PAIRS = tuple((centre, other) for centre in CENTRES for other in ("single", "deep ×4"))


@dataclass(frozen=True)
class Topic:
    """Table, or several tables of the same rows. If none of their runs is done, a line replaces them.

    studies: shown side by side if each has one column.
    pairs, figures: rows whose differences are listed, and in which figures.
    pictures: by the name of the file, a function that draws it, and its caption.
    remarks: a function that writes what follows the tables.
    """

    studies: tuple[Study, ...]
    pairs: Sequence[tuple[str, str]] = ()
    figures: Sequence[str] = ()
    pictures: Mapping[str, tuple[Callable[[Records], Figure | None], str]] | None = None
    remarks: Callable[[Records], str] | None = None

    @property
    def experiments(self) -> list[Any]:
        """Return the runs of all studies once each, those shared with other topics too."""
        return list({run.folder: run for wanted in self.studies for run in wanted.experiments}.values())


def list_topics() -> dict[str, Topic]:
    """Return all topics by name, as the template uses them."""
    main = StudyOptions(datasets=("cifar10",), models=("resnet20",))
    unrestricted = StudyOptions()

    def main_topic(name: str, figure: str | None = None) -> Topic:
        main_study = study(name, main)
        return Topic((main_study,), pairs_within(main_study) if figure else (), (figure,) if figure else ())

    by_name = {
        "table-accuracy": main_topic("table-accuracy", "cls/accuracy"),
        "figure-memory": main_topic("figure-memory"),
        "table-ece": main_topic("table-ece", "cal/ece"),
        "table-diversity": main_topic("table-diversity"),
        "table-uncertainty": main_topic("table-uncertainty"),
        "pruning": Topic((study("table-pruning", unrestricted),)),
        "initialization": Topic((study("table-initialization", unrestricted),)),
        "continual-ablation": Topic((study("table-continual-ablation", unrestricted),)),
        "continual-overhead": Topic((study("table-continual-overhead", unrestricted),)),
        "continual-memory": Topic((study("table-continual-memory", unrestricted),)),
    }
    for dataset in ("cifar10", "cifar100"):
        front = study("front", StudyOptions(datasets=(dataset,)))
        by_name[f"front-{dataset}"] = front_topic(f"front-{dataset}", front, FRONT_PAIRS)
        wanted = wide_resnet_study(dataset)
        by_name[wanted.name] = Topic((wanted,), WIDE_PAIRS[2:], FRONT_FIGURES)
    by_name |= {"defaults-cifar10": defaults_topic(unrestricted), "subsets-cifar10": subsets_topic(unrestricted)}
    by_name["front-wide-resnet20"] = front_topic("front-wide-resnet20", wide_front_study(), WIDE_PAIRS)
    by_name["tuned-wide-resnet20"] = Topic((tuned_study(),), TUNED_PAIRS, FRONT_FIGURES)
    for dataset, model in SETUPS:
        options = StudyOptions(datasets=(dataset,), models=(model,), methods=(*RIVALS, "random", "narrow"))
        accuracy_and_ece = tuple(study(name, options) for name in ("table-accuracy", "table-ece"))
        figures = ("cls/accuracy", "cal/ece")
        by_name[f"{dataset}-{model}"] = Topic(accuracy_and_ece, pairs_within(accuracy_and_ece[0]), figures)
    for dataset in ("mnist", "cifar10", "cifar100"):
        wanted = study("table-continual", StudyOptions(datasets=(dataset,)))
        others = [("structured", row) for row in wanted.rows if row != "structured"]
        by_name[f"split-{dataset}"] = Topic((wanted,), others, ("cl/accuracy",))
    pruning = study("figure-continual-pruning", unrestricted)
    text = "Accuracy against the share of pruned neurons."
    drawn = {"continual-pruning": (lambda records: draw_pruning(records, pruning), text)}
    by_name["continual-pruning"] = Topic((pruning,), pictures=drawn)
    return by_name


def pairs_within(wanted: Study) -> list[tuple[str, str]]:
    """List the comparisons of methods for which a study has both rows."""
    return [pair for pair in METHOD_PAIRS if set(pair) <= set(wanted.rows)]


def front_topic(name: str, wanted: Study, pairs: Sequence[tuple[str, str]]) -> Topic:
    """Return the topic of quality against memory: table, charts before and after temperature, differences."""
    text = "Accuracy, NLL and ECE (15 bins) against memory, one point for each whole ensemble, mean of probabilities"
    pictures = {
        name: (lambda records: draw_front_of_study(records, wanted), f"{text}."),
        f"{name}-temperature": (
            lambda records: draw_front_of_study(records, wanted, True),
            f"{text}; after temperature.",
        ),
    }
    return Topic((wanted,), pairs, FRONT_FIGURES, pictures)


def defaults_topic(options: StudyOptions) -> Topic:
    """Return the topic of the study of defaults: figures of both splits, differences, a sentence for every arm."""
    chosen = defaults(options)
    studies = (chosen, defaults_on_test(options))
    return Topic(studies, remarks=lambda records: write_choice_of_defaults(records, chosen))


def subsets_topic(options: StudyOptions) -> Topic:
    """Return the topic of the study of subsets: their figures, and the analysis of variance."""
    wanted = subsets(options)
    return Topic((wanted,), remarks=lambda records: write_subset_analysis(records, wanted))


def render_topic(topic: Topic, records: Records, drawn: Collection[str] = ()) -> str:
    """Write a topic as Markdown: its tables, their provenance, differences, charts; or that nothing was run.

    drawn: the names of the charts that exist.
    """
    planned = records.list_planned(topic.experiments)
    if planned and not any(map(records.is_done, planned)):
        return f"Not run yet ({format_remaining(planned)})."
    counted = bool(topic.studies[0].counted)
    blocks = [write_titled_table(filled, counted=counted) for filled in fill_tables(topic.studies, records)]
    for wanted in topic.studies:
        blocks += [" ".join(write_corruption_notes(wanted, records.done))]
    if runs := records.runs(topic.experiments):
        blocks.append(format_provenance(runs))
    if topic.pairs:
        blocks.append(difference_table(records, topic.studies[0], topic.pairs, topic.figures))
    if topic.remarks:
        blocks.append(topic.remarks(records))
    for name, (_, caption) in (topic.pictures or {}).items():
        if name in drawn:
            blocks.append(f"![{caption}](images/{name}.svg)\n\n*{caption}*")
    return "\n\n".join(block for block in blocks if block)


def fill_tables(studies: Sequence[Study], records: Records) -> list[TableData]:
    """Fill the tables of studies of the same rows: side by side if each has one column, else one for each rule."""
    filled = [
        (wanted, rule, fill_study_table(wanted, records.done, rule)) for wanted in studies for rule in wanted.rules
    ]
    if any(len(wanted.columns) > 1 for wanted in studies):
        return [
            replace(data, titles=_by_metric(data), title=wanted.title if len(studies) > 1 else data.title)
            for wanted, _, data in filled
        ]
    shown = {}
    for wanted, rule, data in filled:
        words = [] if len(studies) == 1 < len(wanted.rules) else [metric_of(data.metrics[data.columns[0]]).title]
        words += [SHORT_RULES[rule]] if len(wanted.rules) > 1 else []
        shown[", ".join(words)] = data
    if len(shown) == 1:
        return list(shown.values())
    return [join_side_by_side(shown)]


def _by_metric(data: TableData) -> dict[str, str]:
    """Return the metrics' titles as column titles, if they are distinct."""
    titles = {column: metric_of(data.metrics[column]).title for column in data.columns}
    return titles if len(set(titles.values())) == len(titles) else {}


def join_side_by_side(tables: Mapping[str, TableData]) -> TableData:
    """Join tables of one column each, by the title of the column; the rows are those of any table."""
    rows = tuple(dict.fromkeys(row for data in tables.values() for row in data.rows))
    metrics: dict[str, str] = {}
    ours: dict[Key, Sequence[float]] = {}
    paper: dict[Key, Cell] = {}
    blank: set[Key] = set()
    for title, data in tables.items():
        (column,) = data.columns
        metrics[title] = data.metrics[column]
        ours |= {(row, title): values for (row, _), values in data.ours.items()}
        paper |= {(row, title): cell for (row, _), cell in data.paper.items()}
        blank |= {(row, title) for row in rows if row not in data.rows or (row, column) in data.blank}
    return TableData("", rows, tuple(tables), metrics, ours, paper, blank)


def write_titled_table(data: TableData, counted: bool = False) -> str:
    """Write a table as Markdown below its title, with the seeds of every row and `not run` where there are none."""
    text = write_table_data(data, NOT_RUN, seeds=not counted)
    return f"**{data.title}**\n\n{text}" if data.title else text
