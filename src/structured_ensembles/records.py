"""Checks of the files of a run folder: each must hold what its readers rely on, or it is damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.history import COLUMNS
from structured_ensembles.selection import Subnet

MOST_MEMBERS, MOST_CHANNELS = 100_000, 2**20  # beyond, a file is forged: no time or memory is spent on it
MEMORY = ("backbone", "factors", "masks", "heads", "stored_masks")


def check_config(config: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the settings of a run have the types that they are written with."""
    for name in ("dataset", "model", "method"):
        _require(isinstance(config[name], str), name, "a name", config[name])
    for name in ("seed", "limit", "tasks", "members"):
        _require(name not in config or _is_whole(config[name]), name, "a whole number", config.get(name))
    for name in ("model_arguments", "method_arguments", "changes"):
        own = config.get(name, {})
        _require(isinstance(own, dict) and all(isinstance(key, str) for key in own), name, "settings by name", own)


def check_result(result: Mapping[str, Any]) -> None:
    """Raise a ValueError unless `result.json` has figures, and the rest of it the right types."""
    if "figures" not in result:
        raise ValueError("it has no figures")
    check_figures(result["figures"])
    check_figures(result.get("figures_in_float32", {}))
    for name in ("seconds", "file_bytes"):
        _require(_is_number(result.get(name)), name, "a number", result.get(name))
    for name in ("device", "precision", "date"):
        own = result.get(name, "")
        _require(own is None or isinstance(own, str), name, "text", own)
    _require(isinstance(result.get("versions", {}), dict), "versions", "names by package", result.get("versions"))


def check_figures(figures: Any) -> dict[str, float]:
    """Return figures by name, or raise a ValueError."""
    _require(isinstance(figures, dict), "figures", "numbers by name", figures)
    for name, value in figures.items():
        _require(_is_number(value), name, "a number", value)
    members = figures.get("size/members", 1)
    _require(1 <= members <= MOST_MEMBERS, "size/members", f"from 1 to {MOST_MEMBERS}", members)
    return {str(name): value for name, value in figures.items()}


def check_continual(result: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the result of continual learning has its accuracies, memory and capacity."""
    rows = _mapping(result, "matrix").get("rows")
    _require(_is_triangle(rows), "matrix", "rows of 1, 2, … shares", rows)
    _require({"accuracy", "final_accuracy"} <= result["figures"].keys(), "figures", "accuracies", result["figures"])
    for name in ("unaided", "inferred"):
        own = result["matrix"].get(name)
        _require(own is None or _is_share(own), name, "a share", own)
    memory = _mapping(result, "memory")
    for name in MEMORY:
        _require(_is_whole(memory.get(name)) and memory[name] >= 0, name, "a whole number", memory.get(name))
    if result.get("capacity") is not None:
        _check_capacity(_mapping(result, "capacity"))


def _check_capacity(capacity: Mapping[str, Any]) -> None:
    sizes, taken = _mapping(capacity, "sizes"), _mapping(capacity, "taken")
    for name, size in sizes.items():
        own: Any = taken.get(name)
        counts = isinstance(own, list) and all(_is_whole(number) and number >= 0 for number in own)
        fits = _is_whole(size) and size >= 1 and counts and sum(own) <= size
        _require(fits, f"capacity of {name}", "neurons per task, at most all of the layer", own)
    lengths = {len(taken[name]) for name in sizes}
    _require(len(lengths) == 1 and sizes.keys() == taken.keys(), "capacity", "as many tasks in every layer", taken)
    tasks = capacity.get("tasks", list(range(min(lengths))))
    known = isinstance(tasks, list) and len(tasks) in lengths and all(own is None or _is_whole(own) for own in tasks)
    _require(known, "tasks of the capacity", "one per column", tasks)
    _mapping(capacity, "free")


def check_subnets(subnets: Sequence[Subnet]) -> None:
    """Raise a ValueError unless all members choose from the same channels."""
    groups = [[(name, size) for name, size, _ in own.groups] for own in subnets]
    if not groups or not groups[0] or any(own != groups[0] for own in groups):
        raise ValueError("its members must all have the same groups of channels")
    for name, size, kept in (group for own in subnets for group in own.groups):
        _require(1 <= size <= MOST_CHANNELS, name, f"of 1 to {MOST_CHANNELS} channels", size)
        _require(all(0 <= channel < size for channel in kept), name, f"channels below {size}", kept)


def check_history(rows: Sequence[Mapping[str, float | None]]) -> None:
    """Raise a ValueError unless every row of `history.csv` has all columns, and numbers for epoch and member."""
    for row in rows:
        _require(set(row) == set(COLUMNS), "a row", f"one of {', '.join(COLUMNS)}", ", ".join(map(str, row)))
        for name in ("epoch", "member"):
            value = row[name]
            _require(value is not None and float(value).is_integer(), name, "a whole number", value)


def check_samples(samples: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless what is known of single samples fits together."""
    missing = [name for name in ("confidence", "correct", "entropy", "disagreement") if name not in samples]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    number, members = len(samples["confidence"].flatten()), len(samples["disagreement"].flatten(1))
    for name, own in samples.items():
        expected = (members, members) if name == "disagreement" else (number,)
        if own.shape != expected or not bool(own.isfinite().all()):
            raise ValueError(f"{name} must be finite numbers of the shape {expected}, not {tuple(own.shape)}")
    if samples["correct"].dtype != torch.bool or number == 0:
        raise ValueError("correct must be yes or no for every sample")


def _mapping(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    own = record.get(name)
    _require(isinstance(own, dict), name, "values by name", own)
    return own  # type: ignore[return-value]


def _is_number(value: Any) -> bool:
    """Tell numbers, NaN and infinity among them, from all else, and from whole numbers that no float can hold."""
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000)


def _is_triangle(rows: Any) -> bool:
    if not isinstance(rows, list) or not rows:
        return False
    sizes = [isinstance(row, list) and len(row) == number for number, row in enumerate(rows, start=1)]
    return all(sizes) and all(_is_share(own) for row in rows for own in row)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64


def _require(there: bool, name: str, expected: str, given: Any) -> None:
    if not there:
        shown = repr(given)
        raise ValueError(f"{name!r} must be {expected}, not {shown[:60]}{'…' if len(shown) > 60 else ''}")
