"""Atomic writing and safe reading of regular files.

A file is written under a random name in the target's folder, `<name>.<host>-<random>.part`, which is newly created
(`O_EXCL`, without following links) and locked while it is written; then it is flushed to the disk and renamed. A
symbolic link at the target is replaced by the file; what it points to is never written to. Devices, pipes, sockets and
folders are refused for writing and for reading.
"""

from __future__ import annotations

import os
import platform
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from structured_ensembles.storage.tensor_file import NO_FOLLOW, open_without_links, save_file

try:
    import fcntl
except ImportError:  # Windows, where the leftovers of killed processes stay
    fcntl = None  # type: ignore[assignment]

# A temporary file without a lock was left by a killed process, whatever container that ran in. Some network file
# systems keep locks on one machine only: files of other hosts must also be this old to count as left over.
LEFTOVER_SECONDS = 60
MAX_TEXT_BYTES = 2**26  # of a JSON or YAML file that is read; the largest that we write are histories


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary file in the same folder, flush it to the disk and rename it.

    Other processes see the complete file or none.
    """
    _check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path)
    temporary, descriptor = _create_temporary(path)
    try:
        mode = os.fstat(descriptor).st_mode
        write(temporary)
        if not stat.S_ISREG(os.lstat(temporary).st_mode):
            raise OSError(f"{temporary} was replaced by another process while it was written")
        temporary.chmod(mode)  # `write` may have replaced the file by one that only this user may read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # or a power cut might leave the new name without the data
        os.replace(temporary, path)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file."""

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", opener=open_without_links) as file:
            file.write(text)

    write_atomically(path, write)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))


def check_regular(path: Path) -> None:
    """Raise an OSError unless `path` is a regular file or a link to one: a pipe would block, a device never end."""
    file_type = _file_type(os.stat(path).st_mode)
    if file_type == "folder":
        raise IsADirectoryError(f"{path} is a folder, not a file")
    if file_type is not None:
        raise OSError(f"{path} is a {file_type}, not a regular file")


def read_text(path: Path, largest: int = MAX_TEXT_BYTES) -> str:
    """Read a regular file of at most `largest` bytes as UTF-8; raise an OSError or ValueError for anything else."""
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, but at most {largest:,} are read")
    return content.decode("utf-8")


def _check_target(path: Path) -> None:
    """Raise a ValueError unless `path` is free, a regular file or a link; a link to a device counts as the device."""
    for read_status in (os.lstat, os.stat):
        try:
            file_type = _file_type(read_status(path).st_mode)
        except OSError:  # nothing there, or a link to nothing
            return
        if file_type not in (None, "link"):
            raise ValueError(f"{path} is a {file_type}, not a regular file: choose another name")
    if path.is_symlink() and os.readlink(path).startswith("/proc/"):  # such as /dev/stdout
        raise ValueError(f"{path} is a link to an open file of a process, not a regular file: choose another name")


def _file_type(mode: int) -> str | None:
    """Name the type of file that a mode says; None for a regular file."""
    for matches, name in (
        (stat.S_ISREG, None),
        (stat.S_ISDIR, "folder"),
        (stat.S_ISLNK, "link"),
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISSOCK, "socket"),
    ):
        if matches(mode):
            return name
    return "device"


def _create_temporary(path: Path) -> tuple[Path, int]:
    """Create and lock a new file of this process in the folder of `path`; return its name and its descriptor."""
    while True:
        temporary = path.with_name(f"{path.name}.{platform.node()}-{secrets.token_hex(8)}.part")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o666)
        if fcntl is None:
            return temporary, descriptor
        with suppress(OSError):  # a file system without locks, where leftovers are not cleared either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # another process removed it as a leftover before it was locked


def _clear_leftovers(path: Path) -> None:
    """Remove the temporary files of `path` that killed processes have left: they are not locked."""
    if fcntl is None:
        return
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(".part")]
    for name in names:
        host, _, random = name.removeprefix(f"{path.name}.").removesuffix(".part").rpartition("-")
        if name != f"{path.name}.{host}-{random}.part" or not set(random) <= set("0123456789abcdef"):
            continue
        # Earlier versions wrote a process number instead of random digits, and did not lock.
        locked = host == platform.node() and len(random) == 16
        with suppress(OSError):  # it is gone by now, or in use, or a link, or another user's
            _remove_if_unlocked(path.with_name(name), 0 if locked else LEFTOVER_SECONDS)


def _remove_if_unlocked(temporary: Path, min_age: float) -> None:
    """Remove a file if no process has locked it and it is at least `min_age` seconds old."""
    assert fcntl is not None
    descriptor = os.open(temporary, os.O_RDWR | os.O_NONBLOCK | NO_FOLLOW)
    try:
        status = os.fstat(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime >= min_age:
            temporary.unlink()
    finally:
        os.close(descriptor)
