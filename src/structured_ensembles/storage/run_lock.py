"""run_lock(): one process at a time works in a run folder.

The lock is one of the operating system (`flock`) on the file `run.lock`, so that it ends with the process that holds
it, however that ends: a `run.lock` that a killed process has left behind locks nothing. Where there is no such lock
(Windows, some network file systems) a warning says that two processes in one folder would not notice each other.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from structured_ensembles.storage.tensor_file import NO_FOLLOW

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which is made if need be; a ValueError if another process holds it."""
    path = folder / LOCK
    descriptor = _locked(path)
    try:
        yield
    finally:
        with suppress(OSError):  # Windows keeps files that are open
            if _is_at(path, descriptor):  # not if somebody has deleted the folder meanwhile, and begun anew
                path.unlink()
        os.close(descriptor)  # which ends the lock
        with suppress(OSError):  # a folder in which nothing is left goes too
            folder.rmdir()


def _locked(path: Path) -> int:
    """Open the lock file, locked; returns its descriptor."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o644)
        except FileNotFoundError:  # its last holder has removed the folder between the two
            continue
        except FileExistsError:  # or while mkdir looked whether it is one
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(path.parent).st_mode):
                    raise
            continue
        try:
            _lock(path, descriptor)
            if _is_at(path, descriptor):
                owner = {"process": os.getpid(), "host": platform.node(), "since": _now()}
                os.ftruncate(descriptor, 0)
                os.write(descriptor, json.dumps(owner).encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder has removed the file between the two: this locks nothing


def _lock(path: Path, descriptor: int) -> None:
    if fcntl is None:
        _warn_of_no_locks(path)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in TAKEN:
            _warn_of_no_locks(path)
            return
        raise ValueError(
            f"{path.parent} is being worked on by {_holder(descriptor)}: wait for it to end, or choose another folder "
            "with --out"
        ) from None


def _holder(descriptor: int) -> str:
    """Name the process that holds a lock, as far as the file says."""
    with suppress(ValueError, KeyError, TypeError, OSError):
        owner = json.loads(os.read(descriptor, 4096))
        return f"process {int(owner['process'])} on {str(owner['host'])!r}, since {owner['since']}"
    return "another process"


def _is_at(path: Path, descriptor: int) -> bool:
    """Tell whether the open file is the one that has this name now."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _warn_of_no_locks(path: Path) -> None:
    warnings.warn(
        f"{path.parent} cannot be locked on this system: see to it that no other process works in it", stacklevel=4
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
