"""Containers: one safetensors file with tensors, the JSON that says what they are, and a checksum over both.

No pickle, no code. The JSON may name the function that makes a network (of the zoo, or `package.module:function`, which
is imported only if the caller trusts it).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from structured_ensembles.networks.provenance import origin_of
from structured_ensembles.storage.files import check_regular, write_tensors
from structured_ensembles.storage.tensor_file import checksum
from structured_ensembles.zoo.by_name import build_model

# What code meets that was handed fields of a wrong type or size; RecursionError is a RuntimeError.
MISREAD = (
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
)
LONGEST = 400  # characters of a reason: some quote what they were given


class ArtifactError(ValueError):
    """A file that cannot be read as what it should be; the message says why and what to do."""


@contextmanager
def refused(reason: str) -> Iterator[None]:
    """Turn whatever a forged field leads to into an ArtifactError that begins with `reason`."""
    try:
        yield
    except ArtifactError:
        raise
    except (SafetensorError, OSError, *MISREAD) as error:
        text = next(iter(str(error).splitlines()), "") or type(error).__name__  # torch adds where in C++ it was
        raise ArtifactError(f"{reason}: {text[:LONGEST]}{'…' * (len(text) > LONGEST)}") from error


def write_container(
    path: str | Path, form: str, version: int, structure: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> int:
    """Write a file of the format called `form`; returns its size in bytes."""
    try:
        text = json.dumps(structure)
    except TypeError as error:
        raise ValueError(f"the model's arguments cannot be written as JSON ({error})") from error
    # One entry only: safetensors writes several in no particular order, and equal contents should be equal files.
    envelope = {"version": version, "sha256": checksum(text, tensors), "structure": text}
    write_tensors(Path(path), tensors, {form: json.dumps(envelope)})
    return Path(path).stat().st_size


def read_container(path: Path, form: str, version: int, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The structure and the tensors of a file, checked. kind: what it should be, in words, such as "an ensemble"."""
    try:
        check_regular(path)
    except FileNotFoundError:
        raise ArtifactError(f"there is no file {path}") from None
    except OSError as error:
        raise ArtifactError(str(error)) from error
    with refused(f"{path} is damaged, or not {kind} at all"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if form not in metadata:
                raise ArtifactError(f"{path} is not {kind}: it was written by something else")
            envelope = checked(json.loads(metadata[form]), dict, "its envelope")
            found = checked(envelope["version"], int, "its version")
            if found > version:
                raise ArtifactError(
                    f"{path} was written by a newer version (format {found}, this is {version}): "
                    "update structured-ensembles"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = checked(envelope["structure"], str, "its structure")
        if envelope["sha256"] != checksum(text, tensors):
            raise ArtifactError(f"{path} is damaged: its contents do not match its checksum")
        structure = checked(json.loads(text), dict, "its structure")
    return structure, tensors


def checked(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    """Return a field of a file; raise a ValueError unless it is of this kind. True and False are no numbers."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{name} is {value!r:.60}")
    return value


def checked_list(value: Any, kind: type | tuple[type, ...], name: str) -> list[Any]:
    """Return a field that is a list with items of this kind."""
    return [checked(item, kind, f"an item of {name}") for item in checked(value, list, name)]


def checked_leaves(value: Any, kind: type | tuple[type, ...], name: str) -> Any:
    """Return nested lists and dicts with tuples in place of lists; every leaf is None or of this kind."""
    if isinstance(value, dict):
        return {key: checked_leaves(own, kind, name) for key, own in value.items()}
    if isinstance(value, list):
        return tuple(checked_leaves(own, kind, name) for own in value)
    return None if value is None else checked(value, kind, name)


def named_network(network: nn.Module) -> dict[str, Any] | None:
    """How a network was made, as JSON has it; None if it is not known."""
    origin = origin_of(network)
    return None if origin is None else {"name": origin.name, "arguments": dict(origin.arguments)}


def build_named(
    path: Path, named: Mapping[str, Any] | None, trust_code: bool, argument: str = "model", *, tensors: int
) -> nn.Module:
    """Build the network that `named_network` told of; the zoo's do so on the meta device too, without memory.

    argument: where else a caller could pass a network.
    tensors: how many the file holds, which bounds how many layers it may ask for.
    """
    if named is None:
        raise ArtifactError(f"{path} does not say how its base network is made: pass one as {argument}=")
    with refused(f"{path} does not say how its base network is made"):
        name, arguments = checked(named, dict, "model")["name"], named["arguments"]
        foreign = ":" in checked(name, str, "its name")
        checked(arguments, dict, "arguments")
        if not foreign and _items(arguments) > tensors + 10:  # every layer that a list asks for has tensors
            raise ValueError("its arguments ask for more layers than the file has tensors for")
        if not foreign and _largest(arguments) >= 2**31:
            raise ValueError("its arguments ask for layers of more than 2,147,483,647 channels")
    if foreign and not trust_code:
        raise ArtifactError(
            f"{path} wants to call {name} for its base network: pass a network as {argument}=, "
            "or trust_code=True (--trust-code on the command line) to let it"
        )
    with refused(f"{path} names a base network that cannot be built"):
        return build_model(name, **arguments)


def _largest(value: Any) -> float:
    """Return the largest number within nested lists and dicts, by its size; 0 if there is none."""
    if isinstance(value, dict | list):
        return max(map(_largest, value.values() if isinstance(value, dict) else value), default=0)
    return abs(value) if isinstance(value, int | float) else 0


def _items(value: Any) -> int:
    """Count the items of nested lists and dicts."""
    if isinstance(value, dict):
        return len(value) + sum(map(_items, value.values()))
    return len(value) + sum(map(_items, value)) if isinstance(value, list) else 0
