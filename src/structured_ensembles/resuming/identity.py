"""One identity for a whole run: what influences its result, so that no folder is taken for another run's.

Of data that are streamed, the loader's data set counts with all that it keeps, but not the files that it opens.

It is a flat dict of JSON values by the name of the part: "seed", "recipe.epochs", "weights", "training data", ….
A method writes it into its folder before any work, and every file of the run carries it. A later call goes on with the
folder only if all parts are the same; otherwise the error names those that differ. What only decides how the result is
reached is no part of it: the device, `quiet`, `on_epoch`, and of the execution all but the precision. Nor is the test
split, nor `temperature`, which is applied to the trained ensemble.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from structured_ensembles.common.processes import decided_by_first, rank
from structured_ensembles.data import Data
from structured_ensembles.data.splits import fingerprint_split
from structured_ensembles.storage.files import read_text, write_text
from structured_ensembles.storage.fingerprints import UnidentifiedError, described, digest_of, module_parts
from structured_ensembles.storage.run_files import damaged, read_json, text_checksum, write_json

FILE = "identity.json"
CHECKPOINTS = "checkpoint*.safetensors"  # that a finished run drops
REMEDY = "delete the folder, or choose another"
RENAMED = {"recipe.precision": "execution.precision"}  # parts that identities of earlier versions name otherwise
HINTS = {
    "weights": "a network with other weights is another run: call torch.manual_seed before it is made",
    "architecture": "the network has other layers, or layers with other settings or other code",
    "loss": "loss_name= tells losses apart by a name that you give",
}

Identity = Mapping[str, Any]


class Settings(Protocol):
    """Settings that decide a result, such as a `Recipe`; `to_dict` returns them by name, as JSON has them."""

    def to_dict(self) -> dict[str, Any]: ...


class ExecutionSettings(Protocol):
    """How a result is computed, such as an `Execution`; `identity` returns the part that changes the result."""

    def identity(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RunFile:
    """A file of a run, and the identity that it must carry."""

    path: Path
    identity: Identity


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run and its identity; or none, and then it keeps nothing.

    files: SHA-256 of the text files that the run has finished.
    """

    path: Path | None
    identity: Identity
    files: Mapping[str, str]

    def file(self, name: str) -> RunFile | None:
        """Return where the run keeps a checkpoint; None without a folder."""
        return None if self.path is None else RunFile(self.path / name, {**self.identity, "file": name})

    def read(self, name: str) -> str | None:
        """Return the contents of a text file that the run has finished before; None if it has not."""
        if self.path is None or name not in self.files:
            return None
        path = self.path / name
        try:
            text = read_text(path)
            if text_checksum(text) != self.files[name]:
                raise ValueError(f"its contents do not match its checksum in {FILE}")
        except (OSError, ValueError) as error:
            raise damaged(path, error, REMEDY) from error
        return text

    def write(self, name: str, text: str) -> RunFolder:
        """Keep a text file. Its checksum comes after it: if the run is killed in between, it is written again."""
        written = replace(self, files={**self.files, name: text_checksum(text)})
        if self.path is not None and rank() == 0:
            write_text(self.path / name, text)
            _write(self.path, self.identity, written.files)
        return written


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
    """Claim a folder for a run, or go on with the same run there; a ValueError names what differs from another's.

    An identity that nothing was kept for yet, as of a call that failed at once, is replaced.
    Of several processes the first one looks and writes.
    """
    if folder is None:
        return RunFolder(None, {}, {})
    path, what = Path(folder), {"method": method, **arguments}
    return decided_by_first(
        lambda: _claimed(path, identity_of(model, data, recipe, execution, loss, loss_name, "folder=", **what))
    )


def _claimed(folder: Path, identity: Identity) -> RunFolder:
    path = folder / FILE
    kept = any(folder.glob(CHECKPOINTS))
    if not path.exists():
        if kept:
            raise ValueError(
                f"folder {folder} has a checkpoint, but no {FILE} that says of what run (it may be of an older "
                "version): delete it, or choose another folder"
            )
        _write(folder, identity, {})
        return RunFolder(folder, identity, {})
    known = read_json(path, REMEDY)
    parts, files = known.get("parts"), known.get("files")
    if not isinstance(parts, dict) or not isinstance(files, dict):
        raise damaged(path, ValueError("it does not say of what run it is"), REMEDY)
    parts = with_new_names(parts)
    if parts != identity:
        if kept or files:
            check_same(parts, identity, f"folder {folder}")
        _write(folder, identity, {})
    return RunFolder(folder, identity, files)


def _write(folder: Path, identity: Identity, files: Mapping[str, str]) -> None:
    write_json(folder / FILE, {"parts": identity, "files": files})


def check_same(known: Any, identity: Identity, where: str) -> None:
    """Raise a ValueError that names what differs, if a file or folder is of another run."""
    if not isinstance(known, Mapping):
        raise ValueError(f"{where} is of another run, of an older version: delete it, or choose another")
    known = with_new_names(known)
    if known == identity:
        return
    names = [name for name in {**identity, **known} if known.get(name) != identity.get(name)]
    hints = [f" ({HINTS[name]})" for name in names if name in HINTS]
    told = ", ".join(_difference(name, known.get(name), identity.get(name)) for name in names)
    raise ValueError(
        f"{where} is of another run, which differs in {told}: give the same again to go on with it, choose another, or "
        f"delete it{''.join(hints)}"
    )


def with_new_names(parts: Identity) -> dict[str, Any]:
    """Return an identity of any version with the names that its parts have today."""
    return {RENAMED.get(name, name): value for name, value in parts.items()}


def _difference(name: str, known: Any, given: Any) -> str:
    """Name a part that differs, with both values if they say anything."""
    short = all(isinstance(own, int | float | str | None) and len(str(own)) < 32 for own in (known, given))
    return f"{name} (there {known!r}, here {given!r})" if short else name


# Parts --------------------------------------------------------------------------------------------------------------


def identity_of(
    model: nn.Module,
    data: Data,
    recipe: Settings,
    execution: ExecutionSettings,
    loss: Any,
    loss_name: str | None,
    argument: str,
    **arguments: Any,
) -> Identity:
    """Return the identity of a run. argument: what it is needed for, see `identified_loss`."""
    settings = {f"recipe.{name}": value for name, value in recipe.to_dict().items()}
    settings |= {f"execution.{name}": value for name, value in execution.identity().items()}
    loss_part = identified_loss(loss, loss_name, argument)
    return {**_json({**arguments, **settings}), "loss": loss_part, **module_parts(model), **data_parts(data)}


def data_parts(data: Data) -> dict[str, Any]:
    """Digest what a run learns from: samples of the training and validation splits, and how networks get them."""
    normalization = None if data.normalization is None else data.normalization.to_json()
    return {
        "training data": fingerprint_split(data.train),
        "validation data": None if data.validation is None else fingerprint_split(data.validation),
        "task": data.task,
        "classes": digest_of(data.classes),
        "normalization": digest_of([normalization, data.normalization_settled]),
        "ids": data.ids,
    }


def identified_loss(loss: Any, name: str | None, argument: str) -> Any:
    """Return what tells a loss from others: the name that the caller gives it, or the loss itself, digested.

    argument: what needs it, for the ValueError if the loss cannot be told from others.
    """
    if name is not None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"loss_name must be a name for the loss, such as 'focal-2', not {name!r}")
        if loss is None:
            raise ValueError(f"loss_name is {name!r}, but there is no loss= that it could name")
        return f"named {name}"
    if loss is None:
        return None
    try:
        return digest_of(described(loss))
    except UnidentifiedError as error:
        raise ValueError(
            f"{argument} needs a loss that can be told from others, so that nobody gets the result of another one, but "
            f"loss= has {error}: give it a name with loss_name=, or make it a function of a module"
        ) from error


def _json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Bring arguments to what JSON gives back; numbers of numpy and torch become Python's."""
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    return dict(json.loads(json.dumps(plain)))
