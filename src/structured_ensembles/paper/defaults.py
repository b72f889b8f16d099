"""Study of defaults: what makes four members in the memory of one network as good as a deep ensemble of four?

A star around four random members: every row changes one setting. Changes of the recipe, which concern all methods, are
made for one network and a deep ensemble too. No best epoch is chosen (`keep="last"`), so that the validation split
stays clean: rows are chosen by its figures, and test figures are shown of few rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from structured_ensembles.paper.front import COLUMNS
from structured_ensembles.paper.random_subsets import METHOD
from structured_ensembles.paper.studies import Study, StudyOptions, list_setups
from structured_ensembles.runs.evaluations import RULES
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.measurement import Request

SETUPS = ("cifar10/resnet18",)
ON_VALIDATION = Request(validation=True)
FIGURES = ("cls/accuracy", "cal/nll", "cal/ece15")
EPOCHS, SMOKE_EPOCHS = 60, 3
CENTRE, SINGLE, DEEP = "random ×4", "single", "deep ×4"
METHODS = (CENTRE, SINGLE, DEEP)  # trained by every recipe
COMBINATION, TAUGHT = "combination", "taught"
TEACHERS = 4  # full networks of the deep ensemble that teaches
# Declared before any run of the study. Whoever finds by validation figures that other changes win, changes this line.
COMBINED = ("twice the epochs", "averaging", "cutout")


@dataclass(frozen=True)
class Row:
    """Row of the study: a method, its arguments, and changes of the recipe."""

    method: str
    members: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


def recipe_changes(epochs: int) -> dict[str, dict[str, Any]]:
    """Return the changes of the recipe by name; epochs: those of the centre."""
    single_changes: dict[str, dict[str, Any]] = {
        "twice the epochs": {"epochs": 2 * epochs},
        "averaging": {"averaging": 0.25},
        "label smoothing": {"label_smoothing": 0.1},
        "cutout": {"augmentation": "crop+flip+cutout"},
        "mixup": {"mixup": 0.2},
    }
    combined = {name: value for change in COMBINED for name, value in single_changes[change].items()}
    return {**single_changes, COMBINATION: combined}


def defaults_rows(epochs: int = EPOCHS) -> dict[str, Row]:
    """Return all rows by label, those of the star first, then the other methods by changed recipes."""
    memory: dict[str, Any] = {"memory": 1.0, "coupled": True}
    teachers: dict[str, Any] = {**memory, "teachers": TEACHERS}
    combined = recipe_changes(epochs)[COMBINATION]
    brief = max(1, epochs // 6)  # of the base out of which members are cut
    tuned = {**memory, "selection": "random", "tune_epochs": epochs - brief}
    plain = {SINGLE: Row("single", 1), DEEP: Row("deep", 4), CENTRE: Row("random", 4, memory)}
    changed = {
        f"{name}, {change}": replace(plain[name], changes=changes)
        for name in METHODS
        for change, changes in recipe_changes(epochs).items()
    }
    star = {
        "random ×2": Row("random", 2, memory),
        "random ×8": Row("random", 8, memory),
        f"{CENTRE}, shared batches": Row(METHOD, 4, {**memory, "shared_batches": True}),
        f"{CENTRE}, not coupled": Row("random", 4, {"memory": 1.0}),
        f"{CENTRE}, out of a base of {brief} epochs": Row("prune-and-tune", 4, tuned),
        f"{CENTRE}, {TAUGHT}": Row("taught", 4, teachers),
        f"{SINGLE}, {TAUGHT}": Row("taught", 1, teachers),
        f"{CENTRE}, {COMBINATION}, {TAUGHT}": Row("taught", 4, teachers, combined),
    }
    return {**plain, **star, **changed}


def row_before(label: str) -> str | None:
    """Return the row that a row is compared with; None for the plain ones.

    Of a taught row it is the same without a teacher, of others the same method by the plain recipe.
    """
    if label in METHODS:
        return None
    if label.endswith(f", {TAUGHT}"):
        return label.removesuffix(f", {TAUGHT}")
    return next((name for name in (SINGLE, DEEP) if label.startswith(f"{name}, ")), CENTRE)


def shows_test_figures(label: str) -> bool:
    """Tell whether the test figures of a row are shown: the plain methods, the combination, and what is taught."""
    return label in METHODS or label.endswith((f", {COMBINATION}", f", {TAUGHT}"))


def defaults(options: StudyOptions) -> Study:
    """Return the study on the validation split, trained by the recipe `modern` without a choice of epochs."""
    return _study(options, _list_rows(options), FIGURES, "On the validation split, by which rows are chosen")


def defaults_on_test(options: StudyOptions) -> Study:
    """Return the test figures of the plain methods, and of these by the combined recipe and taught."""
    shown = {label: row for label, row in _list_rows(options).items() if shows_test_figures(label)}
    return replace(_study(options, shown, COLUMNS, "On the test split"), split="test")


def _count_epochs(options: StudyOptions) -> int:
    """Return the epochs of the centre."""
    return options.epochs or (SMOKE_EPOCHS if options.smoke else EPOCHS)


def _list_rows(options: StudyOptions) -> dict[str, Row]:
    """List the rows that the options leave; a trial leaves out other methods by changed recipes."""
    rows = defaults_rows(_count_epochs(options))
    if options.smoke:
        rows = {row: point for row, point in rows.items() if row_before(row) in (None, CENTRE)}
    if options.methods is not None:
        rows = {row: point for row, point in rows.items() if point.method in options.methods}
    return rows


def _study(options: StudyOptions, rows: Mapping[str, Row], columns: tuple[str, ...], title: str) -> Study:
    """Return a study of these rows on every data set, with figures of the validation split."""
    setups = list_setups(options, SETUPS)
    sources: dict[tuple[str, str], Any] = {}
    for dataset, model in setups:
        for row, point in rows.items():
            label = f"{row}, {dataset}/{model}" if len(setups) > 1 else row
            runs = _runs(options, dataset, model, point)
            sources |= {(label, column): (runs, column) for column in columns}
    labels = tuple(dict.fromkeys(row for row, _ in sources))
    metrics = dict(zip(columns, columns, strict=True))
    return Study(
        "defaults", title, labels, columns, metrics, sources, {}, ON_VALIDATION, rules=RULES[:1], split="validation"
    )


def _runs(options: StudyOptions, dataset: str, model: str, row: Row) -> tuple[Experiment, ...]:
    """Return one experiment per seed."""
    epochs = _count_epochs(options)
    changes = {**({} if epochs == EPOCHS else {"epochs": epochs}), **row.changes, "keep": "last"}
    if options.smoke:
        changes["rate"] = 0.02  # the recipe's is too high for so small a network
    recipe = options.recipe or "modern"
    return tuple(
        Experiment(
            dataset, model, row.method, seed, row.members, {}, row.arguments, recipe, changes, limit=options.limit
        )
        for seed in options.seeds
    )
