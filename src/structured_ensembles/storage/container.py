"""Containers: one safetensors file with tensors, JSON that describes them, and a checksum over both.

No pickle, no code. The JSON may name the function that makes a network: of the zoo, or `package.module:function`, which
is imported only if the caller trusts it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from structured_ensembles.common.errors import first_line
from structured_ensembles.networks.provenance import origin_of
from structured_ensembles.storage.files import check_regular, write_tensors
from structured_ensembles.storage.tensor_file import checksum, to_host
from structured_ensembles.zoo.by_name import build_model

# What our files hold, by their format; for the error if one is given in place of another.
KINDS = {
    "structured-ensembles": "an ensemble, which se.Ensemble.load reads",
    "structured-ensembles-learner": "a continual learner, which the load of its class reads",
    "structured-ensembles-checkpoint": "a checkpoint of a training, which checkpoint= resumes",
    "structured-ensembles-search": "a checkpoint of a search",
    "structured-ensembles-samples": "predictions of a run",
}
# Errors that fields of a wrong type or size lead to; RecursionError is a RuntimeError.
FIELD_ERRORS = (
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
)
MAX_REASON = 400  # characters of an error message that is quoted: some contain a whole field


class ArtifactError(ValueError):
    """Raised for a file that is damaged, forged or of another kind; the message says why and what to do."""


@contextmanager
def raise_as_artifact_error(reason: str) -> Iterator[None]:
    """Raise errors that a damaged or forged field leads to as an ArtifactError that begins with `reason`."""
    try:
        yield
    except ArtifactError:
        raise
    except (SafetensorError, OSError, *FIELD_ERRORS) as error:
        text = first_line(error)  # torch appends a C++ stack trace
        raise ArtifactError(f"{reason}: {text[:MAX_REASON]}{'…' * (len(text) > MAX_REASON)}") from error


def write_container(
    path: str | Path, form: str, version: int, structure: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> int:
    """Write a file of the format called `form`; return its size in bytes."""
    try:
        text = json.dumps(structure, default=_to_plain)
    except TypeError as error:
        raise ValueError(f"the model's arguments cannot be written as JSON ({error})") from error
    tensors = to_host(tensors)
    # One metadata entry only: safetensors orders several at random, and equal contents should give equal files.
    envelope = {"version": version, "sha256": checksum(text, tensors), "structure": text}
    write_tensors(Path(path), tensors, {form: json.dumps(envelope)})
    return Path(path).stat().st_size


def _to_plain(value: Any) -> Any:
    """Convert NumPy's numbers and arrays for JSON, such as a number of classes that was computed from labels."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r:.60} is a {type(value).__name__}")


def read_container(path: Path, form: str, version: int, expected: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read and check the structure and the tensors of a file. expected: what it should be, such as "an ensemble"."""
    try:
        check_regular(path)
    except FileNotFoundError:
        raise ArtifactError(f"there is no file {path}") from None
    except OSError as error:
        raise ArtifactError(str(error)) from error
    with raise_as_artifact_error(f"{path} is damaged, or not {expected} at all"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if form not in metadata:
                kind = next((kind for other, kind in KINDS.items() if other in metadata), None)
                reason = "it was written by something else" if kind is None else f"it holds {kind}"
                raise ArtifactError(f"{path} is not {expected}: {reason}")
            envelope = check_field(json.loads(metadata[form]), dict, "its envelope")
            file_version = check_field(envelope["version"], int, "its version")
            if file_version > version:
                raise ArtifactError(
                    f"{path} was written by a newer version (format {file_version}, this is {version}): "
                    "update structured-ensembles"
                )
            # Copies: the file's own memory starts anywhere, and a matrix product may then add up in another order.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        text = check_field(envelope["structure"], str, "its structure")
        if envelope["sha256"] != checksum(text, tensors):
            raise ArtifactError(f"{path} is damaged: its contents do not match its checksum")
        structure = check_field(json.loads(text), dict, "its structure")
    return structure, tensors


def check_field(value: Any, expected: type | tuple[type, ...], name: str) -> Any:
    """Return a field of a file; raise a ValueError unless it has an expected type. A bool is no int here."""
    types = expected if isinstance(expected, tuple) else (expected,)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"{name} is {value!r:.60}")
    return value


def check_list_field(value: Any, expected: type | tuple[type, ...], name: str) -> list[Any]:
    """Return a field that is a list; raise a ValueError unless it is one and its items have an expected type."""
    return [check_field(item, expected, f"an item of {name}") for item in check_field(value, list, name)]


def check_leaves(value: Any, expected: type | tuple[type, ...], name: str) -> Any:
    """Return nested lists and dicts, lists as tuples; raise a ValueError unless leaves are None or of expected type."""
    if isinstance(value, dict):
        return {key: check_leaves(item, expected, name) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(check_leaves(item, expected, name) for item in value)
    return None if value is None else check_field(value, expected, name)


def origin_to_json(network: nn.Module) -> dict[str, Any] | None:
    """Return how a network was made, as JSON; None if unknown."""
    origin = origin_of(network)
    return None if origin is None else {"name": origin.name, "arguments": dict(origin.arguments)}


def build_from_json(
    path: Path, description: Mapping[str, Any] | None, trust_code: bool, argument: str = "model", *, tensors: int
) -> nn.Module:
    """Build the network that `origin_to_json` described; one of the zoo on the meta device too, without memory.

    argument: the argument by which a caller can pass a network instead, for the error message.
    tensors: number of tensors in the file, which limits how many layers it may ask for.
    """
    if description is None:
        raise ArtifactError(f"{path} does not say how its base network is made: pass one as {argument}=")
    with raise_as_artifact_error(f"{path} does not say how its base network is made"):
        name, arguments = check_field(description, dict, "model")["name"], description["arguments"]
        foreign = ":" in check_field(name, str, "its name")
        check_field(arguments, dict, "arguments")
        if not foreign and _count_items(arguments) > tensors + 10:  # every layer that a list asks for has tensors
            raise ValueError("its arguments ask for more layers than the file has tensors for")
        if not foreign and _largest_number(arguments) >= 2**31:
            raise ValueError("its arguments ask for layers of more than 2,147,483,647 channels")
    if foreign and not trust_code:
        raise ArtifactError(
            f"{path} would call {name} to make its base network, which is not trusted: pass a network as {argument}=, "
            "or trust_code=True (--trust-code on the command line) to allow it"
        )
    with raise_as_artifact_error(f"{path} names a base network that cannot be built"):
        return build_model(name, **arguments)


def _largest_number(value: Any) -> float:
    """Return the largest absolute number in nested lists and dicts; 0 if there is none."""
    if isinstance(value, dict | list):
        return max(map(_largest_number, value.values() if isinstance(value, dict) else value), default=0)
    return abs(value) if isinstance(value, int | float) else 0


def _count_items(value: Any) -> int:
    """Count the items of nested lists and dicts."""
    if isinstance(value, dict):
        return len(value) + sum(map(_count_items, value.values()))
    return len(value) + sum(map(_count_items, value)) if isinstance(value, list) else 0
