"""Run folders: config.yaml, result.json, history.csv, ensemble.safetensors; resumed or refused, never overwritten."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from structured_ensembles.build import SUBNETS
from structured_ensembles.common.checks import check_number, check_type
from structured_ensembles.common.devices import device_of
from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation import evaluate
from structured_ensembles.resuming.folder import CHECKPOINTS
from structured_ensembles.resuming.folder import FILE as IDENTITY
from structured_ensembles.runs.machine import describe_machine
from structured_ensembles.runs.stopwatch import ELAPSED
from structured_ensembles.selection import Subnet
from structured_ensembles.storage.files import read_text, write_text
from structured_ensembles.storage.run_files import (
    check_figures,
    damaged_file_error,
    read_json,
    read_table,
    read_yaml,
    text_checksum,
    write_json,
    write_yaml,
)
from structured_ensembles.storage.run_lock import LOCK, run_lock
from structured_ensembles.storage.weight_encoding import Storage
from structured_ensembles.training.execution import split_config
from structured_ensembles.training.history import COLUMNS

CONFIG, HISTORY = "config.yaml", "history.csv"
KEYS = ("dataset", "model", "method", "seed", "model_arguments", "method_arguments")  # of every configuration
TYPES: dict[str, Any] = {
    **dict.fromkeys(("dataset", "model", "method", "recipe", "storage"), str),
    **dict.fromkeys(("seed", "members", "tasks"), int),
    **dict.fromkeys(("model_arguments", "method_arguments", "changes", "execution"), dict),
    "limit": int | None,
    "shuffle_labels": bool,
    "validation": bool,
}
MAX_NEURONS = 10_000_000  # of a network to draw; a file with more is taken for forged
CONFIG_REMEDY = "restore it, or choose another folder with --out"
RESULT_REMEDY = "delete it and give the command again"
HISTORY_REMEDY = "restore it, or delete it to go on without it"


Config = Mapping[str, Any]


@contextmanager
def open_run(
    folder: Path, config: Config, comparable: Callable[[Config], Config] = lambda config: config
) -> Iterator[dict[str, Any] | None]:
    """Lock a run folder, new or of the same configuration, while work in it goes on.

    Yields the result of a finished run, or None if there is something to do. An error before anything was done removes
    the folder, so that a corrected command can use it.

    comparable: maps a configuration to the one to compare, such as one without the defaults.
    """
    plain_config = json.loads(json.dumps(config, default=str))
    finished_result = _finished_result(folder, plain_config, comparable)
    if finished_result is not None:  # no lock: its folder may be read-only
        yield finished_result
        return
    with run_lock(folder):
        finished_result = _finished_result(folder, plain_config, comparable)  # another process may have been faster
        if finished_result is None:
            _begin_run(folder, plain_config)
        try:
            yield finished_result
        except Exception:
            if (files := _list_files(folder)) <= {CONFIG, IDENTITY, ELAPSED}:
                for name in sorted(files, reverse=True):  # the configuration last: it makes the folder a run folder
                    (folder / name).unlink()
            raise


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name the settings that differ between two configurations, those of a section by their own names."""
    names = []
    for name in sorted({*one, *other}):
        values = one.get(name), other.get(name)
        if values[0] != values[1]:
            sections = all(isinstance(value, Mapping | None) for value in values)
            names += _differing(values[0] or {}, values[1] or {}) if sections else [name]
    return names


def _finished_result(folder: Path, config: Config, comparable: Callable[[Config], Config]) -> dict[str, Any] | None:
    """Return the result of a finished run, None for a new or unfinished one; raise a ValueError for other folders."""
    files = _list_files(folder)
    if not files:
        return None
    if CONFIG not in files:
        raise ValueError(f"{folder} is not empty and not a run folder: choose another one with --out")
    earlier, wanted = comparable(read_config(folder)), comparable(config)
    if earlier != wanted:
        differing = _differing(earlier, wanted)
        raise ValueError(
            f"{folder} holds a run with another {', '.join(differing)}: choose another with --out, or delete it"
        )
    return read_result(folder) if "result.json" in files else None


def _begin_run(folder: Path, config: Config) -> None:
    """Clean up after killed processes and write the configuration of a new run."""
    for path in folder.iterdir():
        if _is_leftover(path.name):  # no process still writes it: the folder is locked
            path.unlink(missing_ok=True)
    if not (folder / CONFIG).exists():
        write_yaml(folder / CONFIG, config)


def _list_files(folder: Path) -> set[str]:
    """List the files of a run folder, without the lock and the leftovers of killed processes."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return set()
    except NotADirectoryError:
        raise ValueError(f"{folder} is a file, not a folder: choose another one with --out") from None
    return {name for name in names if name != LOCK and not _is_leftover(name)}


def _is_leftover(name: str) -> bool:
    """Tell whether a file is an unfinished `config.yaml`, see `write_atomically`."""
    return CONFIG in name and name.endswith(".part")


def read_result(folder: Path) -> dict[str, Any]:
    """Read and check the `result.json` of a finished run."""
    path = folder / "result.json"
    if not path.exists():
        raise ValueError(
            f"{folder} is not done yet: it has no result.json; give the command that began it again to resume it"
        )
    result = read_json(path, RESULT_REMEDY)
    try:
        for name in ("figures", "figures_in_float32"):
            if name == "figures" or name in result:
                result[name] = check_figures(result.get(name))
        check_number("seconds", result.get("seconds"))
        for name, expected in (("date", str), ("device", str), ("versions", dict)):
            check_type(name, result.get(name), expected)
    except (ValueError, TypeError, OverflowError) as error:
        raise damaged_file_error(path, error, RESULT_REMEDY) from error
    return result


def describe_finished_run(folder: Path, result: Mapping[str, Any]) -> str:
    """Return a sentence that a run was finished before this command, and when."""
    when = result["date"].replace("T", " at ")
    return f"{folder} is done already: it was finished on {when}; nothing was trained now"


def read_history(folder: Path, result: Mapping[str, Any]) -> list[dict[str, float | None]]:
    """Read the rows of `history.csv`, by column; empty if the method has no history. result: that of the run."""
    path = folder / HISTORY
    if not path.exists():
        return []
    _check_file(path, result)
    rows = read_table(path, COLUMNS, HISTORY_REMEDY)
    counts = [row[name] for row in rows for name in ("epoch", "member")]
    if not all(count is not None and count.is_integer() for count in counts):
        raise damaged_file_error(path, ValueError("its epochs and members are not whole numbers"), HISTORY_REMEDY)
    return rows


def read_subnets(folder: Path, result: Mapping[str, Any]) -> list[Subnet]:
    """Read the neurons that each member keeps; empty if the method selects none. result: that of the run."""
    path = folder / SUBNETS
    if not path.exists():
        return []
    _check_file(path, result)
    try:
        content = json.loads(read_text(path))
        rows = content["subnets"] if isinstance(content, dict) else content
        subnets = [Subnet.from_json(json.dumps(row)) for row in rows]
        _check_subnets(subnets)
        return subnets
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError) as error:
        raise damaged_file_error(path, error, HISTORY_REMEDY) from error


def _check_subnets(subnets: Sequence[Subnet]) -> None:
    """Raise a ValueError unless all subnets are of one network of a sensible size."""
    groups = {tuple((name, size) for name, size, _ in subnet.groups) for subnet in subnets}
    if len(groups) > 1:
        raise ValueError("its members are not of the same network")
    if any(sum(size for _, size in sizes) > MAX_NEURONS for sizes in groups):
        raise ValueError(f"it has more than {MAX_NEURONS:,} neurons")
    for name, size, kept in (group for subnet in subnets for group in subnet.groups):
        if not kept or not 0 <= min(kept) <= max(kept) < size:
            raise ValueError(f"the neurons it keeps of {name} are not among its {size} neurons")


def _check_file(path: Path, result: Mapping[str, Any]) -> None:
    """Raise a ValueError unless a file matches its checksum in the result; earlier versions wrote none."""
    checksums = result.get("checksums")
    expected = checksums.get(path.name) if isinstance(checksums, Mapping) else None
    try:
        if expected is not None and expected != _checksum(path):
            raise ValueError("its contents do not match its checksum in result.json")
    except (ValueError, OSError) as error:
        raise damaged_file_error(path, error, HISTORY_REMEDY) from error


def _checksum(path: Path) -> str:
    return text_checksum(read_text(path))


def close_run(
    folder: Path,
    ensemble: Ensemble,
    data: Data,
    seconds: float,
    storage: Storage,
    precision: str,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the results of a run and drop its checkpoints; `result.json` comes last and says that it is done.

    seconds: of all starts together, see `run_stopwatch`. precision: of training, see `Execution.precision_on`.
    settings: all that training used, the defaults too. They are for readers: runs are compared by `config.yaml`.
    The figures are those of the stored file; if it stores less than float32, the figures in float32 are kept too.
    """
    history = ensemble.history
    path = folder / "ensemble.safetensors"
    size = ensemble.save(path, storage)
    figures = {"float32": evaluate(ensemble, data)}
    if storage != "float32":
        stored = Ensemble.load(path, model=ensemble.members[0])
        figures[storage] = evaluate(stored.to(device_of(ensemble)), data)
    if history is not None:
        write_text(folder / HISTORY, history.to_csv())
    result = {
        "figures": figures[storage],
        "figures_in_float32": figures["float32"],
        "storage": storage,
        "file_bytes": size,
        "seconds": round(seconds, 3),
        "epochs": None if history is None else history.epochs,
        "stopped": {} if history is None else history.stopped,
        "precision": precision,
        "engine": None if history is None else history.engine,
        "fallbacks": [] if history is None else history.fallbacks,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "checksums": {name: _checksum(folder / name) for name in (HISTORY, SUBNETS) if (folder / name).exists()},
        **describe_machine(device_of(ensemble)),
        "resolved": settings,
    }
    write_json(folder / "result.json", result)
    for leftover in (*folder.glob(CHECKPOINTS), folder / ELAPSED):
        leftover.unlink(missing_ok=True)
    return result


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check the `config.yaml` of a run folder, of any version."""
    path = folder / CONFIG
    if not path.exists():
        runs = sorted(inner.parent.name for inner in folder.glob(f"*/{CONFIG}"))
        hint = f"; the folders in it are, such as {folder / runs[0]}" if runs else ""
        raise ValueError(f"{folder} is not a run folder: it has no config.yaml{hint}")
    config = read_yaml(path, CONFIG_REMEDY)
    missing = [key for key in KEYS if key not in config]
    if missing:
        raise damaged_file_error(path, ValueError(f"it says nothing of {', '.join(missing)}"), CONFIG_REMEDY)
    for name, value in config.items():
        expected = TYPES.get(name, object)
        wrong = not isinstance(value, expected) or (isinstance(value, bool) and TYPES.get(name) is not bool)
        if name in TYPES and wrong:
            raise damaged_file_error(path, ValueError(f"its {name} cannot be {value!r:.80}"), CONFIG_REMEDY)
    return split_config(config)
