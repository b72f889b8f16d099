"""open_folder(): the folder of a method's run, whose files a later call of the same run goes on from.

The folder says of what run it is, in `identity.json`; every checkpoint in it carries that identity, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from structured_ensembles.common.checks import check_path
from structured_ensembles.common.processes import decide_in_first_process, rank
from structured_ensembles.data import Data
from structured_ensembles.resuming.identity import (
    ExecutionSettings,
    Identity,
    Settings,
    check_same,
    compute_identity,
    rename_old_entries,
)
from structured_ensembles.storage.files import read_text, write_text
from structured_ensembles.storage.run_files import damaged_file_error, read_json, text_checksum, write_json

FILE = "identity.json"
CHECKPOINTS = "checkpoint*.safetensors"  # deleted when a run is finished
REMEDY = "delete the folder, or choose another"


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
