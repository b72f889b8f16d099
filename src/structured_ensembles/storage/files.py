"""Files that are never half written, and never anything but files.

A file is written under a random name beside its own, `<name>.<host>-<random>.part`, which is created anew (`O_EXCL`,
without following links) and locked while it is written; then it is flushed to the disk and renamed. A symbolic link at
the target is replaced by the file; what it points to is never written to. Devices, pipes, sockets and folders are
refused, by writing and by reading.
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
except ImportError:  # not on Windows: there, what killed processes left stays
    fcntl = None  # type: ignore[assignment]

# A file whose lock is free was left by a killed process, in whatever container that ran. Some network file systems keep
# locks on one machine only: files of other hosts are told by their age too.
LEFTOVER_SECONDS = 60
LARGEST_TEXT = 2**26  # bytes of a JSON or YAML file that is read; the largest that we write are histories


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """`write` to another name in the same folder, flush to the disk, rename: whoever looks sees all of it or none."""
    _check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path)
    part, descriptor = _new_part(path)
    try:
        mode = os.fstat(descriptor).st_mode
        write(part)
        if not stat.S_ISREG(os.lstat(part).st_mode):
            raise OSError(f"{part} was replaced by another process while it was written")
        part.chmod(mode)  # also where `write` made a file of its own, which nobody else may read
        with part.open("rb+") as file:
            os.fsync(file.fileno())  # or the new name might outlive a power cut that the data does not
        os.replace(part, path)
    finally:
        os.close(descriptor)
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    def write(part: Path) -> None:
        with open(part, "w", encoding="utf-8", opener=open_without_links) as file:
            file.write(text)

    write_atomically(path, write)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one safetensors file."""
    write_atomically(path, lambda part: save_file(tensors, part, metadata))


def check_regular(path: Path) -> None:
    """Raise an OSError unless `path` is a regular file or a link to one: a pipe would block, a device never end."""
    kind = _kind(os.stat(path).st_mode)
    if kind == "folder":
        raise IsADirectoryError(f"{path} is a folder, not a file")
    if kind is not None:
        raise OSError(f"{path} is a {kind}, not a regular file")


def read_text(path: Path, largest: int = LARGEST_TEXT) -> str:
    """Read a regular file of at most `largest` bytes as UTF-8; raise an OSError or ValueError that says what it is."""
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, but at most {largest:,} are read")
    return content.decode("utf-8")


def _check_target(path: Path) -> None:
    """Refuse to replace anything but a regular file or a link; a link to a device stands for the device."""
    for look in (os.lstat, os.stat):
        try:
            kind = _kind(look(path).st_mode)
        except OSError:  # nothing there, or a link to nothing
            return
        if kind not in (None, "link"):
            raise ValueError(f"{path} is a {kind}, not a regular file: choose another name")
    if path.is_symlink() and os.readlink(path).startswith("/proc/"):  # such as /dev/stdout, whatever that is just now
        raise ValueError(f"{path} is a link to what a process has open, not a regular file: choose another name")


def _kind(mode: int) -> str | None:
    """Name what a mode is of; None for a regular file."""
    for is_kind, name in (
        (stat.S_ISREG, None),
        (stat.S_ISDIR, "folder"),
        (stat.S_ISLNK, "link"),
        (stat.S_ISFIFO, "pipe"),
        (stat.S_ISSOCK, "socket"),
    ):
        if is_kind(mode):
            return name
    return "device"


def _new_part(path: Path) -> tuple[Path, int]:
    """Create a file that nobody else has, beside `path`, and lock it; returns its name and its descriptor."""
    while True:
        part = path.with_name(f"{path.name}.{platform.node()}-{secrets.token_hex(8)}.part")
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o666)
        if fcntl is None:
            return part, descriptor
        with suppress(OSError):  # a file system without locks, where nobody clears leftovers either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return part, descriptor
        os.close(descriptor)  # somebody took it for a leftover before it was locked


def _clear_leftovers(path: Path) -> None:
    """Remove the files that killed processes have left beside `path`: nobody holds their lock."""
    if fcntl is None:
        return
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(".part")]
    for name in names:
        host, _, random = name.removeprefix(f"{path.name}.").removesuffix(".part").rpartition("-")
        if name != f"{path.name}.{host}-{random}.part" or not set(random) <= set("0123456789abcdef"):
            continue
        locked = host == platform.node() and len(random) == 16  # earlier versions had a process number, and no lock
        with suppress(OSError):  # it is gone meanwhile, or in use, or a link, or somebody else's
            _remove_if_left(path.with_name(name), 0 if locked else LEFTOVER_SECONDS)


def _remove_if_left(part: Path, seconds: float) -> None:
    """Remove a file if nobody has locked it and it is older than this."""
    assert fcntl is not None
    descriptor = os.open(part, os.O_RDWR | os.O_NONBLOCK | NO_FOLLOW)
    try:
        status = os.fstat(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime >= seconds:
            part.unlink()
    finally:
        os.close(descriptor)
