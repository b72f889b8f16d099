"""Results of continual runs, checked and rebuilt from `result.json`."""

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
from structured_ensembles.storage.run_files import damaged_file_error

MEMORY = ("backbone", "factors", "masks", "heads", "stored_masks")
FIGURES = ("accuracy", "final_accuracy")


def is_continual(folder: Path) -> bool:
    """Tell whether a run folder is one of `sens continual`."""
    return "tasks" in read_config(folder)


def read_continual_run(folder: Path) -> Finished:
    """Read a run folder of `sens continual` or `sens reproduce`; its figures begin with `cl/`."""
    config, result = read_config(folder), read_continual_result(folder)
    return Finished(folder, config, result, {f"cl/{name}": value for name, value in result["figures"].items()})


def read_continual_result(folder: Path) -> dict[str, Any]:
    """Read and check the `result.json` of a run of `sens continual`."""
    result = read_result(folder)
    check_continual_result(folder, result)
    return result


def check_continual_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Raise a ValueError if an entry of a continual run's result is missing or wrong."""
    try:
        for name in FIGURES:
            if name not in result["figures"]:
                raise ValueError(f"it has no figure {name}")
        rebuild_matrix(result)
        rebuild_memory(result)
        rebuild_capacity(result)
        check_whole("file_bytes", result["file_bytes"], 0)
    except KeyError as error:
        raise damaged_file_error(folder / "result.json", ValueError(f"it has no {error}"), RESULT_REMEDY) from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise damaged_file_error(folder / "result.json", error, RESULT_REMEDY) from error


def rebuild_matrix(result: Mapping[str, Any]) -> AccuracyMatrix:
    """Rebuild the accuracy matrix."""
    matrix = AccuracyMatrix.from_dict(result["matrix"])
    for value in [value for row in matrix.rows for value in row]:
        check_number("each accuracy", value)
    for name, share in (("unaided", matrix.unaided), ("inferred", matrix.inferred)):
        if share is not None:
            check_number(name, share)
    return matrix


def rebuild_memory(result: Mapping[str, Any]) -> Memory:
    """Rebuild the memory of the learner."""
    counts = {name: result["memory"][name] for name in MEMORY}
    for name, value in counts.items():
        check_whole(name, value, 0)
    return Memory(**counts)


def rebuild_capacity(result: Mapping[str, Any]) -> Capacity | None:
    """Rebuild the number of neurons that each task owns; None for learners whose tasks own none."""
    stored = result["capacity"]
    if stored is None:
        return None
    taken = {name: tuple(counts) for name, counts in stored["taken"].items()}
    tasks = tuple(stored.get("tasks", range(len(next(iter(taken.values()), ())))))
    sizes = dict(stored["sizes"])
    if sizes.keys() != taken.keys() or any(len(counts) != len(tasks) for counts in taken.values()):
        raise ValueError("its capacity is not of the same groups and tasks throughout")
    for value in [*sizes.values(), *(value for counts in taken.values() for value in counts)]:
        check_whole("each number of neurons", value, 0)
    return Capacity(tasks, sizes, taken)
