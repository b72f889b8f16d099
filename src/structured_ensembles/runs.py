"""Run folders: config.yaml, result.json, history.csv, ensemble.safetensors; resumed or refused, never overwritten."""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import structured_ensembles
from structured_ensembles.artifact import Storage
from structured_ensembles.copying import device_of
from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation import evaluate
from structured_ensembles.files import write_text
from structured_ensembles.safe_yaml import read_yaml

SAMPLES = "samples.safetensors"  # what figures of single samples need, see `measure_experiment`
KEYS = ("dataset", "model", "method", "seed")  # of every configuration


def open_run(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Make a run folder, or go on with one of the same configuration; returns its result if it is done already."""
    settled = json.loads(json.dumps(config, default=str))
    path = folder / "config.yaml"
    if folder.exists() and any(folder.iterdir()):
        if not path.exists():
            raise ValueError(f"{folder} is not empty, and not a run folder: choose another one with --out")
        earlier = read_config(folder)
        if earlier != settled:
            differing = sorted(key for key in {*earlier, *settled} if earlier.get(key) != settled.get(key))
            raise ValueError(
                f"{folder} holds a run with another {', '.join(differing)}: choose another with --out, or delete it"
            )
        return read_result(folder) if (folder / "result.json").exists() else None
    write_text(path, yaml.safe_dump(settled, sort_keys=False, allow_unicode=True))
    return None


def drop_run_without_progress(folder: Path) -> None:
    """Take away a run folder in which nothing has been done, so that a corrected command may have it."""
    if [path.name for path in folder.iterdir()] == ["config.yaml"]:
        (folder / "config.yaml").unlink()
        with suppress(OSError):  # such as the one that the command runs in
            folder.rmdir()


def read_result(folder: Path) -> dict[str, Any]:
    """The `result.json` of a run that is done."""
    path = folder / "result.json"
    if not path.exists():
        raise ValueError(f"{folder} is not done yet: it has no result.json; the command that began it goes on with it")
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        if "figures" not in found:
            raise ValueError("it has no figures")
        return found
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}; delete it and give the command again") from error


def read_samples(folder: Path) -> dict[str, Tensor]:
    """What is known of single samples: nothing if it was not measured, or cannot be read."""
    path = folder / SAMPLES
    if not path.exists():
        return {}
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        warnings.warn(f"{path} is damaged ({error}): what it tells is left out, or measured again", stacklevel=2)
        return {}


def close_run(
    folder: Path, ensemble: Ensemble, data: Data, seconds: float, storage: Storage, precision: str
) -> dict[str, Any]:
    """Write the results of a run and drop its checkpoints; `result.json` comes last and says that it is done.

    precision: what training computed in, see `Recipe.precision_on`.
    The figures are those of the file: if it stores less than float32, what that cost is told beside them.
    """
    history = ensemble.history
    path = folder / "ensemble.safetensors"
    size = ensemble.save(path, storage)
    figures = {"float32": evaluate(ensemble, data)}
    if storage != "float32":
        stored = Ensemble.load(path, model=ensemble.members[0])
        figures[storage] = evaluate(stored.to(device_of(ensemble)), data)
    if history is not None:
        write_text(folder / "history.csv", history.to_csv())
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
        **machine(),
    }
    write_text(folder / "result.json", json.dumps(result, indent=1) + "\n")
    for checkpoint in folder.glob("checkpoint*.safetensors"):
        checkpoint.unlink()
    return result


def machine() -> dict[str, Any]:
    """What a figure depends on besides the configuration."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {
        "device": device,
        "versions": {
            "structured-ensembles": structured_ensembles.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    if not path.exists():
        raise ValueError(f"{folder} is not a run folder: it has no config.yaml")
    config = read_yaml(path)
    missing = [key for key in KEYS if not isinstance(config, dict) or key not in config]
    if missing:
        raise ValueError(f"{path} is damaged: it says nothing of {', '.join(missing)}")
    return config  # type: ignore[no-any-return]
