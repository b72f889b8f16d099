"""Byte ranges of files, unpacked in a folder or inside an uncompressed archive."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class ByteRange:
    """The position of a file's content: in a file of its own, or inside an archive."""

    path: Path
    start: int
    size: int

    def read(self, largest: int) -> bytes:
        """Read the bytes; raise a ValueError if there are more than `largest`."""
        if self.size > largest:
            raise ValueError(f"{self.path} holds a file of {self.size} bytes, but at most {largest} are expected")
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)

    def array(self) -> np.ndarray:
        """Map the array of a .npy file into memory; pickled objects are refused."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            head = io.BytesIO(file.read(min(self.size, 4096)))
        version = np.lib.format.read_magic(head)
        reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if reader is None:
            raise ValueError(f"the .npy format {version} is unknown; it must be 1.0 or 2.0")
        shape, fortran, dtype = reader(head)
        if dtype.hasobject or head.tell() + dtype.itemsize * int(np.prod(shape)) > self.size:
            raise ValueError("the array is incomplete, or not of numbers")
        return np.memmap(self.path, dtype, "r", self.start + head.tell(), shape, "F" if fortran else "C")


def files_in_folder(folder: Path) -> dict[str, ByteRange]:
    """List the files of a folder, by their paths below it, with slashes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): ByteRange(path, 0, path.stat().st_size) for path in files}


def files_in_tar(path: Path, folder: str) -> dict[str, ByteRange]:
    """List the files below `folder` in an uncompressed tar archive, by their paths below it."""
    prefix = f"{folder}/"
    with tarfile.open(path, "r:") as archive:
        members = [member for member in archive if member.isreg() and member.name.removeprefix("./").startswith(prefix)]
    return {
        member.name.removeprefix("./").removeprefix(prefix): ByteRange(path, member.offset_data, member.size)
        for member in members
    }
