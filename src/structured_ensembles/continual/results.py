"""Results of continual runs, as `result.json` has them: checked, and turned back into what they were."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from structured_ensembles.common.checks import check_number, check_whole
from structured_ensembles.continual.matrix import AccuracyMatrix
from structured_ensembles.continual.memory import Memory
from structured_ensembles.continual.owning import Capacity
from structured_ensembles.runs.finished import Finished
from structured_ensembles.runs.folder import RESULT_REMEDY, read_config, read_result
from structured_ensembles.storage.run_files import damaged

MEMORY = ("backbone", "factors", "masks", "heads", "stored_masks")
FIGURES = ("accuracy", "final_accuracy")


def is_continual(folder: Path) -> bool:
    """Tell whether a run folder is one of `sens continual`."""
    return "tasks" in read_config(folder)


def read_continual_run(folder: Path) -> Finished:
    """Read a folder that `sens continual` or `sens reproduce` has filled; its figures begin with `cl/`."""
    config, result = read_config(folder), read_continual_result(folder)
    return Finished(folder, config, result, {f"cl/{name}": value for name, value in result["figures"].items()})


def read_continual_result(folder: Path) -> dict[str, Any]:
    """The `result.json` of a run of `sens continual`."""
    result = read_result(folder)
    check_continual_result(folder, result)
    return result


def check_continual_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Raise a ValueError if a result lacks what those of continual runs have, or has something else in its place."""
    try:
        for name in FIGURES:
            if name not in result["figures"]:
                raise ValueError(f"it has no figure {name}")
        matrix_of(result)
        memory_of(result)
        capacity_of(result)
        check_whole("file_bytes", result["file_bytes"], 0)
    except KeyError as error:
        raise damaged(folder / "result.json", ValueError(f"it has no {error}"), RESULT_REMEDY) from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise damaged(folder / "result.json", error, RESULT_REMEDY) from error


def matrix_of(result: Mapping[str, Any]) -> AccuracyMatrix:
    """Rebuild the accuracies on every task after every task."""
    matrix = AccuracyMatrix.from_dict(result["matrix"])
    for value in [value for row in matrix.rows for value in row]:
        check_number("each accuracy", value)
    for name, share in (("unaided", matrix.unaided), ("inferred", matrix.inferred)):
        if share is not None:
            check_number(name, share)
    return matrix


def memory_of(result: Mapping[str, Any]) -> Memory:
    """Rebuild the memory that the learner takes."""
    found = {name: result["memory"][name] for name in MEMORY}
    for name, value in found.items():
        check_whole(name, value, 0)
    return Memory(**found)


def capacity_of(result: Mapping[str, Any]) -> Capacity | None:
    """Rebuild the neurons that each task owns; None for learners whose tasks own none."""
    kept = result["capacity"]
    if kept is None:
        return None
    taken = {name: tuple(own) for name, own in kept["taken"].items()}
    tasks = tuple(kept.get("tasks", range(len(next(iter(taken.values()), ())))))
    sizes = dict(kept["sizes"])
    if sizes.keys() != taken.keys() or any(len(own) != len(tasks) for own in taken.values()):
        raise ValueError("its capacity is not of the same groups and tasks throughout")
    for value in [*sizes.values(), *(value for own in taken.values() for value in own)]:
        check_whole("each number of neurons", value, 0)
    return Capacity(tasks, sizes, taken)
