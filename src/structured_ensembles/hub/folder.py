"""save_folder(), find_file(): an ensemble as a folder with its file, config.json and a model card.

The safetensors file alone is the ensemble. config.json tells hubs and people what it is and is checked when it is
there, so that the folder of another library is refused with a sentence; nothing in it is imported or opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from structured_ensembles.artifact import Contents, save
from structured_ensembles.common.checks import check_type, is_finite_number
from structured_ensembles.common.version import VERSION
from structured_ensembles.hub.card import LIBRARY, count_members, count_parameters, render_card
from structured_ensembles.storage.container import ArtifactError
from structured_ensembles.storage.files import read_text, write_text
from structured_ensembles.storage.weight_encoding import Storage

FILE, CONFIG, CARD = "ensemble.safetensors", "config.json", "README.md"
MAX_CONFIG_BYTES = 2**22


def save_folder(
    contents: Contents,
    folder: str | Path,
    dtype: Storage = "float32",
    figures: Mapping[str, float] | None = None,
    dataset: str | None = None,
    repo: str | None = None,
) -> Path:
    """Write an ensemble's file, config.json and README.md into a folder, new or existing; return the folder.

    dtype: how weights are stored, see `Ensemble.save`. figures: for the model card, as `evaluate` returns them;
    dataset: what they were measured on. repo: the repository that the card is for. A README.md that is no model card of
    ours, such as one written by hand, is refused rather than replaced.
    """
    folder = Path(folder)
    figures = _check_figures(figures)
    if dataset is not None:
        check_type("dataset", dataset, str, "the name of what the figures were measured on")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder must be a folder, but {folder} is a file: Ensemble.save writes a single file")
    _check_replaceable(folder / CARD)
    file_bytes = save(contents, folder / FILE, dtype)
    write_text(folder / CONFIG, json.dumps(_config(contents, dtype), indent=2) + "\n")
    write_text(folder / CARD, render_card(contents, FILE, file_bytes, figures, dataset, repo))
    return folder


def find_file(folder: Path) -> Path:
    """Return the ensemble's file in a folder; raise an ArtifactError if there is none, or the folder is another's."""
    config = folder / CONFIG
    if config.exists():
        check_config(config)
    path = folder / FILE
    if not path.exists():
        raise ArtifactError(
            f"{folder} has no {FILE}: Ensemble.save_pretrained writes such a folder, sens train another"
        )
    return path


def check_config(path: Path) -> None:
    """Raise an ArtifactError unless a config.json is one that `save_folder` wrote."""
    try:
        config = json.loads(read_text(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged: {error}") from error
    library = config.get("library") if isinstance(config, dict) else None
    if library != LIBRARY:
        other = config.get("model_type") or config.get("architecture") if isinstance(config, dict) else None
        contents = f"a model of another library ({other!r:.60})" if isinstance(other, str) else "something else"
        raise ArtifactError(f"{path} describes {contents}, not an ensemble of {LIBRARY}")


def _config(contents: Contents, dtype: Storage) -> dict[str, object]:
    """Return what config.json tells about an ensemble."""
    return {
        "library": LIBRARY,
        "version": VERSION,
        "file": FILE,
        "task": contents.task,
        "members": count_members(contents),
        "parameters": count_parameters(contents),
        "storage": dtype,
        "classes": list(contents.classes),
        "input_shape": contents.input_shape,
    }


def _check_figures(figures: Mapping[str, float] | None) -> dict[str, float]:
    """Return figures by name; raise a TypeError or ValueError unless they are numbers by name."""
    if figures is None:
        return {}
    check_type("figures", figures, Mapping, "as evaluate(ensemble, data) returns them")  # type: ignore[type-abstract]
    for name, value in figures.items():
        if not isinstance(name, str) or not is_finite_number(value):
            raise ValueError(f"figures must be finite numbers by name, not {value!r} for {name!r}")
    return {name: float(value) for name, value in figures.items()}


def _check_replaceable(path: Path) -> None:
    """Raise a ValueError for a README.md that is no model card of ours."""
    if path.exists() and f"library_name: {LIBRARY}\n" not in read_text(path):
        raise ValueError(f"{path} is no model card of an ensemble: move it away, or choose another folder")
