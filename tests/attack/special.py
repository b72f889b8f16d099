"""Things in the place of a file that are no regular file: links, pipes, devices, folders, sockets."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

Special = Callable[[Path], None]


def link(path: Path) -> None:
    """A link to the untouched file, which is as good as the file."""
    path.rename(target := path.with_name(f"{path.name}.target"))
    path.symlink_to(target)


def _link_to(target: str) -> Special:
    def make(path: Path) -> None:
        path.unlink()
        path.symlink_to(target.format(name=path.name))

    return make


def fifo(path: Path) -> None:
    """A pipe that nobody writes to: opening it waits for ever."""
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unix_socket(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is at most 108 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path) -> None:
    """A node of /dev/zero, or a link to it for those who may make none."""
    path.unlink()
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        path.open("rb").close()
    except PermissionError:
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/zero")


MISSING = ("link-to-nothing", "link-to-itself")  # a file that is not there, which some files may be
SPECIALS: dict[str, Special] = {
    "link": link,
    "link-to-zero": _link_to("/dev/zero"),
    "link-to-nothing": _link_to("nothing-of-that-name"),
    "link-to-itself": _link_to("{name}"),
    "link-to-proc": _link_to("/proc/self/mem"),
    "fifo": fifo,
    "folder": folder,
    "socket": unix_socket,
    "device": device,
}
