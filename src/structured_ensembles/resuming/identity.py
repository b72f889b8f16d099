"""Identity of a run: all that influences its result, so that a run never resumes from the files of another.

It is a flat dict of JSON values by name: "seed", "recipe.epochs", "weights", "training data", …. `folder.py` writes it
into a method's folder before any work, and every checkpoint carries it. A later call resumes from these files only if
all entries are equal; otherwise the error names those that differ.

It leaves out how the result is computed: the device, `quiet`, `on_epoch`, and the execution except for the precision.
It also leaves out the test split, and `temperature`, which is applied to the trained ensemble. Of streamed data, the
loader's data set counts with all its attributes, but not the files that it opens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from structured_ensembles.data import Data
from structured_ensembles.data.splits import fingerprint_split
from structured_ensembles.storage.fingerprints import UnidentifiedError, describe, digest_json, digest_module

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
