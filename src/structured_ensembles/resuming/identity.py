"""Identity of a run: all that influences its result, so that a run never resumes from the files of another.

It is a flat dict of JSON values by name: "seed", "recipe.epochs", "weights", "training data", …. A method writes it
into its folder before any work, and every file of the run carries it. A later call resumes from the folder only if all
entries are equal; otherwise the error names those that differ.

It leaves out how the result is computed: the device, `quiet`, `on_epoch`, and the execution except for the precision.
It also leaves out the test split, and `temperature`, which is applied to the trained ensemble. Of streamed data, the
loader's data set counts with all its attributes, but not the files that it opens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from structured_ensembles.common.checks import check_path
from structured_ensembles.common.processes import decide_in_first_process, rank
from structured_ensembles.data import Data
from structured_ensembles.data.splits import fingerprint_split
from structured_ensembles.storage.files import read_text, write_text
from structured_ensembles.storage.fingerprints import UnidentifiedError, describe, digest_json, digest_module
from structured_ensembles.storage.run_files import damaged_file_error, read_json, text_checksum, write_json

FILE = "identity.json"
CHECKPOINTS = "checkpoint*.safetensors"  # deleted when a run is finished
REMEDY = "delete the folder, or choose another"
RENAMED = {"recipe.precision": "execution.precision"}  # entries that earlier versions named otherwise
# Settings that earlier versions did not have, and what they meant.
ADDED = {"recipe.mixup": 0.0, "recipe.averaging": 0.0}
HINTS = {
    "weights": "a network with other weights is another run: call torch.manual_seed before it is made",
    "architecture": "the network has other layers, or layers with other settings or other code",
    "loss": "loss_name= gives a loss the name by which it is compared",
}

Identity = Mapping[str, Any]


class Settings(Protocol):
    """Settings that influence the result, such as a `Recipe`; `to_dict` returns them by name, as JSON values."""

    def to_dict(self) -> dict[str, Any]: ...


class ExecutionSettings(Protocol):
    """Settings of how a result is computed, such as an `Execution`; `identity` returns those that influence it."""

    def identity(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RunFile:
    """Path of a file of a run, and the identity that the file must carry."""

    path: Path
    identity: Identity


@dataclass(frozen=True)
class RunFolder:
    """Folder and identity of a run; a run without a folder (path None) keeps no files.

    files: SHA-256 of the text files that the run has finished, by name.
    """

    path: Path | None
    identity: Identity
    files: Mapping[str, str]

    def file(self, name: str) -> RunFile | None:
        """Return the run's checkpoint of this name; None without a folder."""
        return None if self.path is None else RunFile(self.path / name, {**self.identity, "file": name})

    def read(self, name: str) -> str | None:
        """Return the contents of a text file that the run has finished; None if it has not."""
        if self.path is None or name not in self.files:
            return None
        path = self.path / name
        try:
            text = read_text(path)
            if text_checksum(text) != self.files[name]:
                raise ValueError(f"its contents do not match its checksum in {FILE}")
        except (OSError, ValueError) as error:
            raise damaged_file_error(path, error, REMEDY) from error
        return text

    def write(self, name: str, text: str) -> RunFolder:
        """Write a text file, then its checksum: if the run is killed in between, the file is written again."""
        updated = replace(self, files={**self.files, name: text_checksum(text)})
        if self.path is not None and rank() == 0:
            write_text(self.path / name, text)
            _write_identity(self.path, self.identity, updated.files)
        return updated


def open_folder(
    folder: str | Path | None,
    method: str,
    model: nn.Module,
    data: Data,
    *,
    recipe: Settings,
    execution: ExecutionSettings,
    loss: Any,
    loss_name: str | None,
    **arguments: Any,
) -> RunFolder:
    """Open the folder of a run, a new one or that of the same run; otherwise raise a ValueError with the differences.

    The identity of another run is replaced if that has written nothing else, such as after a call that failed at once.
    Of several processes, the first reads and writes.
    """
    if folder is None:
        return RunFolder(None, {}, {})
    path, settings = check_path("folder", folder), {"method": method, **arguments}
    return decide_in_first_process(
        lambda: _claim(path, compute_identity(model, data, recipe, execution, loss, loss_name, "folder=", **settings))
    )


def _claim(folder: Path, identity: Identity) -> RunFolder:
    """Write the identity into a folder, or compare it with the one that is there."""
    path = folder / FILE
    has_checkpoint = any(folder.glob(CHECKPOINTS))
    if not path.exists():
        if has_checkpoint:
            raise ValueError(
                f"folder {folder} has a checkpoint, but no {FILE} that says of what run (it may be of an older "
                "version): delete it, or choose another folder"
            )
        _write_identity(folder, identity, {})
        return RunFolder(folder, identity, {})
    content = read_json(path, REMEDY)
    known, files = content.get("parts"), content.get("files")
    if not isinstance(known, dict) or not isinstance(files, dict):
        raise damaged_file_error(path, ValueError("it does not say of what run it is"), REMEDY)
    known = rename_old_entries(known)
    if known != identity:
        if has_checkpoint or files:
            check_same(known, identity, f"folder {folder}")
        _write_identity(folder, identity, {})
    return RunFolder(folder, identity, files)


def _write_identity(folder: Path, identity: Identity, files: Mapping[str, str]) -> None:
    """Write the identity of a run and the checksums of its finished text files."""
    write_json(folder / FILE, {"parts": identity, "files": files})


def check_same(known: Any, identity: Identity, where: str) -> None:
    """Raise a ValueError that names the differences if a file or folder is of another run. where: which one it is."""
    if not isinstance(known, Mapping):
        raise ValueError(f"{where} is of another run, of an older version: delete it, or choose another")
    known = rename_old_entries(known)
    if known == identity:
        return
    names = [name for name in {**identity, **known} if known.get(name) != identity.get(name)]
    hints = [f" ({HINTS[name]})" for name in names if name in HINTS]
    differences = ", ".join(_difference(name, known.get(name), identity.get(name)) for name in names)
    raise ValueError(
        f"{where} is of another run, which differs in {differences}: give the same again to resume it, choose another, "
        f"or delete it{''.join(hints)}"
    )


def rename_old_entries(identity: Identity) -> dict[str, Any]:
    """Return an identity of any version with the current entries and their names."""
    added = ADDED if "recipe.epochs" in identity else {}
    return {**added, **{RENAMED.get(name, name): value for name, value in identity.items()}}


def _difference(name: str, known: Any, current: Any) -> str:
    """Name an entry that differs, with both values if they are short."""
    short = all(isinstance(value, int | float | str | None) and len(str(value)) < 32 for value in (known, current))
    return f"{name} (there {known!r}, here {current!r})" if short else name


# Entries ------------------------------------------------------------------------------------------------------------


def compute_identity(
    model: nn.Module,
    data: Data,
    recipe: Settings,
    execution: ExecutionSettings,
    loss: Any,
    loss_name: str | None,
    argument: str,
    **arguments: Any,
) -> Identity:
    """Compute the identity of a run. argument: the argument that needs it, see `identify_loss`."""
    settings = {f"recipe.{name}": value for name, value in recipe.to_dict().items()}
    settings |= {f"execution.{name}": value for name, value in execution.identity().items()}
    loss_identity = identify_loss(loss, loss_name, argument)
    return {
        **to_plain_json({**arguments, **settings}),
        "loss": loss_identity,
        **digest_module(model),
        **digest_data(data),
    }


def digest_data(data: Data) -> dict[str, Any]:
    """Compute digests of the training and validation splits, and of how networks get their samples."""
    normalization = None if data.normalization is None else data.normalization.to_json()
    return {
        "training data": fingerprint_split(data.train),
        "validation data": None if data.validation is None else fingerprint_split(data.validation),
        "task": data.task,
        "classes": digest_json(data.classes),
        "normalization": digest_json([normalization, data.normalization_settled]),
        "ids": data.ids,
    }


def identify_loss(loss: Any, name: str | None, argument: str, remedy: str = "give it a name with loss_name=") -> Any:
    """Return what identifies a loss: the name that the caller gives it, or a digest of the loss.

    argument, remedy: the argument that needs it and what a caller can do, for the error message if it cannot be
    identified.
    """
    if name is not None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"loss_name must be a name for the loss, such as 'focal-2', not {name!r}")
        if loss is None:
            raise ValueError(f"loss_name is {name!r}, but there is no loss= for it to name")
        return f"named {name}"
    if loss is None:
        return None
    try:
        return digest_json(describe(loss))
    except UnidentifiedError as error:
        raise ValueError(
            f"{argument} needs a loss that can be told from others, so that a run never resumes with another loss, but "
            f"loss= has {error}: {remedy}, or make it a function of a module"
        ) from error


def to_plain_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments to what JSON reads back; numbers of NumPy and torch become Python's."""
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    return dict(json.loads(json.dumps(plain)))
