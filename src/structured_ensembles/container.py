"""Containers: one safetensors file with tensors, the JSON that says what they are, and a checksum over both.

No pickle, no code. The JSON may name the function that makes a network (of the zoo, or `package.module:function`, which
is imported only if the caller trusts it).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from structured_ensembles.files import write_tensors
from structured_ensembles.models import build_model
from structured_ensembles.origin import origin_of


class ArtifactError(ValueError):
    """A file that cannot be read as what it should be; the message says why and what to do."""


def write_container(
    path: str | Path, form: str, version: int, structure: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> int:
    """Write a file of the format called `form`; returns its size in bytes."""
    try:
        text = json.dumps(structure)
    except TypeError as error:
        raise ValueError(f"the model's arguments cannot be written as JSON ({error})") from error
    # One entry only: safetensors writes several in no particular order, and equal contents should be equal files.
    envelope = {"version": version, "sha256": _checksum(text, tensors), "structure": text}
    write_tensors(Path(path), tensors, {form: json.dumps(envelope)})
    return Path(path).stat().st_size


def read_container(path: Path, form: str, version: int, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The structure and the tensors of a file, checked. kind: what it should be, in words, such as "an ensemble"."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if form not in metadata:
                raise ArtifactError(f"{path} is not {kind}: it was written by something else")
            envelope = json.loads(metadata[form])
            if int(envelope["version"]) > version:
                raise ArtifactError(
                    f"{path} was written by a newer version (format {envelope['version']}, this is {version}): "
                    "update structured-ensembles"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = envelope["structure"]
        damaged = envelope["sha256"] != _checksum(text, tensors)
        structure = json.loads(text)
    except FileNotFoundError:
        raise ArtifactError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise ArtifactError(f"{path} is a folder, not a file") from None
    except ArtifactError:
        raise
    except (SafetensorError, KeyError, ValueError, OSError, TypeError, UnicodeError) as error:
        raise ArtifactError(f"{path} is damaged, or not {kind} at all: {error}") from error
    if damaged:
        raise ArtifactError(f"{path} is damaged: its contents do not match its checksum")
    return structure, tensors


def named_network(network: nn.Module) -> dict[str, Any] | None:
    """How a network was made, as JSON has it; None if it is not known."""
    origin = origin_of(network)
    return None if origin is None else {"name": origin.name, "arguments": dict(origin.arguments)}


def build_named(path: Path, named: Mapping[str, Any] | None, trust_code: bool, argument: str = "model") -> nn.Module:
    """The network that `named_network` told of. argument: where else a caller could pass one."""
    if named is None:
        raise ArtifactError(f"{path} does not say how its base network is made: pass one as {argument}=")
    if ":" in named["name"] and not trust_code:
        raise ArtifactError(
            f"{path} wants to call {named['name']} for its base network: pass a network as {argument}=, "
            "or trust_code=True (--trust_code on the command line) to let it"
        )
    return build_model(named["name"], **named["arguments"])


def _checksum(structure: str, tensors: Mapping[str, Tensor]) -> str:
    """Over the JSON, and the name, type, shape and bytes of every tensor."""
    digest = hashlib.sha256(structure.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
