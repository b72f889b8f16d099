"""run_lock(): a lock that lets one process at a time work in a run folder.

It is a lock of the operating system (`flock`) on the file `run.lock`, which ends with the process that holds it,
however that ends: a `run.lock` that a killed process has left locks nothing. Where there are no such locks (Windows,
some network file systems) a warning says so.
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
LOCKED_ERRORS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
ATTEMPTS = 100  # other processes may remove the folder just before it is used, but hardly so often in a row


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which is created if missing; raise a ValueError if another process holds it."""
    path = folder / LOCK
    descriptor = _open_locked(path)
    try:
        yield
    finally:
        with suppress(OSError):  # Windows does not delete open files
            if _is_at(path, descriptor):  # another process may have deleted the folder and started again
                path.unlink()
        os.close(descriptor)  # releases the lock
        with suppress(OSError):  # a folder that is empty now is removed too
            folder.rmdir()


def _open_locked(path: Path) -> int:
    """Open and lock the lock file; return its descriptor."""
    missing: FileNotFoundError | None = None
    for _ in range(ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o644)
        except FileNotFoundError as error:  # removed by its last holder, or impossible, as in /proc
            missing = error
            continue
        except FileExistsError:  # its last holder removed the folder while mkdir checked that it is one
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
        os.close(descriptor)  # its last holder removed the file after it was opened: this lock is of no use
    raise missing or OSError(f"{path.parent} is created and removed by other processes all the time")


def _lock(path: Path, descriptor: int) -> None:
    """Lock an open file; raise a ValueError if another process holds the lock."""
    if fcntl is None:
        _warn_about_missing_locks(path)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in LOCKED_ERRORS:
            _warn_about_missing_locks(path)
            return
        raise ValueError(
            f"{path.parent} is in use by {_holder(descriptor)}: wait for it to end, or choose another folder with --out"
        ) from None


def _holder(descriptor: int) -> str:
    """Name the process that holds a lock, as far as the lock file says."""
    with suppress(ValueError, KeyError, TypeError, OSError):
        owner = json.loads(os.read(descriptor, 4096))
        return f"process {int(owner['process'])} on {str(owner['host'])!r}, since {owner['since']}"
    return "another process"


def _is_at(path: Path, descriptor: int) -> bool:
    """Tell whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _warn_about_missing_locks(path: Path) -> None:
    warnings.warn(
        f"{path.parent} cannot be locked on this system: make sure that no other process works in it", stacklevel=4
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
