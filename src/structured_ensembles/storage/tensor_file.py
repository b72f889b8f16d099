"""Writing of safetensors files, tensor by tensor, and the checksum of tensors.

The format: eight bytes with the length of a JSON header, the header, the tensors' bytes. The library's `save_file`
writes to a temporary name of its own, a file that would stay if the process is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {  # in their order in the file, as the library has it: wide types first, so that all tensors are aligned
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8  # of the first tensor, in bytes
MAX_COPIED = 2**26  # bytes that are copied from a device at a time, for which it needs as much memory more
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # not on Windows


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors of any device to `path`; equal contents give equal files."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise ValueError(
                f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which a safetensors file cannot hold"
            )
    order = list(DTYPES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with open(path, "wb", opener=open_without_links) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(bytes_of(tensors[name]))


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors on the CPU, those of a device copied in a few pieces.

    A copy waits for the device, however small the tensor is, and a checkpoint of five ResNet20s has 1,700 of them.
    """
    elsewhere = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
    return {**tensors, **copy_in_pieces(elsewhere)}


def copy_in_pieces(tensors: Mapping[str, Tensor], max_bytes: int = MAX_COPIED) -> dict[str, Tensor]:
    """Copy tensors to the CPU in pieces of one type and device, of `max_bytes` unless a tensor is larger."""
    pieces: dict[object, list[list[str]]] = {}
    filled: dict[object, int] = {}
    for name, tensor in tensors.items():
        kind, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        if kind not in pieces or filled[kind] + size > max_bytes:
            pieces.setdefault(kind, []).append([])
            filled[kind] = 0
        pieces[kind][-1].append(name)
        filled[kind] += size
    copies: dict[str, Tensor] = {}
    for names in (piece for of_kind in pieces.values() for piece in of_kind):
        flat = [tensors[name].detach().reshape(-1) for name in names]
        together = torch.cat(flat) if len(flat) > 1 else flat[0]  # a large one alone needs no copy on its device
        slices = together.cpu().split([tensors[name].numel() for name in names])
        copies |= {name: values.view(tensors[name].shape) for name, values in zip(names, slices, strict=True)}
    return copies


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor's elements as an array; without a copy if it is contiguous and on the CPU."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 of a text and of the name, dtype, shape and bytes of every tensor."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def open_without_links(name: str, flags: int) -> int:
    """Open a file, as an `opener` of `open`; raise an OSError if the name is a symbolic link."""
    return os.open(name, flags | NO_FOLLOW, 0o666)
